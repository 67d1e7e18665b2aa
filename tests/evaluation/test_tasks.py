"""lm-eval's tasks over local JSON lines, against our own likelihoods; the evaluation texts of the benchmarks."""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from rows import ShowRows, quality_row

from oneshot.errors import ConfigError
from oneshot.evaluation import load_model, run_tasks, task_manager
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer

CPU = torch.device("cpu")
# In the form of the files of the data folder.
ARC = [
    {
        "query": f"Question: Which of these is number {number}?",
        "choices": ["one", "two of it", "3", "four"],
        "gold": number,
    }
    for number in range(4)
]
PIQA = [
    {"query": "Question: ice box\n", "choices": ["will be warm", "will be cold inside"], "gold": 1},
    {"query": "Question: How do I open a door?\n", "choices": ["Turn the handle.", "Turn around."], "gold": 0},
    {"query": "Question: open a file \n", "choices": ["import it", "with open(path) as file"], "gold": 1},
]
WINOGRANDE = [
    {"context_options": ["The cup was in the box so the cup", "The cup was in the box so the box"]}
    | {"continuation": continuation, "gold": gold}
    for continuation, gold in (("was full.", 1), ("was safe.", 0))
]
BOOLQ = [
    {"query": f"Passage: {passage}\nQuestion: is {word} a word?", "choices": ["no", "yes"], "gold": gold}
    for passage, word, gold in (
        ("Words are made of letters.", "letter", 1),
        ("Words are made of letters.", "xqz", 0),
        ("A book called 'Snakes in\nQuestion: and Answer' is there.", "snake", 1),
    )
]
LAMBADA = [
    {"context": "She looked at the sea, and the sea looked back at", "continuation": "her"},
    {"context": "He raised his brows when he saw the", "continuation": "\n\nsea"},
]
FILES: dict[str, list[dict[str, Any]]] = {
    "arc_easy": ARC,
    "piqa": PIQA,
    "winogrande": WINOGRANDE,
    "boolq": BOOLQ,
    "lambada_openai": LAMBADA,
}
# (context, continuation) of every choice, and the right one: what lm-eval's stock tasks ask of the original documents
STOCK: dict[str, list[tuple[list[tuple[str, str]], int]]] = {
    "arc_easy": [([(f"{d['query']}\nAnswer:", f" {c}") for c in d["choices"]], d["gold"]) for d in ARC],
    "piqa": [
        ([("Question: ice box\nAnswer:", " will be warm"), ("Question: ice box\nAnswer:", " will be cold inside")], 1),
        ([(f"{PIQA[1]['query']}Answer:", " Turn the handle."), (f"{PIQA[1]['query']}Answer:", " Turn around.")], 0),
        ([("Question: open a file \nAnswer:", f" {c}") for c in PIQA[2]["choices"]], 1),
    ],
    "winogrande": [([(o, f" {d['continuation']}") for o in d["context_options"]], d["gold"]) for d in WINOGRANDE],
    "boolq": [
        ([(f"Words are made of letters.\nQuestion: is {w} a word?\nAnswer:", f" {c}") for c in ("no", "yes")], gold)
        for w, gold in (("letter", 1), ("xqz", 0))
    ]
    + [
        (
            [
                (
                    "A book called 'Snakes in\nQuestion: and Answer' is there.\nQuestion: is snake a word?\nAnswer:",
                    f" {c}",
                )
                for c in ("no", "yes")
            ],
            1,
        )
    ],
    "lambada_openai": [
        ([("She looked at the sea, and the sea looked back at", " her")], 0),
        ([("He raised his brows when he saw", " the\n\nsea")], 0),
    ],
}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data of mine"
    folder.mkdir()
    for name, rows in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def include_path(judging: ModuleType, data_dir: Path, tmp_path: Path) -> Path:
    path: Path = judging.local_tasks(data_dir, tmp_path)
    return path


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Collect the requests that lm-eval sends to the model."""
    from lm_eval.models.huggingface import HFLM

    asked: list[tuple[str, str]] = []
    original = HFLM.loglikelihood

    def watch(self: Any, instances: list[Any], *rest: Any, **named: Any) -> Any:
        asked.extend(instance.args for instance in instances)
        return original(self, instances, *rest, **named)

    monkeypatch.setattr(HFLM, "loglikelihood", watch)
    return asked


@torch.inference_mode()
def likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """Return the sum of the continuation's log-probabilities, and whether each of its tokens is the most likely."""
    ids = tokenizer(context + continuation, return_tensors="pt").input_ids
    start = tokenizer(context, return_tensors="pt").input_ids.shape[1]
    log_p = model(ids).logits[0, :-1].double().log_softmax(-1)[start - 1 :]
    wanted = ids[0, start:]
    return float(log_p.gather(1, wanted[:, None]).sum()), bool((log_p.argmax(-1) == wanted).all())


def test_tasks_have_the_stock_prompts_and_metrics(
    make_checkpoint: MakeCheckpoint,
    include_path: Path,
    requests: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All tasks at once: requests word by word, accuracies from our own likelihoods; no process is forked."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process with threads was forked"))
    folder = make_checkpoint()
    tasks = list(FILES)
    results = run_tasks(folder, tasks, limit=None, include_path=str(include_path), device=CPU, dtype=torch.float32)
    assert sorted(requests) == sorted(pair for task in tasks for pairs, _ in STOCK[task] for pair in pairs)
    model, tokenizer = load_model(folder, device=CPU, dtype=torch.float32), load_tokenizer(folder)
    for task in tasks:
        scores = [[likelihood(model, tokenizer, *pair) for pair in pairs] for pairs, _ in STOCK[task]]
        golds = [gold for _, gold in STOCK[task]]
        metrics = {name.removesuffix(",none") for name in results[task] if "stderr" not in name}
        if task == "lambada_openai":
            assert metrics == {"acc", "perplexity"}
            mean = sum(choices[0][0] for choices in scores) / len(scores)
            assert results[task]["perplexity,none"] == pytest.approx(float(torch.tensor(-mean).exp()), rel=1e-4)
            assert results[task]["acc,none"] == sum(choices[0][1] for choices in scores) / len(scores)
            continue
        assert metrics == ({"acc", "acc_norm"} if task in ("arc_easy", "piqa") else {"acc"})
        sums = [torch.tensor([value for value, _ in choices]) for choices in scores]
        assert results[task]["acc,none"] == accuracy(sums, golds)
        if "acc_norm" in metrics:
            lengths = [torch.tensor([len(text) - 1 for _, text in pairs]) for pairs, _ in STOCK[task]]
            normed = [values / length for values, length in zip(sums, lengths, strict=True)]
            assert results[task]["acc_norm,none"] == accuracy(normed, golds)


def accuracy(scores: list[torch.Tensor], golds: list[int]) -> float:
    return sum(int(values.argmax()) == gold for values, gold in zip(scores, golds, strict=True)) / len(golds)


def test_no_copy_of_the_data_is_left(
    make_checkpoint: MakeCheckpoint, include_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "home"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    run_tasks(make_checkpoint(), ["boolq"], limit=1, include_path=str(include_path), device=CPU)
    assert (tmp_path / "datasets").is_dir()
    assert not cache.exists()


def test_own_definitions_win_beside_tasks_of_lm_eval(include_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the folder defines only some of the tasks, so that lm-eval's own tasks are also listed."""
    from lm_eval.tasks import _index

    # of lm-eval's 10,000 files only two folders, as listing them all takes long
    original = _index.TaskIndex._iter_yaml_files
    monkeypatch.setattr(
        _index.TaskIndex,
        "_iter_yaml_files",
        lambda root: [
            path
            for folder in ([root / "piqa", root / "hellaswag"] if (root / "hellaswag").is_dir() else [root])
            for path in original(folder)
        ],
    )
    alone = task_manager(["piqa"], str(include_path))
    assert "hellaswag" not in alone.all_tasks
    both = task_manager(["piqa", "hellaswag"], str(include_path))
    for manager in (alone, both):
        assert manager.task_index["piqa"].yaml_path == include_path / "piqa.yaml"
    with pytest.raises(ConfigError, match="--tasks no-such-task is not known"):
        task_manager(["piqa", "no-such-task"], str(include_path))
    with pytest.raises(ConfigError, match="--include-path /no/such/folder is not a folder"):
        task_manager(["piqa"], "/no/such/folder")


def test_evaluation_texts(judging: ModuleType, data_dir: Path) -> None:
    (data_dir / "wikitext2_test.txt").write_text("= Title = \n")
    texts = {kind: judging.kind_text(kind, data_dir) for kind in judging.KINDS}
    assert texts["wikitext2"] == "= Title = \n"
    assert texts["lambada"].startswith("She looked at the sea, and the sea looked back at her\n\nHe raised")
    assert texts["boolq"] == "Words are made of letters.\n\nA book called 'Snakes in\nQuestion: and Answer' is there."
    assert texts["piqa"].startswith(
        "Question: ice box\nAnswer: will be cold inside\n\nQuestion: How do I open a door?\n"
    )
    assert "assert" in texts["pydoc"]


def test_evaluation_windows_are_the_first_of_each_kind(
    judging: ModuleType, data_dir: Path, tmp_path: Path, tokenizer: Any
) -> None:
    (data_dir / "wikitext2_test.txt").write_text("one two three four five " * 2000)
    windows = judging.judging_windows(data_dir, tmp_path, tokenizer, 2, kinds=("wikitext2", "pydoc"))
    assert {name: tuple(ids.shape) for name, ids in windows.items()} == {"wikitext2": (2, 1024), "pydoc": (2, 1024)}
    tokens = tokenizer(judging.kind_text("pydoc", data_dir))["input_ids"]
    assert windows["pydoc"].flatten().tolist() == tokens[:2048]


def row(recipe: str, **changes: Any) -> dict[str, Any]:
    own = {
        "sequence_length": 1024,
        "max_windows": 8,
        "form": "stock",
        "settings": {},
        "asked": 0.1,
        "sparsity": 0.1,
        "stored_parameters": 90_000_000,
        "calibration": "general.jsonl",
        "calibration_tokens": 131072,
        "score": 2.0,
        "worst": "piqa",
        "worst_ratio": 2.0,
    }
    return quality_row(recipe, **own | changes)


def test_table_and_plot_show_only_comparable_rows(
    harness: ModuleType, judging: ModuleType, show_rows: ShowRows
) -> None:
    dense = row("dense", perplexity=dict.fromkeys(judging.KINDS, 10.0), stored_parameters=100_000_000)
    rows = [
        row("oneshot", perplexity={"wikitext2": 1.0, "lambada": 1.0}),  # an old row with two kinds
        dense,
        row("oneshot", score=9.0),  # measured again below
        row("oneshot", texts={"wikitext2": {"token_hash": "2"}}, score=7.0),  # other windows
        row("oneshot"),
        row("stat", form="per-layer", asked=0.2, score=3.0),
        row("oneshot", settings={"damping": 0.1}, score=2.5, worst_ratio=2.6),
        row("oneshot", calibration="general.jsonl+self", score=1.5),
        row("oneshot", settings={"up_steps": 4}, score=2.2),
    ]
    others = harness.read_rows("other_tools")
    show_rows(rows, other_tools=others, gpu=[], models=[])
    assert importlib.import_module("quality_rows").quality_rows() == [dense, *rows[4:]]
    tables, plot = importlib.import_module("tables.quality"), importlib.import_module("plot")
    lines = tables.quality_table().splitlines()
    assert lines[2].startswith("| 0 (100.0 M) | dense |")
    text = "general.jsonl, 131,072 tokens"
    one = f"| 10.0% | **oneshot** | stock | {text} | 2.00 | how-to dialogue | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | – |"
    assert lines[4] == one
    assert "general.jsonl+self" in lines[3]
    assert lines[5].startswith("| 10.0% | **oneshot** | stock | up steps 4; ")
    assert lines[6].startswith("| 10.0% | stat | per-layer |")
    assert lines[7] == ""
    parts = tables.parts_table()
    assert "| 10.0% | stock | damping 0.1 |" in parts
    assert "stat" not in parts
    assert plot.default_curves() == {"per-layer": [], "stock": [rows[7]]}, "the default, with the model's own text"
    drawing = plot.quality_svg(dense)
    assert drawing == plot.quality_svg(dense)
    for label in ("oneshot, per-layer form", "oneshot, stock form", "oneshot, per-layer, two texts"):
        assert f">{label}<" in drawing
    assert {row["tool"] for row in others} - {"oneshot"} >= plot.other_curves().keys() - {"oneshot"} != set()
    for tool in plot.other_curves().keys() - {"oneshot"}:
        assert f">{tool}, two texts<" in drawing
    for absent in ("stat", "up-steps", "damping"):
        assert f"oneshot, {absent}" not in drawing
        assert f">{absent}" not in drawing
    layers = [{"intermediate_size": 48}, {"intermediate_size": 64}]
    with_layers = row("oneshot", form="per-layer", layers=layers, errors=[{"ffn": 0.2}, {}])
    assert "per-layer, −10.0%" in plot.layers_svg([dense, with_layers])
    assert judging.score({"a": 4.0, "b": 9.0}, {"a": 1.0, "b": 1.0}) == {
        "score": pytest.approx(6.0),
        "worst": "b",
        "worst_ratio": 9.0,
    }
    show_rows(rows[:1])
    assert importlib.import_module("quality_rows").quality_rows() == []


def test_rows_of_several_seeds_have_a_mean_and_a_deviation(benchmark_module: Callable[[str], ModuleType]) -> None:
    rows = [
        {"recipe": "stat", "seed": seed, "score": score, "worst_ratio": 2 * score, "perplexity": {"piqa": score**2}}
        for seed, score in ((0, 9.0), (1, 3.0), (0, 1.0), (2, 2.0))
    ]
    rows.append({"recipe": "flap", "score": 5.0})
    joined = rows[2] | {"scores": [1.0, 3.0, 2.0], "score": 2.0, "worst_ratio": 4.0}
    joined["perplexity"] = {"piqa": pytest.approx(36 ** (1 / 3))}
    assert benchmark_module("quality_rows").with_seeds(rows, "recipe") == [joined, rows[-1]]
    cells = benchmark_module("tables.cells")
    assert cells.score_cell(joined) == "2.00 ± 1.000"
    assert cells.score_cell(rows[-1], 3) == "5.000"


def test_a_row_says_how_like_the_dense_model_a_result_is(
    judging: ModuleType, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Agreement and divergence against the logits of both models; operations as the layers' matrices have them."""
    dense = make_checkpoint()
    report = compress(make_config(dense, sparsity=0.2))
    windows = {"text": torch.randint(0, 400, (3, 16), generator=torch.Generator().manual_seed(0))}
    [row] = judging.judge([report], windows, dense)
    models = [
        load_model(Path(folder), device=torch.device("cpu"), dtype=torch.float32)
        for folder in (dense, report.config["output"])
    ]
    with torch.inference_mode():
        logs = [model(windows["text"]).logits[:, :-1].double().log_softmax(-1).flatten(0, 1) for model in models]
    agreed = (logs[0].argmax(-1) == logs[1].argmax(-1)).double().mean()
    assert row["top1_agreement"]["text"] == pytest.approx(float(agreed))
    picked = logs[1].gather(1, windows["text"][:, 1:].flatten()[:, None]).view(3, 15)
    assert row["window_losses"]["text"] == pytest.approx((-picked.mean(1)).tolist(), rel=1e-5)
    divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    assert row["kl_divergence"]["text"] == pytest.approx(float(divergence), rel=1e-4)
    kept = report.plan["layers"][0]["intermediate_size"]
    operations = [2 * 32 * (4 + 2) * 8 + 3 * 32 * width + 4 * 16 * (16 + 1) / 2 for width in (kept, 64)]
    assert row["flops_ratio"] == pytest.approx(operations[0] / operations[1])
