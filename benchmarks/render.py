"""Renders the tables of the documents and the plots from the rows in `results/`; `--check` fails if they differ."""

import argparse
import re
import sys
from functools import partial

from harness import ROOT, read_rows
from plot import LAYERS, PARETO, QUALITY, layers_svg, pareto_svg, quality_svg
from quality_rows import quality_rows
from tables.by_size import by_size_table
from tables.families import families_table, opened_table
from tables.first_run import (
    first_run,
    quick_start_answers,
    quick_start_comparison,
    quick_start_end,
    quick_start_time,
    seconds_of,
)
from tables.gpu import (
    gpu_memory_table,
    gpu_times_table,
    mixture_estimates_table,
    process_estimates_table,
    shared_estimates_table,
)
from tables.gpu_measured import (
    gpu_runs_table,
)
from tables.gpu_quality import accuracy_table, by_model_table
from tables.heal import heal_table
from tables.other_tools import summary_table
from tables.own_text import own_text_table
from tables.paired import paired_parts_table
from tables.pareto import (
    pareto_frontier_table,
    pareto_rows,
    pareto_table,
)
from tables.prose import (
    coder_kinds,
    faster_7b,
    forms_at_fifth,
    headline,
    laid_out_decoding,
    languages,
    little_text,
    more_kinds,
    num_families,
    peers_passes,
    peers_passes_of_mixture,
    seconds_of_7b,
    seconds_of_coder,
    speed_by_parameters,
    speed_by_time,
    stock_of_others,
)
from tables.quality import parts_table, quality_table, tokens_table
from tables.quantise import quantise_table
from tables.runs import memory_table, overhead_table, peers_seconds_table, processes_counted_table
from tables.serve_speed import serve_speed_table
from tables.speed import every_speed_table
from tables.tasks import acceptance_table, written_table
from tables.tensor_types import (
    own_types,
    own_types_lost,
    own_types_span,
    own_types_table,
    own_types_without_unknown,
    size_and_types_table,
    types_alone_table,
    types_speed_table,
)

DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "benchmarks" / "records" / "tables.md",
    ROOT / "docs" / "engines.md",
    ROOT / "docs" / "gpu.md",
    ROOT / "docs" / "guides" / "heal.md",
    ROOT / "docs" / "guides" / "mixtures.md",
    ROOT / "docs" / "guides" / "processes.md",
    ROOT / "docs" / "guides" / "text.md",
    ROOT / "docs" / "llama-cpp.md",
    ROOT / "docs" / "quick-start.md",
    ROOT / "docs" / "recipes" / "oneshot.md",
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "supported-models.md",
)

# table: (function, results file)
TABLES = {
    "summary": (summary_table, "other_tools"),
    "quality": (quality_table, "quality"),
    "tokens": (tokens_table, "quality"),
    "own_text": (own_text_table, "quality"),
    "parts": (parts_table, "quality"),
    "written": (written_table, "quality"),
    "acceptance": (acceptance_table, "little_text"),
    "every_speed": (every_speed_table, "speed"),
    "paired_parts": (paired_parts_table, "quality"),
    "overhead": (overhead_table, "overhead"),
    "peers_seconds": (peers_seconds_table, "peers_seconds"),
    "memory": (memory_table, "memory"),
    "own_types": (own_types_table, "tensor_types"),
    "types_alone": (types_alone_table, "types_speed"),
    "types_speed": (types_speed_table, "types_speed"),
    "size_and_types": (size_and_types_table, "size_and_types"),
    "pareto": (pareto_table, "pareto"),
    "pareto_frontier": (pareto_frontier_table, "pareto"),
    "serve_speed": (serve_speed_table, "serve_speed"),
    "gpu_runs": (gpu_runs_table, "gpu"),
    "heal": (heal_table, "gpu"),
    "by_model": (by_model_table, "gpu"),
    "by_size": (by_size_table, "gpu"),
    "accuracy": (accuracy_table, "gpu"),
    "first_run": (first_run, "first_run"),
    "quick_start_end": (quick_start_end, "first_run"),
    "quick_start_answers": (quick_start_answers, "first_run"),
    "quick_start_comparison": (quick_start_comparison, "first_run"),
    "gpu_times": (gpu_times_table, "gpu_estimate"),
    "gpu_memory": (gpu_memory_table, "gpu_estimate"),
    "mixture_estimates": (mixture_estimates_table, "gpu_estimate"),
    "shared_estimates": (shared_estimates_table, "gpu_estimate"),
    "quantise": (quantise_table, "quantise"),
    "processes_counted": (processes_counted_table, "processes_counted"),
    "process_estimates": (process_estimates_table, "gpu_estimate"),
}

# numbers inside sentences
VALUES = {
    "headline": headline,
    "forms_at_fifth": forms_at_fifth,
    "num_families": num_families,
    "own_types": own_types,
    "own_types_lost": own_types_lost,
    "own_types_span": own_types_span,
    "own_types_without_unknown": own_types_without_unknown,
    "seconds_of_7b": seconds_of_7b,
    "seconds_of_coder": seconds_of_coder,
    "faster_7b": faster_7b,
    "stock_of_others": stock_of_others,
    "speed_by_time": speed_by_time,
    "speed_by_parameters": speed_by_parameters,
    "laid_out_decoding": laid_out_decoding,
    "coder_kinds": coder_kinds,
    "languages": languages,
    "little_text": little_text,
    "more_kinds": more_kinds,
    "peers_passes": peers_passes,
    "peers_passes_of_mixture": peers_passes_of_mixture,
    "quick_start_time": quick_start_time,
    **{f"quick_start_{name}": partial(seconds_of, name) for name in ("dry_run", "chat", "evaluation")},
}
WITHOUT_ROWS = {"families": families_table, "opened": opened_table}


def table(name: str) -> str:
    """Return the named table, of the newest rows if it has numbers."""
    if name in WITHOUT_ROWS:
        return WITHOUT_ROWS[name]()
    make, results = TABLES[name]
    return make() if read_rows(results) else "Not measured yet."


def render(text: str) -> str:
    """Return the text with a new table in every `<!-- table: NAME -->` … `<!-- end -->` block, and every new value."""
    text = re.sub(
        r"(<!-- value: (\w+) -->).*?(<!-- end -->)", lambda match: match[1] + VALUES[match[2]]() + match[3], text
    )
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
    stale = False
    for document in DOCUMENTS:
        before = document.read_text()
        after = render(before)
        stale = stale or before != after
        if not check:
            document.write_text(after)
    drawings = {}
    if rows := quality_rows():
        drawings |= {QUALITY: quality_svg(rows[0]), LAYERS: layers_svg(rows)}
    if files := pareto_rows():
        drawings |= {PARETO: pareto_svg(files)}
    for path, drawing in drawings.items():
        stale = stale or not path.exists() or path.read_text() != drawing
        if not check:
            path.write_text(drawing)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
