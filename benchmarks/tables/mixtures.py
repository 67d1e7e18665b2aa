"""Tables of the mixtures that `train_mixture.py` and `split_mixture.py` make, and of what `mixtures.py` removes."""

import math
from statistics import fmean, stdev

from harness import Row, latest, read_rows
from judging import KINDS

from tables.cells import markdown, origin, rounded, token_span
from tables.gpu_quality import MODEL_TITLES

SELECTORS = {
    "frequency": "frequency",
    "reap": "REAP",
    "hope": "HOPE",
    "man": "MAN",
    "energy": "energy",
    "random": "random",
    "effects": "joint effects",
    "pivots": "pivots",
    "own widths": "pivots, own widths by layer",
    "own widths by curvature": "pivots, own widths by layer, output curvature",
    "own counts": "joint effects, own numbers by layer",
    "own counts and widths": "joint effects and pivots, own numbers and widths by layer",
    "own sizes": "pivots, own widths and ranks by layer, output curvature",
}
CORRECTIONS = {
    "none": "–",
    "separable": "each expert by itself",
    "joint": "all experts together",
    "engine none": "`oneshot`, none",
    "engine same-layer": "`oneshot`, same-layer",
    "engine two-stream": "`oneshot`, two-stream",
}
ROUTERS = {
    "none": "–",
    "gain": "a factor for each expert",
    "ideal": "ridge regression towards ideal gates",
    "newton": "Gauss–Newton step",
    "kronecker": "Gauss–Newton step, Kronecker product",
}
KEYS = ("model", "part", "selector", "correction", "residual_weight", "share", "calibration_tokens", "seed", "router")
VARIANT = ("part", "selector", "correction", "residual_weight", "router")


def mixtures_table(model: str) -> str:
    """Return the variants of a mixture, a column for every share of the experts' parameters."""
    rows = [row for row in rows_of_mixture(model) if row["router"] == "none"]
    if not rows:
        return "Not measured yet."
    counts = sorted({row["calibration_tokens"] for row in rows})
    if model == "trained":  # the other counts have a table of their own
        counts = [usual_tokens(rows)]
    rows = [row for row in rows if row["calibration_tokens"] in counts]
    shares, has_own = sorted({row["share"] for row in rows}), "own text" in rows[0]["ratios"]
    header = ["tokens", "removed", "chosen by", "correction", *_columns(shares, has_own)]
    lines = [
        [
            f"{count:,}",
            same[0]["part"],
            SELECTORS[same[0]["selector"]],
            _correction(same[0]),
            *_scores(same, shares, has_own),
        ]
        for count in counts
        for same in _alike([row for row in rows if row["calibration_tokens"] == count])
    ]
    texts = rows[0]["texts"]
    own = f"; own text: {texts['own text']['tokens']:,} tokens held out from its training text" if has_own else ""
    caption = (
        "Perplexity ÷ the whole mixture's, geometric mean over five kinds of text, by the removed share of the "
        f"experts' parameters; whole experts, neurons of every expert, or both{own}. ± is the standard deviation over "
        "seeds, which choose the calibration text, so many tokens; seeds "
        f"{', '.join(map(str, sorted({row['seed'] for row in rows})))}; {origin(rows)}."
    )
    return markdown(header, lines, caption)


def mixture_routers_table() -> str:
    """Return the corrections of the router after whole experts went, for the trained mixture."""
    rows = [row for row in rows_of_mixture("trained") if row["part"] == "experts" and "settings" not in row]
    known = {_kind(row) for row in rows if row["router"] != "none"}
    rows = [row for row in rows if _kind(row) in known]
    shares = sorted({row["share"] for row in rows})
    lines = [
        [SELECTORS[same[0]["selector"]], _correction(same[0]), ROUTERS[same[0]["router"]], *_scores(same, shares, True)]
        for same in _alike(rows)
    ]
    return markdown(
        ("chosen by", "correction of the experts", "correction of the router", *_columns(shares, True)),
        lines,
        "Whole experts of the trained mixture, as above. The router is corrected first, with the same text. A cell "
        "without ± is of seed 0; seeds "
        f"{', '.join(map(str, sorted({row['seed'] for row in rows})))}; {origin(rows)}.",
    )


def mixture_tokens_table() -> str:
    """Return the scores of `oneshot.compress` by the tokens of calibration, for the trained mixture."""
    rows = [row for row in rows_of_mixture("trained") if "settings" in row and row["share"] == 0.5 and row["seed"] == 0]
    counts = sorted({row["calibration_tokens"] for row in rows})
    lines = []
    for same in _alike(rows):
        by_tokens = {row["calibration_tokens"]: row for row in same}
        if by_tokens.keys() == set(counts):
            names = [same[0]["part"], SELECTORS[same[0]["selector"]], _correction(same[0])]
            lines.append([*names, *(_cell([by_tokens[count]["score"]]) for count in counts)])
    return markdown(
        ("removed", "chosen by", "correction", *(f"{count:,}" for count in counts)),
        lines,
        "Score by the tokens of calibration, −50% of the experts' parameters, seed 0. An expert of the whole mixture "
        f"gets an eighth of the tokens, and has 128 neurons; {origin(rows)}.",
    )


def rows_of_mixture(model: str) -> list[Row]:
    """Return the newest rows of a mixture."""
    rows: list[Row] = [{"router": "none"} | row for row in read_rows("mixtures")]
    return [row for row in latest(rows, *KEYS) if row["model"] == model]


def _kind(row: Row) -> tuple[object, ...]:
    """Return what rows have in common that differ in the router alone."""
    return tuple(row[key] for key in KEYS if key != "router")


def _columns(shares: list[float], has_own: bool) -> list[str]:
    """Return the names of two columns for a share of the experts' parameters, or of one."""
    return [name for share in shares for name in (f"−{share:.0%}", f"−{share:.0%}, own text")[: 1 + has_own]]


def _scores(same: list[Row], shares: list[float], has_own: bool) -> list[str]:
    """Return these columns of rows that differ in share and seed."""
    cells = []
    for share in shares:
        of_share = [row for row in same if row["share"] == share]
        cells.append(_cell([row["score"] for row in of_share]))
        if has_own:
            cells.append(_cell([row["ratios"]["own text"] for row in of_share]))
    return cells


def usual_tokens(rows: list[Row]) -> int:
    """Return the calibration tokens of most rows."""
    counts = [row["calibration_tokens"] for row in rows]
    return max(counts, key=counts.count)


def _cell(values: list[float]) -> str:
    """Return a mean, and its standard deviation over seeds if there are several."""
    if not values:
        return "–"
    return rounded(fmean(values)) + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def mixture_split_table() -> str:
    """Return the mixtures that were cut from a dense model."""
    rows = latest(read_rows("mixture_split"), "model", "num_experts", "top_k", "num_shared")
    lines = [
        [
            MODEL_TITLES.get(row["model"], row["model"]),
            f"{row['num_shared'] + row['num_experts'] * row['expert_width']:,}",
            "Qwen2-MoE" if row["num_shared"] else "Mixtral",
            f"{row['top_k']} of {row['num_experts']}",
            f"{row['num_shared']:,}",
            *(rounded(row["perplexity"][kind] / row["dense_perplexity"][kind]) for kind in KINDS),
            rounded(row["score"]),
            f"{row['captured_energy']:.0%} of {row['best_energy']:.0%}",
            f"{row['least_share']:.0%} to {row['largest_share']:.0%}",
        ]
        for row in rows
    ]
    return markdown(
        (
            "model",
            "neurons",
            "class",
            "active experts",
            "shared neurons",
            *KINDS.values(),
            "score",
            "energy of the chosen, of the best",
            "tokens of an expert",
        ),
        lines,
        "Dense models whose FFNs were cut into experts: perplexity ÷ the dense model's, and the share of the routed "
        "neurons' energy that the router's experts have, beside the best experts of every token. "
        f"Fitted on {token_span(row['split_tokens'] for row in rows)} tokens; {origin(rows)}.",
    )


def mixture_training_table() -> str:
    """Return the loss of the trained mixture by step, and a caption with the shares of its experts."""
    rows = latest(read_rows("mixture_training"), "model", "seed", "step")
    curve = [row for row in rows if "step" in row]
    final = next(row for row in reversed(rows) if "expert_tokens" in row)
    lines = [
        [
            f"{row['step']:,}",
            f"{row['seen_tokens']:,}",
            f"{row['loss']:.2f}",
            f"{row['held_out_loss']:.2f}",
            f"{min(row['load_entropy']):.2f}",
        ]
        for row in curve
    ]
    shares = [count / sum(counts) for counts in final["expert_tokens"] for count in counts]
    shape = final["shape"]
    return markdown(
        ("step", "tokens", "loss", "loss on held-out text", "least entropy of a layer's load"),
        lines,
        f"A Qwen3-MoE with {final['parameters']:,} parameters: {shape['num_hidden_layers']} layers, hidden size "
        f"{shape['hidden_size']}, {shape['num_experts']} experts of {shape['moe_intermediate_size']} neurons, "
        f"{shape['num_experts_per_tok']} active. Nats per token. At the end the loss on {final['held_out_tokens']:,} "
        f"held-out tokens is {final['held_out_loss']:.3f} (perplexity {math.exp(final['held_out_loss']):.1f}), and an "
        f"expert has {min(shares):.1%} to {max(shares):.1%} of its layer's tokens ({1 / shape['num_experts']:.1%} if "
        f"shared equally); {origin(rows)}.",
    )


def _alike(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of every variant, whole experts first, without a correction first."""
    variants: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        variants.setdefault(tuple(row.get(key) for key in VARIANT), []).append(row)
    orders = {name: place for place, name in enumerate(CORRECTIONS)}
    return sorted(variants.values(), key=lambda same: (same[0]["part"], orders[same[0]["correction"]]))


def _correction(row: Row) -> str:
    weight = row.get("residual_weight", 1)
    share = "" if weight == 1 or row["correction"] == "none" else f", {weight} of the residual"
    return CORRECTIONS[row["correction"]] + share
