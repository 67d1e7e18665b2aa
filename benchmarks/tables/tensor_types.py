"""Types per tensor beside llama-quantize's, and beside removed parameters, at equal bytes."""

import math
from collections.abc import Sequence

from harness import Row, latest, read_rows
from judging import ALONE, OWN_TYPES, WITHOUT_UNKNOWN

from oneshot.export.quantisers import TYPES
from tables.cells import markdown, origin, token_span

SMOL, CODER = "SmolLM2-135M", "Qwen2.5-Coder-0.5B"


def own_types() -> str:
    """Return the divergence of types per tensor ÷ the divergence of llama-quantize's files, of two models."""
    return f"{_shares(SMOL, 'divergence')}, and {CODER} {_shares(CODER, 'divergence')}"


def own_types_span() -> str:
    """Return the least and the largest such share of all models and types."""
    newest = _newest()
    shares = [
        share
        for model in dict.fromkeys(row["model"] for row in newest)
        for share in _shares_of(newest, model, "divergence").values()
    ]
    return f"{min(shares):.2f} to {max(shares):.2f}"


def own_types_lost() -> str:
    """Return the same of the log-loss, whose error is larger: its mean over texts is a small difference."""
    return f"{_shares(SMOL, 'lost_nats')}, and {CODER} {_shares(CODER, 'lost_nats')}"


def own_types_without_unknown() -> str:
    """Return the log-loss of both files at Q4_K_M on WikiText-2 without `<unk>`, with standard errors."""
    rows = latest([row for row in read_rows("tensor_types") if row["text"] == WITHOUT_UNKNOWN], "model", "types")
    lost = {row["types"]: f"{row['lost_nats']:.3f} ± {row['lost_nats_error']:.3f}" for row in rows}
    return f"{lost[f'{OWN_TYPES}Q4_K_M']} nats, and llama-quantize's {lost['Q4_K_M']}"


def own_types_table() -> str:
    """Return bytes, divergence and log-loss of both files, model by model."""
    lines, newest = [], _newest()
    for model, kind in dict.fromkeys((row["model"], row["types"]) for row in newest):
        theirs, ours = (_rows(newest, model, name) for name in (kind, f"{OWN_TYPES}{kind}"))
        if not ours or len(ours) < len(theirs):  # not measured to the end
            continue
        cells = [model, kind, f"{theirs[0]['bytes'] / 1e6:.1f}"]
        cells += [_beside(ours, theirs, measure, ".3f") for measure in ("divergence", "lost_nats")]
        by_text = {row["text"]: row["lost_nats"] for row in theirs}
        shares = [row["lost_nats"] / by_text[row["text"]] for row in ours if by_text[row["text"]] > 0]
        lines.append([*cells, f"{max(shares):.2f}", str(len(ours))])
    chunks = token_span({row["chunks"] for row in newest})
    return markdown(
        [
            "model",
            "file of llama-quantize",
            "MB",
            "divergence, ours / theirs",
            "log-loss, ours / theirs",
            "worst text",
            "texts",
        ],
        lines,
        "Nats a token more than F16, mean over the texts, and the log-loss ÷ theirs of the worst of them. Both have an "
        f"importance matrix of the same {token_span({row['calibration_tokens'] for row in newest})} tokens of "
        f"{newest[0]['calibration']}; {chunks} chunks of 512 tokens of each of "
        f"{', '.join(dict.fromkeys(row['text'] for row in newest))}, by "
        f"llama-perplexity; {origin(newest)}.",
    )


def size_and_types_table() -> str:
    """Return the score of one choice of parameters and types beside types alone, size by size."""
    rows = latest(read_rows("size_and_types"), "model", "size", "asked")
    by_asked = {(row["model"], row["size"], row["asked"]): row for row in rows}
    lines = []
    for model, size in dict.fromkeys((row["model"], row["size"]) for row in rows):
        free, alone = (by_asked.get((model, size, asked)) for asked in ("free", "0"))
        if free is None:
            continue
        cells = [model, f"{free['file_bytes'] / 1e6:.1f}", f"{free['sparsity']:.1%}", f"{_score(free):.3f}"]
        lines.append([*cells, "too small" if alone is None else f"{_score(alone):.3f}"])
    first = rows[0]
    return markdown(
        ["model", "MB", "parameters that go", "perplexity", "types alone"],
        lines,
        f"Perplexity ÷ the dense model's, geometric mean over {', '.join(first['perplexity'])}. Both from the same "
        f"profile of {token_span({row['calibration_tokens'] for row in rows})} tokens of {first['calibration']}; "
        f"{origin(rows)}.",
    )


def types_speed_table() -> str:
    """Return tokens for each CPU second of both files, type by type."""
    rows = latest(read_rows("types_speed"), "model", "types")
    lines = []
    for theirs in rows:
        ours = _rows(rows, theirs["model"], f"{OWN_TYPES}{theirs['types']}")
        if not ours:
            continue
        speeds = [_beside(ours, [theirs], f"{each}_tokens_per_cpu_second", ".0f") for each in ("prefill", "decode")]
        lines.append([theirs["model"], theirs["types"], f"{theirs['bytes'] / 1e6:.1f}", *speeds])
    whole = [
        f"{row['model']} {row['prefill_tokens_per_cpu_second']:.0f} and {row['decode_tokens_per_cpu_second']:.0f}"
        for row in rows
        if row["types"] == "F16"
    ]
    return markdown(
        ["model", "file of llama-quantize", "MB", "prefill, ours / theirs", "decoding, ours / theirs"],
        lines,
        f"Tokens for each CPU second, the best of {token_span({row['rounds'] for row in rows})} rounds of "
        f"llama-bench (512 tokens, and 64 tokens written). In F16: {'; '.join(whole)}. {origin(rows)}.",
    )


def types_alone_table() -> str:
    """Return tokens for each CPU second of files with one type, and the seconds that a choice of types counts."""
    of_speed = read_rows("types_speed")
    rows = latest([row for row in of_speed if row["types"].endswith(ALONE)], "model", "types")
    lines = []
    for row in rows:
        kind = row["types"].removesuffix(ALONE)
        speeds = [f"{row[f'{each}_tokens_per_cpu_second']:.0f}" for each in ("prefill", "decode")]
        lines.append([kind, f"{row['bytes'] / 1e6:.1f}", *speeds, f"{TYPES[kind]:.2f}"])
    [model] = {row["model"] for row in rows}
    before = of_speed[: of_speed.index(rows[0])]
    whole = [row for row in before if row["types"] == "F16"][-1]  # of the same run
    return markdown(
        ["type", "MB", "prefill", "decoding", "seconds"],
        lines,
        f"{model}, all matrices in the type: tokens for each CPU second, the best of "
        f"{token_span({row['rounds'] for row in rows})} rounds of llama-bench. Seconds: of prefill and of "
        f"decoding, each ÷ F16's ({whole['prefill_tokens_per_cpu_second']:.0f} and "
        f"{whole['decode_tokens_per_cpu_second']:.0f} tokens), added. {origin(rows)}.",
    )


def _newest() -> list[Row]:
    """Return the newest rows, of each model those with the settings of its last one, larger files first."""
    rows = [row for row in read_rows("tensor_types") if "divergence" in row and row["text"] != WITHOUT_UNKNOWN]
    settings = {row["model"]: (row["chunks"], row["calibration_tokens"]) for row in rows}
    rows = [row for row in rows if (row["chunks"], row["calibration_tokens"]) == settings[row["model"]]]
    return sorted(latest(rows, "model", "types", "text"), key=lambda row: (str(row["model"]), -row["bytes"]))


def _rows(rows: Sequence[Row], model: str, types: str) -> list[Row]:
    return [row for row in rows if (row["model"], row["types"]) == (model, types)]


def _mean(rows: Sequence[Row], measure: str) -> float:
    return sum(float(row[measure]) for row in rows) / len(rows)


def _beside(ours: Sequence[Row], theirs: Sequence[Row], measure: str, digits: str) -> str:
    own, other = _mean(ours, measure), _mean(theirs, measure)
    return f"{own:{digits}} / {other:{digits}} = **{own / other:.2f}**"


def _score(row: Row) -> float:
    ratios = [row["perplexity"][kind] / row["dense_perplexity"][kind] for kind in row["perplexity"]]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _shares(name: str, measure: str) -> str:
    rows = _newest()
    [model] = {row["model"] for row in rows if row["model"].startswith(name)}
    return ", ".join(f"{share:.2f} at {kind}" for kind, share in _shares_of(rows, model, measure).items())


def _shares_of(rows: Sequence[Row], model: str, measure: str) -> dict[str, float]:
    """Return a measure of a model's files, divided by llama-quantize's, by the type of these."""
    kinds = dict.fromkeys(row["types"] for row in rows if row["model"] == model)
    return {
        kind: _mean(ours, measure) / _mean(_rows(rows, model, kind), measure)
        for kind in kinds
        if (ours := _rows(rows, model, OWN_TYPES + kind))
    }
