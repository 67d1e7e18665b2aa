"""benchmarks/train_small.py: examples are right and held out, and stock classes load what it saves."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def train_small(benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = benchmark_module("train_small")
    monkeypatch.setattr(module, "EVALUATED", 100)
    monkeypatch.setattr(module, "CALIBRATED", 100)
    return module


def examples(folder: Path, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the examples for calibration and for evaluation."""
    calibration, judged = (
        [json.loads(line) for line in (folder / f"{name}-{part}.jsonl").read_text().splitlines()]
        for part in ("calibration", "evaluation")
    )
    assert not {row["text"] for row in calibration} & {row["text"] for row in judged}
    return calibration, judged


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_t5(train_small: ModuleType, feed_forward: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    train_small.train_t5(tmp_path / "t5", 2, feed_forward)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t5")
    for rows in examples(tmp_path, "t5"):
        for row in rows:
            task, *letters = row["text"].split()
            moved = [chr(ord("a") + (ord(letter) - ord("a") + 1) % 16) for letter in letters]
            wanted = {
                "sort": sorted(letters),
                "descend": sorted(letters)[::-1],
                "missing": sorted(set("abcdefghijklmnop") - set(letters)),
                "early": sorted(set("abcdefgh") & set(letters)),
                "shift": sorted(moved),
            }
            assert row["target"].split() == wanted[task]
        ids = tokenizer([row["target"] for row in rows])["input_ids"]
        assert all(2 not in row and row[-1] == 1 for row in ids), "every word is known"
    model, info = T5ForConditionalGeneration.from_pretrained(tmp_path / "t5", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (model.lm_head.weight is model.shared.weight) == (feed_forward == "relu")


def test_distilbert(train_small: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    train_small.train_distilbert(tmp_path / "distilbert", 2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "distilbert")
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "distilbert", output_loading_info=True)
    assert type(model).__name__ == "DistilBertForSequenceClassification"
    assert not info["missing_keys"]
    calibration, judged = examples(tmp_path, "distilbert")
    for rows in (calibration, judged):
        assert {row["label"] for row in rows} == set(range(model.config.num_labels))
    assert tokenizer.decode(tokenizer(judged[0]["text"])["input_ids"], skip_special_tokens=True).split() == (
        judged[0]["text"].split()
    )
