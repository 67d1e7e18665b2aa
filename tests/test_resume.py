"""A run that is interrupted at any layer, or killed at any moment, ends with the bytes of an undisturbed one."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import start, wait
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES
from interruptions import Killed, contents, stop_before, undisturbed

from oneshot import Config, Report
from oneshot.checkpoint import Journal
from oneshot.cli.compress import main as compress_main
from oneshot.cli.profile import main as profile_main
from oneshot.compression import LayerCompressor
from oneshot.errors import OutputError, PlanError
from oneshot.pipeline import compress, compress_sizes
from oneshot.profiling import LayerProfiler

pytestmark = pytest.mark.long

KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)  # benchmarks/faults.py has more

SETTINGS: list[dict[str, Any]] = [
    {},
    {"batch_size": 3},
    {"recipe": "stat"},
    {"recipe": "random"},
    {"recipe": "random", "heads": "random"},
    {"recipe": "activation-norm", "save_dtype": "bfloat16"},
    {"save_dtype": "float16", "dtype": "bfloat16"},
    {"recipe": "flap"},
    {"recipe": "flap", "form": "per-layer", "round_to": 1},
    {"recipe": "tcsp"},
    {"recipe": "group-pca", "correction": "two-stream"},
    {"recipe": "stat", "form": "per-layer", "allocation": "stat"},
    {"depth": "sensitivity", "sparsity": 0.3},
    {"depth": "sublayers", "sparsity": 0.3, "form": "per-layer", "heads": "id"},
    {"inner_sizes": "sensitivity", "form": "per-layer", "round_to": 4},
    {"curvature": "fisher", "form": "per-layer", "round_to": 4},
    {"up_steps": 2, "heads": "id"},
    {"value_size": 4, "query_key_size": 4, "form": "per-layer", "correction": "same-layer"},
]


def interrupted_report(config: Config, *layers: int) -> Report:
    """Interrupt a run before these layers, one after the other, then let it finish."""
    for layer in layers:
        stop_before(layer, partial(compress, replace(config, resume=True)))
        assert not Path(config.output).exists()
    return compress(replace(config, resume=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_interrupted_run_ends_with_the_same_bytes(
    settings: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    config = make_config(make_checkpoint(layers=3), **settings)
    report = interrupted_report(config, 1, 2)
    assert contents(Path(config.output)) == undisturbed(config)
    assert [layer.layer for layer in report.layers] == [0, 1, 2]
    assert all(layer.sublayers for layer in report.layers)


@pytest.mark.parametrize(
    "experts",
    [{"form": "per-layer", "experts": "effects"}, {"experts": "reap", "num_experts": 3, "sparsity": 0.35}],
    ids=str,
)
def test_mixtures_of_experts(experts: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(layers=3, **CASES["qwen2_moe"].options), **experts)
    interrupted_report(config, 1, 2)
    assert contents(Path(config.output)) == undisturbed(config)


@pytest.mark.parametrize(("form", "heads"), [("stock", "none"), ("per-layer", "none"), ("per-layer", "id")])
def test_other_families_and_dtypes(
    form: str, heads: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(family="opt", groups=4, layers=3, dtype=torch.float16)
    config = make_config(folder, form=form, heads=heads, allocation="uniform", sparsity=0.1)
    interrupted_report(config, 2)
    assert contents(Path(config.output)) == undisturbed(config)


@pytest.mark.parametrize("correction", ["same-layer", "two-stream"])
def test_norms_after_the_sums_and_projections(
    correction: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    shape: dict[str, Any] = {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
    config = make_config(make_checkpoint(family="opt", groups=4, layers=3, tied=True, **shape), correction=correction)
    interrupted_report(config, 2)
    assert contents(Path(config.output)) == undisturbed(config)


def test_a_resumed_run_makes_no_second_profile(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(make_checkpoint(layers=3), form="per-layer", round_to=1)
    wanted = undisturbed(config)
    stop_before(0, partial(compress, config))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a profile was made")

    monkeypatch.setattr(LayerProfiler, "__init__", refuse)
    report = compress(replace(config, resume=True))
    assert contents(Path(config.output)) == wanted
    assert report.predicted_divergence


def test_a_resumed_run_reads_the_text_that_the_model_wrote(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume with the saved text; text that was written for other options does not let another run continue."""
    options: dict[str, Any] = {"calibration": f"{text_file}+self", "num_sequences": 20, "sequence_length": 24}
    folder = make_checkpoint(layers=3)
    config = make_config(folder, **options)
    wanted = undisturbed(config)
    stop_before(0, partial(compress, config))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("text was written")

    monkeypatch.setattr("oneshot.run.calibration.write_text", refuse)
    with pytest.raises(OutputError, match="begun by another run"):
        compress(replace(config, resume=True, seed=1))
    with pytest.raises(AssertionError, match="text was written"):
        compress(make_config(folder, **options | {"resume": True, "num_sequences": 22}))
    compress(replace(config, resume=True))
    assert contents(Path(config.output)) == wanted


def test_a_resumed_run_plans_by_the_latencies_that_were_measured(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is finished. Other options measure anew, as whoever starts from the beginning does."""
    invented, measured = {"share": 0.0}, []

    def least(calls: list[Any], _: Any) -> list[float]:
        """Invent a machine on which a share of the time passes whatever the sizes are."""
        measured.append(len(calls))
        return [invented["share"] + (1 - invented["share"]) * number for number in range(1, len(calls) + 1)]

    monkeypatch.setattr("oneshot.profiling.latency._least", least)
    options: dict[str, Any] = {"budget": "latency", "round_to": 1}
    folder = make_checkpoint()
    config = make_config(folder, **options)
    wanted = undisturbed(config)
    stop_before(0, partial(compress, config))
    invented["share"], count = 0.999, len(measured)
    compress(replace(config, resume=True))
    assert contents(Path(config.output)) == wanted
    compress(replace(config, resume=True))
    assert len(measured) == count, "nothing was measured again"
    with pytest.raises(PlanError, match="target is"):
        compress(make_config(folder, **options | {"resume": True, "overwrite": True, "dtype": "bfloat16"}))


def test_a_finished_run_is_left_unchanged(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = make_checkpoint()
    config = make_config(folder)
    report = compress(config)
    before = {path: path.stat().st_mtime_ns for path in Path(config.output).iterdir()}
    again = compress(replace(config, resume=True))
    assert json.dumps(again.to_dict()) == json.dumps(report.to_dict())
    assert {path: path.stat().st_mtime_ns for path in Path(config.output).iterdir()} == before
    with pytest.raises(OutputError, match="exists already"):
        compress(make_config(folder, resume=True, seed=1, recipe="random"))


@pytest.mark.parametrize("damage", ["missing", "empty", "shorter", "folder"])
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"max_file_bytes": 50_000}, "*-00002-of-*"),
        ({"max_file_bytes": 50_000}, "*.index.json"),
        ({}, "*.safetensors"),
        ({"form": "gguf"}, "model.gguf"),
    ],
)
def test_a_finished_run_without_its_weights_is_not_taken_for_finished(
    options: dict[str, Any], pattern: str, damage: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(layers=2), **options)
    compress(config)
    wanted = contents(Path(config.output))
    [path] = Path(config.output).glob(pattern)
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(content[:-1] if damage == "shorter" else b"")
    with pytest.raises(OutputError, match=rf"{path} is missing or was changed .*; add --overwrite to make"):
        compress(replace(config, resume=True))
    compress(replace(config, resume=True, overwrite=True))
    assert contents(Path(config.output)) == wanted


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_sequences": 8}, {"sparsity": 0.1}, {"dtype": "bfloat16"}])
def test_another_run_does_not_continue(
    change: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint()
    config = make_config(folder)
    stop_before(1, partial(compress, config))
    with pytest.raises(OutputError, match="another run"):
        compress(make_config(folder, resume=True, **change))
    compress(replace(config, resume=True))
    assert contents(Path(config.output)) == undisturbed(config)


def test_several_sizes_continue_after_the_last_finished_layer(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(), sparsity=0.1)
    sizes = [0.1, 0.15, 0.2]
    output = Path(config.output)
    compress(replace(config, output=str(output / "sparsity-0.10")))
    stop_before(1, partial(compress_sizes, replace(config, resume=True), sizes))
    assert sorted(path.name for path in output.iterdir()) == ["sparsity-0.10", "sparsity-0.15.incomplete"]
    compress_sizes(replace(config, resume=True), sizes)
    compress_sizes(replace(config, output=str(output.with_name("undisturbed"))), sizes)
    for size in ("sparsity-0.10", "sparsity-0.15", "sparsity-0.20"):
        assert contents(output / size) == contents(output.with_name("undisturbed") / size)


def killed_at(last: int, run: Callable[[], Any]) -> None:
    """Run, and stop before the tensor or the header number `last` is written."""
    pwrite, lock, count = os.pwrite, threading.Lock(), 0

    def dying_pwrite(*arguments: Any) -> int:
        nonlocal count
        with lock:
            count += 1
            if count >= last:
                raise Killed
        return pwrite(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", dying_pwrite)
        with pytest.raises(Killed):
            run()


@pytest.mark.parametrize("max_file_bytes", [None, 60_000], ids=["one file", "several files"])
@pytest.mark.parametrize("kill_at", [1, 12, 31])
def test_a_run_that_is_killed_while_it_writes_ends_with_the_same_bytes(
    kill_at: int, max_file_bytes: int | None, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Kill the run in a layer, outside the layers or at a header, then again at the next change."""
    options = {} if max_file_bytes is None else {"max_file_bytes": max_file_bytes}
    config = make_config(make_checkpoint(layers=3), **options)
    wanted = undisturbed(config)
    assert (len([name for name in wanted if name.endswith(".safetensors")]) > 2) == (max_file_bytes is not None)
    for last in (kill_at, 1):
        killed_at(last, partial(compress, replace(config, resume=True)))
        assert not Path(config.output).exists()
    compress(replace(config, resume=True))
    assert contents(Path(config.output)) == wanted
    assert not list(Path(config.output).parent.glob("*.incomplete"))


@pytest.mark.parametrize("max_file_bytes", [None, 60_000], ids=["one file", "several files"])
def test_no_layer_is_compressed_again_after_the_last(
    max_file_bytes: int | None,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {} if max_file_bytes is None else {"max_file_bytes": max_file_bytes}
    config = make_config(make_checkpoint(layers=3), **options)
    wanted = undisturbed(config)

    def killed(self: Journal) -> None:
        raise Killed

    for moment in ("finish", "commit"):
        with monkeypatch.context() as patch:
            patch.setattr(Journal, moment, killed)
            with pytest.raises(Killed):
                compress(replace(config, resume=True))
        monkeypatch.setattr(LayerCompressor, "compress_layer", lambda *_: pytest.fail("a layer was compressed again"))
    compress(replace(config, resume=True))
    assert contents(Path(config.output)) == wanted


def test_damaged_weights_are_made_again(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """Damage the last byte of the first file when all layers are written."""
    config = make_config(make_checkpoint(layers=3), max_file_bytes=60_000)
    wanted = undisturbed(config)
    killed_at(31, partial(compress, config))
    first, *_ = sorted((Path(f"{config.output}.incomplete") / "checkpoint").glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    compress(replace(config, resume=True))
    assert contents(Path(config.output)) == wanted


def test_warnings_are_in_the_report(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(), num_sequences=2)
    report = compress(config)
    assert any("calibration tokens are few" in warning for warning in report.warnings)


def test_a_killed_process_continues(make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path) -> None:
    """Kill the real command at random moments; every layer of this model takes a tenth of a second or more."""
    folder, output = make_checkpoint(layers=10, hidden=64, width=512), tmp_path / "out"
    options = [str(folder), "--sparsity=0.2", "--form=stock", f"--calibration={text_file}", "--num-sequences=64"]
    options += ["--sequence-length=32", "--device=cpu", "--dtype=float32", "--quiet"]

    told = tmp_path / "told"

    def begin() -> BaseProcess:
        return start("compress", [[*options, f"--output={output}", "--resume"]], told)

    def finished_layers() -> int:
        return len(list(tmp_path.glob("out.incomplete/record-*.json")))

    chance = random.Random(0)
    for kind in KILLS:
        before, process = finished_layers(), begin()
        while process.is_alive() and finished_layers() == before:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))
        assert process.pid is not None
        os.kill(process.pid, kind)
        assert wait([process]) == [-signal.SIGKILL if kind == signal.SIGKILL else 130]
        assert "Traceback" not in told.read_text()
        assert not output.exists()
    assert wait([begin()]) == [0]
    assert compress_main([*options, f"--output={tmp_path / 'undisturbed'}"]) == 0
    assert contents(output) == contents(tmp_path / "undisturbed")


def test_a_profile_and_its_compression_agree_after_an_interrupt(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    text_file: Path,
) -> None:
    folder = make_checkpoint(layers=3)
    options = ["--num-sequences=16", "--sequence-length=32", "--device=cpu", "--dtype=float32", "--quiet"]
    arguments = [str(folder), f"--output={tmp_path / 'profile'}", f"--calibration={text_file}", *options]
    assert profile_main(arguments) == 0
    config = make_config(folder, form="per-layer", profile=str(tmp_path / "profile"), round_to=1)
    interrupted_report(config, 1)
    assert contents(Path(config.output)) == undisturbed(config)
