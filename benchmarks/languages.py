"""Judge results of a real model on other languages than English, beside the five kinds of text and code.

The results are there already. A row for each goes to `results/languages.jsonl`. The texts, two paragraphs of each
language, are in `languages.jsonl`, which no calibration text has.
"""

import json
import tempfile
from pathlib import Path

import torch
from harness import ROOT, append_row, own_settings, parser, provenance
from judging import CODE, KINDS, judge, judging_windows, losses, score, text_records, text_scores
from quality import given_results, result_row
from real_models import FOLDER, NAMES, fetch

from oneshot.checkpoint import locate_checkpoint
from oneshot.evaluation import load_windows
from oneshot.text import load_tokenizer

TEXTS = ROOT / "benchmarks" / "languages.jsonl"
WINDOW, WINDOWS = 128, 2  # of a language


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", choices=sorted(NAMES), required=True, help="of real_models.py: the dense model")
    options.add_argument("--results", type=Path, nargs="+", required=True)
    options.add_argument("--labels", nargs="+", required=True, help="what each result is in the rows")
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--max-windows", type=int, default=1, help="of each kind of English")
    arguments = options.parse_args()
    if len(arguments.labels) != len(arguments.results):
        options.error("--labels has a label for each of --results")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense = locate_checkpoint(str(fetch(arguments.model, FOLDER)), folder)
        tokenizer = load_tokenizer(dense)
        windows = judging_windows(arguments.data_dir, folder, tokenizer, arguments.max_windows, kinds=(*KINDS, CODE))
        for line in TEXTS.read_text(encoding="utf-8").splitlines():
            row, path = json.loads(line), folder / "language.txt"
            path.write_text(row["text"], encoding="utf-8")
            windows[row["language"]] = load_windows(str(path), tokenizer, sequence_length=WINDOW, max_windows=WINDOWS)
        reports = given_results(arguments.results)
        shared = provenance(model=arguments.model, texts=text_records(windows))
        of_dense = losses(text_scores([dense], windows)[0])
        append_row("languages", shared | {"recipe": "dense", "sparsity": 0.0} | of_dense)
        english = {kind: of_dense["perplexity"][kind] for kind in (*KINDS, CODE)}
        judged = judge(reports, windows, dense)
        for label, report, measured in zip(arguments.labels, reports, judged, strict=True):
            row = {"label": label} | result_row(report, own_settings(report.to_dict())) | measured
            own = {kind: measured["perplexity"][kind] for kind in english}
            append_row("languages", shared | row | score(own, english))


if __name__ == "__main__":
    main()
