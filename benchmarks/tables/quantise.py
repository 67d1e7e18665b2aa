"""The table of results that were quantised by other tools."""

from harness import Row, latest, read_rows

from tables.cells import markdown, origin

NAMES = {
    "none": "none (bfloat16)",
    "gptq": "GPTQ, W4A16",
    "awq": "AWQ, W4A16",
    "gptq-w8a8": "GPTQ, W8A8",
    "smoothquant": "SmoothQuant, W8A8",
    "fp8": "FP8, dynamic",
    "torchao-int8": "torchao, int8",
    "torchao-int4": "torchao, int4 in a byte",
    "bitsandbytes-int8": "bitsandbytes, int8",
    "bitsandbytes-nf4": "bitsandbytes, NF4",
}
FORMS = ("dense", "stock", "nemotron-nas", "per-layer")


def quantise_table() -> str:
    """Return bytes and perplexity ÷ the dense model's, by quantisation and form."""
    rows = latest(read_rows("quantise"), "form", "method")
    found = {(row["form"], row["method"]): row for row in rows}
    dense = found["dense", "none"]

    def cell(form: str, method: str) -> str:
        row: Row | None = found.get((form, method))
        if row is None:
            return "–"
        return f"{row['perplexity'] / dense['perplexity']:.2f} ({row['weight_bytes'] / 1e6:.0f} MB)"

    forms = [form for form in FORMS if (form, "none") in found]
    lines = [[name, *(cell(form, method) for form in forms)] for method, name in NAMES.items()]
    compressed = next(row for row in rows if row["form"] != "dense")
    tools = ", ".join(f"{name} {number}" for name, number in dense["tools"].items())
    return markdown(
        ["quantised by", *forms],
        lines,
        f"Perplexity ÷ the dense model's {dense['perplexity']:.2f}, and bytes of the weight files. {dense['model']}, "
        f"compressed by {compressed['sparsity']:.0%} from little text ({compressed['calibration_tokens']:,} tokens of "
        f"{compressed['calibration']}): read down a column (–: not measured), and see the results "
        f"for the quality of compression. First {dense['windows']} windows of 512 tokens of WikiText-2's test text, "
        "in bfloat16; groups of 64; all files are opened by transformers; "
        f"{tools}; {origin(rows)}.",
    )
