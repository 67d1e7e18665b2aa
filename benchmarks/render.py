"""Renders the README's tables from the rows in `results/`; `--check` fails where the README differs from them."""

import argparse
import re
import sys
from typing import Any

from harness import ROOT, read_rows

README = ROOT / "README.md"


def latest(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The newest row for every combination of the keys, in the order of first appearance."""
    return list({tuple(str(row.get(key)) for key in keys): row for row in rows}.values())


def quality_table() -> str:
    rows = latest([row for row in read_rows("quality") if not row.get("settings")], "recipe", "asked", "calibration")
    dense = next(row for row in rows if row["recipe"] == "dense")["perplexity"]
    lines = [
        "| stored removed | method | calibration | WikiText-2 | × dense | LAMBADA text | × dense |",
        "|---|---|---|---|---|---|---|",
        f"| 0 (134.5 M) | dense | – | {dense['wikitext2']:.2f} | 1 | {dense['lambada']:.2f} | 1 |",
    ]
    compressed = [row for row in rows if row["recipe"] != "dense"]
    for row in sorted(compressed, key=_order):
        scores = row["perplexity"]
        tokens = row["calibration_tokens"]
        name = f"**{row['recipe']}**" if row["recipe"] == "oneshot" else f"{row['recipe']}, no correction"
        source = "none" if tokens is None else f"{row['calibration']}, {tokens // 1024} × 1024"
        cells = [f"{_round(scores[text])} | {_round(scores[text] / dense[text])}" for text in ("wikitext2", "lambada")]
        lines.append(f"| {row['sparsity']:.1%} | {name} | {source} | {' | '.join(cells)} |")
    row = rows[0]
    lines.append("")
    lines.append(
        f"{row['model']}, fp32, first {row['max_windows']} windows of {row['sequence_length']} tokens, "
        f"{row['device']}, {row['threads']} threads; commits {_commits(rows)}."
    )
    return "\n".join(lines)


def overhead_table() -> str:
    rows = latest(read_rows("overhead"), "recipe")
    lines = [
        "| recipe | tokens | one dense forward pass | compression | ratio | costliest operators |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        forward = sum(row["forward_seconds"]) / len(row["forward_seconds"])
        operators = list(row["operator_seconds"].items())
        total = sum(row["operator_seconds"].values())
        shares = ", ".join(f"`{name.removeprefix('aten::')}` {seconds / total:.0%}" for name, seconds in operators[:4])
        lines.append(
            f"| {row['recipe']} | {row['num_tokens']:,} | {forward:.1f} s | {row['compress_seconds']['total']:.1f} s "
            f"| {row['ratio']:.2f} | {shares} |"
        )
    lines += ["", f"{rows[0]['model']}, {rows[0]['device']}, {rows[0]['threads']} threads; commits {_commits(rows)}."]
    return "\n".join(lines)


def memory_table() -> str:
    rows = latest(read_rows("memory"), "recipe")
    lines = [
        "| recipe | weights | activation store | peak above imports | (peak − store) ÷ weights |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['recipe']} | {row['weight_bytes'] / 1e9:.2f} GB | {row['store_bytes'] / 1e9:.3f} GB "
            f"| {row['above_imports_bytes'] / 1e9:.2f} GB | {row['ratio']:.2f} |"
        )
    lines += [
        "",
        f"{rows[0]['model']}, {rows[0]['num_tokens']:,} tokens, shards of {rows[0]['max_shard_bytes'] // 10**6} MB; "
        f"commits {_commits(rows)}.",
    ]
    return "\n".join(lines)


def sketch_table() -> str:
    rows = latest(read_rows("sketch_quality"), "pivoting", "sketch", "sketch_rows_per_column")
    exact = next(row for row in rows if (row["pivoting"], row["sketch"]) == ("cholesky", "none"))["perplexity"]
    lines = [
        "| pivots from | pivoting | WikiText-2 | ÷ exact | LAMBADA text | ÷ exact |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = row["sketch_rows_per_column"]
        source = "exact Gram" if row["sketch"] == "none" else f"{row['sketch']} sketch, {times} n rows"
        scores = row["perplexity"]
        cells = [f"{scores[text]:.2f} | {scores[text] / exact[text]:.3f}" for text in ("wikitext2", "lambada")]
        lines.append(f"| {source} | {row['pivoting']} | {' | '.join(cells)} |")
    lines.append("")
    lines.append(
        f"{rows[0]['model']} at FFN width 1024 (−19.7 %), {rows[0]['calibration_tokens']:,} dense-stream tokens, "
        f"first {rows[0]['max_windows']} windows; commits {_commits(rows)}."
    )
    return "\n".join(lines)


def _order(row: dict[str, Any]) -> tuple[bool, float, float]:
    """By calibration text, then size, then quality."""
    return row["calibration"] != "general.jsonl", row["asked"], row["perplexity"]["wikitext2"]


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _commits(rows: list[dict[str, Any]]) -> str:
    return ", ".join(sorted({row["commit"] + ("+" if row["dirty"] else "") for row in rows}))


TABLES = {"quality": quality_table, "overhead": overhead_table, "memory": memory_table, "sketch_quality": sketch_table}


def table(name: str) -> str:
    """The table of that name, of the results file of the same name."""
    return TABLES[name]() if read_rows(name) else "Not measured yet."


def render(text: str) -> str:
    """The text with every `<!-- table: NAME -->` … `<!-- end -->` block made anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: match[1] + table(match[2]) + "\n" + match[3],
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true")
    check = options.parse_args().check
    before = README.read_text()
    after = render(before)
    if check:
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
