"""The verdict on a mixture: its record, which reports and profiles have, in words and in rows of a table."""

from typing import Any

from oneshot.planning import MixtureVerdict
from oneshot.planning.mixture import rise_of

SHOWN = 8  # rows of a table
COLUMNS = ("removed", "experts", "perplexity", "width", "perplexity", "loses less")
OPEN = (
    "Open: no large mixture was measured. Of Qwen3-30B-A3B, uncorrected, it is published that 96 of 128 experts keep "
    ".740 of MMLU and a width of 512 of 768 keeps .630; the small mixtures that were trained for this project say the "
    "opposite. Measure both on text of your own before you rely on either."
)
EQUAL_LAYERS = "Sizes are equal in all layers, and what stays is corrected; shares are of the stored parameters."


def verdict_record(verdict: MixtureVerdict) -> dict[str, Any]:
    """Return the verdict as JSON values: predicted losses in nats per token, and the rises of the perplexity."""
    return {
        "num_experts": verdict.num_experts,
        "num_experts_per_tok": verdict.per_token,
        "intermediate_size": verdict.intermediate_size,
        "cheaper": verdict.cheaper,
        "allowed": verdict.allowed,
        "sizes": [
            {
                "removed": size.removed,
                "num_experts": size.num_experts,
                "intermediate_size": size.intermediate_size,
                "fewer": {"nats": size.fewer, "rise": rise_of(size.fewer)},
                "narrower": {"nats": size.narrower, "rise": rise_of(size.narrower)},
                "cheaper": size.cheaper,
            }
            for size in verdict.sizes
        ],
        "experts": verdict.routed,
        "unseen_experts": verdict.unseen,
        "sentences": _sentences(verdict),
    }


def _sentences(verdict: MixtureVerdict) -> list[str]:
    """Return what a verdict says, the doubt about it last."""
    sentences = [_cheaper(verdict), *map(_allowed, verdict.allowed, verdict.allowed.values()), EQUAL_LAYERS]
    if verdict.unseen:
        sentences.append(
            f"{verdict.unseen} of {verdict.routed} experts got no token of the profile's text: what they cost is "
            "unknown, and counts as nothing; profile with text of every kind that the model is for."
        )
    return [*sentences, OPEN]


def _cheaper(verdict: MixtureVerdict) -> str:
    if not verdict.sizes:
        return (
            "Narrower experts are not compared with fewer ones, because they meet no size that a layer with fewer has."
        )
    if verdict.cheaper == "equal":
        return "Narrower and fewer experts are predicted to lose the same at equal stored size."
    if verdict.cheaper is not None:
        name = {"narrower": "Narrower", "fewer": "Fewer"}[verdict.cheaper]
        option = {"narrower": "the default", "fewer": "--set experts=effects --set ffn=none"}[verdict.cheaper]
        return f"{name} experts are predicted to lose less at every stored size ({option})."
    turns = [size for size in verdict.sizes if size.cheaper != "equal"]
    turn = next(size for size in turns if size.cheaper != turns[0].cheaper)
    if any(size.cheaper == turns[0].cheaper for size in turns[turns.index(turn) :]):
        return "Whether narrower or fewer experts are predicted to lose less changes more than once with the size."
    return (
        f"At equal stored size {turns[0].cheaper} experts are predicted to lose less, but {turn.cheaper} ones from "
        f"−{turn.removed:.0%} on."
    )


def _allowed(rise: str, shares: dict[str, float]) -> str:
    """Return how much may go for an allowed rise of the perplexity."""
    narrower, fewer = (f"−{shares[way]:.1%}" if shares[way] else "nothing" for way in ("narrower", "fewer"))
    return (
        f"For a perplexity of +{float(rise):.0%} at most, {narrower} may go by narrower experts, or {fewer} by fewer."
    )


def mixture_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return rows of `COLUMNS`, at most `SHOWN`, the smallest and the largest size among them."""
    sizes = record["sizes"]
    if len(sizes) > SHOWN:
        sizes = [sizes[round(place * (len(sizes) - 1) / (SHOWN - 1))] for place in range(SHOWN)]
    return [
        (
            f"−{size['removed']:.1%}",
            f"{size['num_experts']} of {record['num_experts']}",
            _risen(size["fewer"]["rise"]),
            f"{size['intermediate_size']:.0f} of {record['intermediate_size']}",
            _risen(size["narrower"]["rise"]),
            size["cheaper"],
        )
        for size in sizes
    ]


def _risen(rise: float) -> str:
    return f"+{rise:.1%}" if rise < 10 else "> +1000%"
