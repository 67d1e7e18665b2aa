"""Runs in several threads at once: the bytes of each alone, and a process that is afterwards as it was."""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, build_model
from transformers.utils import logging as transformers_logging

import oneshot
from oneshot.machine.shared import shared_by_threads
from oneshot.report.card import REPORT_NAME

TELLING = {REPORT_NAME, "report.html", "README.md"}  # of time and memory
SETTINGS: list[dict[str, Any]] = [
    {"form": "per-layer", "round_to": 4, "dtype": "float32"},
    {"form": "per-layer", "round_to": 4, "dtype": "bfloat16", "num_sequences": 15},
    {"recipe": "stat", "dtype": "float32", "with_self": True},
]


def process_wide() -> dict[str, Any]:
    """Return what the threads of a process have in common and libraries may change."""
    loggers = {name: each for name, each in logging.root.manager.loggerDict.items() if isinstance(each, logging.Logger)}
    known = ("oneshot", "transformers", "datasets", "torch", "huggingface_hub")
    return {
        "descriptors": [(os.fstat(number).st_dev, os.fstat(number).st_ino) for number in (1, 2)],
        "streams": (sys.stdout, sys.stderr, warnings.showwarning),
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "levels": {name: each.level for name, each in loggers.items() if name in known},
        "handlers": [list(loggers[name].handlers) for name in known if name in loggers],
        "filters of notes": list(logging.getLogger("oneshot.linalg.psd").filters),
        "bars": transformers_logging.is_progress_bar_enabled(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "random": torch.get_rng_state().tolist(),
        "excepthook": (sys.excepthook, threading.excepthook),
    }


def test_threads_give_the_bytes_of_each_alone(make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path) -> None:
    """One model in memory for all; another caller's precision of products must be back at the end."""
    model, folder = build_model(), make_checkpoint()

    def run(number: int, place: str) -> dict[str, bytes]:
        options = {"num_sequences": 16, "sequence_length": 32, "sparsity": 0.15, "device": "cpu"} | SETTINGS[number]
        text = f"{text_file}+self" if options.pop("with_self", False) else str(text_file)
        output, last = tmp_path / place / str(number), []
        result = oneshot.compress(
            model, output, tokenizer=str(folder), calibration=text, progress=last.append, **options
        )
        assert [each for each in result.report.warnings if "calibration tokens are few" in each] == []
        return {path.name: path.read_bytes() for path in output.iterdir() if path.name not in TELLING}

    numbers = range(len(SETTINGS))
    alone = [run(number, "alone") for number in numbers]
    torch.set_float32_matmul_precision("high")
    before, config = process_wide(), model.config.to_dict()
    try:
        with ThreadPoolExecutor(len(SETTINGS)) as executor:
            together = list(executor.map(run, numbers, ["together"] * len(SETTINGS)))
        after = process_wide()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert together == alone
    assert {name: found for name, found in after.items() if found != before[name]} == {}
    assert model.config.to_dict() == config


def test_a_shared_setting_lasts_from_the_first_to_the_last() -> None:
    setting = ["caller's"]

    @contextmanager
    def change() -> Iterator[None]:
        before = setting[-1]
        setting.append("ours")
        try:
            yield
        finally:
            setting.append(before)

    ours = shared_by_threads(change)
    first, second = ours(), ours()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert setting[-1] == "ours"
    second.__exit__(None, None, None)
    assert setting == ["caller's", "ours", "caller's"]
    with pytest.raises(ZeroDivisionError), ours():
        raise ZeroDivisionError
    assert setting[-1] == "caller's"
