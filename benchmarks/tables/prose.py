"""Numbers inside sentences of the documents, from rows."""

from harness import Row, latest, read_rows

from oneshot.families import FAMILIES
from tables.gpu_measured import rows_of
from tables.gpu_quality import accuracy, default_row
from tables.other_tools import default_curves
from tables.runs import passes, peers_runs
from tables.speed import newest_rows

FORMS = ("per-layer", "per-layer, expanded")


def headline() -> str:
    """Return what SmolLM2 by default loses at −20 %: the one number that every page quotes."""
    name = "SmolLM2-135M"
    measured = accuracy(name, 0.2)
    tasks = f", accuracy {measured[0]:.1%} → {measured[1]:.1%} in five tasks" if measured else ""
    return f"perplexity × {default_row(name, 0.2)['score']:.2f} on five kinds of text{tasks}"


def forms_at_fifth() -> str:
    """Return what SmolLM2 loses in both forms at −20 %."""
    curves = {form: {row["asked"]: row["score"] for row in rows} for form, rows in default_curves().items()}
    per_layer, stock = (curves[form][0.2] for form in ("per-layer", "stock"))
    return f"{per_layer:.2f} times the dense model's in the per-layer form, and {stock:.2f} times in the stock form"


def num_families() -> str:
    """Return how many families are described."""
    return str(len(FAMILIES))


def seconds_of_7b() -> str:
    """Return how long the newest runs took that compressed a 7B with random weights in both forms."""
    newest = {row["form"]: row["wall_seconds"] for row in rows_of("compress") if row["model"] == "7B"}
    return f"{newest['stock']:.0f} s in the stock form and {newest['per-layer']:.0f} s in the per-layer form"


def seconds_of_coder() -> str:
    """Return how long all sizes of the coder model took."""
    [row] = (row for row in rows_of("quality seconds") if row["section"] == "quality, coder")
    return f"{sum(one['total'] for one in row['seconds']):.0f} seconds"


def stock_of_others() -> str:
    """Return the scores of the coder and of Gemma in the stock form at −20 %."""
    rows = {row["section"]: row for row in rows_of("quality") if row.get("form") == "stock" and row["asked"] == 0.2}
    return " and ".join(f"{rows[f'quality, {name}, stock']['score']:.2f}" for name in ("coder", "gemma"))


def little_text() -> str:
    """Return the scores of the stock form at −20 % from 4,096 tokens: as they are, and with shrinkage, by seed."""
    pairs = dict[int, dict[bool, Row]]()
    for row in read_rows("little_text"):
        model = {"model": "SmolLM2-135M-Instruct", "form": "stock", "dtype": "bfloat16"}
        wanted = model | {"calibration": "general.jsonl", "calibration_tokens": 4096}
        if wanted.items() <= row.items():
            pairs.setdefault(row["seed"], {})[row.get("shrinks", True)] = row
    complete = [pairs[seed] for seed in sorted(pairs) if len(pairs[seed]) == 2]
    found = {
        field: [", ".join(f"{pair[shrinks][field]:.2f}" for pair in complete) for shrinks in (True, False)]
        for field in ("score", "code_ratio")
    }
    return (
        f"scores of {found['score'][0]} instead of {found['score'][1]} with three seeds, and on code "
        f"{found['code_ratio'][0]} instead of {found['code_ratio'][1]} times the perplexity"
    )


def more_kinds() -> str:
    """Return what a quarter of `builtin` in 4,096 tokens changes in the stock form at −20 %, by seed."""
    alone, mixed = "general.jsonl", "general.jsonl+general.jsonl+general.jsonl+builtin"
    pairs = dict[int, dict[str, Row]]()
    for row in read_rows("little_text"):
        wanted = {"model": "SmolLM2-135M-Instruct", "form": "stock", "calibration_tokens": 4096, "settings": {}}
        if wanted.items() <= row.items() and row["calibration"] in (alone, mixed):
            pairs.setdefault(row["seed"], {})[row["calibration"]] = row
    complete = [pairs[seed] for seed in sorted(pairs) if len(pairs[seed]) == 2]
    found = {
        field: [", ".join(f"{pair[text][field]:.2f}" for pair in complete) for text in (mixed, alone)]
        for field in ("score", "code_ratio")
    }
    return (
        f"scores of {found['score'][0]} instead of {found['score'][1]} with {len(complete)} seeds, and on code "
        f"{found['code_ratio'][0]} instead of {found['code_ratio'][1]} times the perplexity"
    )


def coder_kinds() -> str:
    """Return what the coder without a tenth loses on Python and on two other kinds, with an eighth of `builtin`."""
    wanted = {"model": "Qwen2.5-Coder-0.5B-Instruct", "asked": 0.1, "calibration_tokens": 8192}
    wanted["calibration"] = "+".join([*7 * ["general.jsonl"], "builtin"])
    rows = {row["form"]: row["ratios"] for row in read_rows("little_text") if wanted.items() <= row.items()}
    (python, encyclopedia, novels), own = (
        [f"{rows[form][kind]:.2f}" for kind in ("code", "wikitext2", "lambada")] for form in ("stock", "per-layer")
    )
    return (
        f"{python} times the perplexity on Python, {encyclopedia} on WikiText-2 and {novels} on novels, and in the "
        f"per-layer form {', '.join(own[:-1])} and {own[-1]}"
    )


def languages() -> str:
    """Return what Gemma without a fifth loses in other languages, by whether it also writes its own text in them."""
    rows = [row for row in read_rows("languages") if row["recipe"] == "dense" or row["calibration_tokens"] == 65536]
    newest = {row.get("label", "dense"): row for row in rows}
    dense, english = newest.pop("dense")["perplexity"], newest.pop("English openings")["perplexity"]
    in_them, seeds = [row["perplexity"] for row in newest.values()], {row["seed"] for row in newest.values()}
    names = [name for name in dense if name[0].isupper()]  # kinds of English are in small letters

    def spans(of: list[dict[str, float]]) -> str:
        ratios = {name: sorted(perplexity[name] / dense[name] for perplexity in of) for name in names}
        return ", ".join(f"{span(values[0], values[-1])} on {name}" for name, values in ratios.items())

    return (
        f"multiples of the dense model's perplexity: {spans(in_them)}, in {len(in_them)} runs with {len(seeds)} "
        f"seeds. With English openings alone it has {spans([english])}"
    )


def span(least: float, most: float) -> str:
    """Return two ratios as one text; equal ones once."""
    return f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"


def faster_7b() -> str:
    """Return how much faster a smaller 7B in the per-layer form is in CUDA graphs, as it is opened and expanded."""
    rows = [row for row in rows_of("speed") if row.get("model") == "7B" and row["how"] == "CUDA graph"]
    rows = latest(rows, "form", "sequences", "length")
    dense = {(row["sequences"], row["length"]): row for row in rows if row["form"] == "dense"}
    spans = []
    for measure, what in (("prefill_seconds", "prefill"), ("decode_seconds", "decoding")):
        ratios = [
            dense[row["sequences"], row["length"]][measure] / row[measure] for row in rows if row["form"] in FORMS
        ]
        spans.append(f"{what} {min(ratios):.2f} to {max(ratios):.2f} times")
    return " and ".join(spans)


def speed_by_time() -> str:
    """Return the prefill and the score of −20 % in the per-layer form planned by time, and in the stock form."""
    planned, stock = _eager("per-layer", budget="latency"), _eager("stock")
    return (
        f"{planned['prefill_ratio']:.2f} of the dense model's seconds of prefill at a score of {planned['score']:.2f}, "
        f"and the stock form {stock['prefill_ratio']:.2f} at {stock['score']:.2f}"
    )


def speed_by_parameters() -> str:
    """Return the prefill and the score of −20 % in the per-layer form planned by parameters, also of many tokens."""
    short, long = _eager("per-layer"), _eager("per-layer", batch=16, length=2048)
    return (
        f"{short['prefill_ratio']:.2f} at {short['score']:.2f}, but {long['prefill_ratio']:.2f} with 16 × 2,048 tokens"
    )


def laid_out_decoding() -> str:
    """Return how long decoding takes after `lay_out_()` beside before, planned by parameters."""
    before, after = _eager("per-layer"), _eager("per-layer", laid_out=True)
    return f"{after['decode_ratio'] / before['decode_ratio']:.2f}"


def _eager(form: str, *, budget: str = "parameters", batch: int = 1, length: int = 512, laid_out: bool = False) -> Row:
    """Return the row of a file without a fifth, on a CPU in float32 and eager mode."""
    wanted: Row = {"place": "cpu", "dtype": "float32", "mode": "eager", "asked": 0.2, "expanded": None}
    wanted |= {"form": form, "budget": budget, "batch": batch, "length": length, "laid_out": laid_out}
    [row] = (row for row in newest_rows() if wanted.items() <= row.items())
    return row


def peers_passes() -> str:
    """Return how many dense passes over little text each tool's run takes on SmolLM2."""
    ratio = _passes("SmolLM2-135M-Instruct")
    flap, slicegpt, optipfair = (ratio[tool] for tool in ("FLAP", "SliceGPT", "optipfair"))
    return (
        f"FLAP {flap}, optipfair {optipfair}, SliceGPT {slicegpt}, ours {ratio['oneshot, stock']} in the stock form "
        f"and {ratio['oneshot, per-layer']} in the per-layer form. In float32, as the others, ours takes "
        f"{ratio['oneshot, stock, float32']} and {ratio['oneshot, per-layer, float32']}"
    )


def peers_passes_of_mixture() -> str:
    """Return how many dense passes over little text a run takes that makes a small mixture smaller."""
    ratio = _passes("Qwen3-MoE, 6 layers of 32 experts, random weights")
    theirs = (ratio[f"llm-compressor, REAP, {which}"] for which in ("its default", "routed experts alone"))
    ours = (ratio[f"oneshot, REAP's choice, {which}"] for which in ("uncorrected", "corrected"))
    neurons = (ratio[f"oneshot, neurons, {form}"] for form in ("stock", "per-layer"))
    return (
        f"llm-compressor's REAP takes {', or '.join(theirs)} if only routed experts are computed. Ours takes "
        f"{' uncorrected and '.join(ours)} corrected for REAP's choice, and for neurons "
        f"{' in the stock form and '.join(neurons)} in the per-layer form"
    )


def _passes(model: str) -> dict[str, str]:
    """Return the dense passes of the runs of a model, by tool (its first run) and by tool and what goes."""
    found: dict[str, str] = {}
    for rows in peers_runs():
        tool, method = rows[0]["tool"], rows[0]["method"]
        if rows[0]["model"] == model:
            found.setdefault(tool, f"{passes(rows):.1f}")
            found[f"{tool}, {method}"] = f"{passes(rows):.1f}"
    return found
