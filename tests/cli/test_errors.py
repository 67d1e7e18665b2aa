"""Every error that a user can meet: one line that names the thing, exit code 1, no remains, no traceback."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oneshot.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from oneshot.cli import evaluate
from oneshot.cli.compress import main
from oneshot.errors import CheckpointError

Check = Callable[..., str]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results" / "out"


@pytest.fixture
def fails(output: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run the command line with valid options and `changes`, check that it fails, and return its message.

    `settings`: values of `--set`. `keeps`: whether finished layers stay for `--resume`.
    """

    def run(
        checkpoint: Path | str, *names: str, settings: Sequence[str] = (), keeps: bool = False, **changes: Any
    ) -> str:
        options: dict[str, Any] = {
            "output": output,
            "sparsity": 0.2,
            "calibration": text_file,
            "num_sequences": 4,
            "sequence_length": 16,
            "device": "cpu",
        }
        arguments = [str(checkpoint), "--quiet", *(f"--set={setting}" for setting in settings)]
        for name, value in (options | changes).items():
            if value is not None:
                arguments.append(f"--{name.replace('_', '-')}={value}")
        before = sorted(output.parent.iterdir()) if output.parent.exists() else []
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        assert code == 1
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        if keeps:
            shutil.rmtree(output.parent / "out.incomplete")
        assert lines[0].startswith("error: ")
        assert captured.out == ""
        for name in names:
            assert name in lines[0]
        assert lines[0].endswith((".", "--overwrite."))
        after = sorted(output.parent.iterdir()) if output.parent.exists() else []
        assert after == before, "nothing is left at the output or beside it"
        return lines[0]

    return run


# The checkpoint


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        ("/no/such/path", "does not exist"),
        ("no-such-folder", "does not exist"),
        ("./no/such", "does not exist"),
        ("/no/such.gguf", "does not exist"),
        (__file__, "is a file"),
        ("no-such-organisation/no-such-model", "hub"),
        ("two words/no model", "two words/no model"),
    ],
)
def test_no_such_checkpoint(checkpoint: str, reason: str, fails: Check) -> None:
    fails(checkpoint, checkpoint, reason)


def test_an_empty_folder(tmp_path: Path, fails: Check) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    fails(empty, str(empty), "empty folder")


def test_a_folder_without_config(own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = own_checkpoint()
    (folder / "config.json").unlink()
    fails(folder, "config.json", "missing")


@pytest.mark.parametrize("content", ["{unfinished", "[1, 2]", "\ufeff"])
def test_a_damaged_config(content: str, own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = own_checkpoint()
    (folder / "config.json").write_text(content)
    fails(folder, "config.json", "JSON")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value != "removed"}
    (folder / "config.json").write_text(json.dumps(kept))


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model_type": "qwen9"}, ("qwen9", "qwen2", "qwen3", "with that of llama", "supported-models")),
        ({"model_type": "mamba2"}, ("mamba2", "without an FFN", "supported-models")),
        ({"model_type": "jamba", "num_experts": 8}, ("jamba", "recurrent state", "supported-models")),
        ({"model_type": "nemotron_h"}, ("nemotron_h", "one mixer each", "supported-models")),
        ({"model_type": "granitemoehybrid", "num_local_experts": 8}, ("granitemoehybrid", "num_experts_per_tok")),
        ({"model_type": "lfm2", "layer_types": ["conv", "rwkv"]}, ("layer_types 'rwkv'", "conv, full_attention")),
        ({"model_type": "removed"}, ("(none)",)),
        ({"model_type": "phimoe"}, ("phimoe", "mixture of experts", "qwen3_moe, qwen2_moe, mixtral")),
        ({"model_type": "mixtral"}, ("num_experts", "mixtral")),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, ("passes 3",)),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, 1], **EXPERTS}, ("no layer with experts",)),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 0, **EXPERTS}, ("decoder_sparse_step 0",)),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "all", **EXPERTS}, ("mlp_only_layers 'all'",)),
        ({"num_local_experts": 8}, ("mixture of experts",)),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("quantised",)),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ("mxfp4", "dequantize=True")),
        ({"intermediate_size": "removed"}, ("intermediate_size",)),
        ({"vocab_size": "removed"}, ("vocab_size",)),
        ({"intermediate_size": 100}, ("mlp",)),
        ({"num_hidden_layers": 3}, ("model.layers.2",)),
        ({"num_attention_heads": 8}, ("self_attn",)),
    ],
)
def test_models_that_are_not_supported(
    changes: dict[str, Any], names: tuple[str, ...], own_checkpoint: MakeCheckpoint, fails: Check
) -> None:
    folder = own_checkpoint()
    edit_config(folder, **changes)
    fails(folder, *names)


def test_a_missing_tensor(own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = own_checkpoint()
    tensors = load_file(folder / SINGLE_NAME)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / SINGLE_NAME)
    for recipe in ("oneshot", "random"):
        fails(folder, "model.layers.1.mlp.down_proj.weight", recipe=recipe)


@pytest.mark.parametrize("name", ["weights.bin", "model.pt"])
def test_pickled_weights_under_another_name_are_refused(
    name: str, own_checkpoint: MakeCheckpoint, fails: Check
) -> None:
    folder = own_checkpoint()
    (folder / SINGLE_NAME).unlink()
    torch.save({"a": torch.ones(1)}, folder / name)
    fails(folder, str(folder), "pickled", "save_pretrained")


def test_no_weights(own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = own_checkpoint()
    (folder / SINGLE_NAME).unlink()
    fails(folder, str(folder), "no safetensors weights")


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def test_a_missing_shard(own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = own_checkpoint(shard_size="20KB")
    shard = first_shard(folder)
    shard.unlink()
    fails(folder, shard.name, "missing")


@pytest.mark.parametrize("kept_bytes", [0, 5, 200, -100])
def test_a_truncated_shard(kept_bytes: int, own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = own_checkpoint(shard_size="20KB")
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:kept_bytes])
    fails(folder, shard.name, "truncated")


def test_a_shard_that_lacks_a_tensor(own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = own_checkpoint(shard_size="20KB")
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["model.layers.0.extra"] = first_shard(folder).name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    fails(folder, "model.layers.0.extra", "lacks")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("recipe", ["stat", "random"])
def test_weights_that_are_not_finite(
    value: float, name: str, recipe: str, own_checkpoint: MakeCheckpoint, fails: Check
) -> None:
    folder = own_checkpoint()
    tensors = load_file(folder / SINGLE_NAME)
    tensors[name][3, 3] = value
    save_file(tensors, folder / SINGLE_NAME)
    fails(folder, name, "NaN or Inf", recipe=recipe)


@pytest.mark.parametrize("recipe", ["oneshot", "tcsp"])
def test_activations_that_overflow(recipe: str, own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = own_checkpoint()
    tensors = load_file(folder / SINGLE_NAME)
    for name in ("up_proj", "gate_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"] *= 1e25
    save_file(tensors, folder / SINGLE_NAME)
    fails(folder, "overflow", "--dtype float32", recipe=recipe)


def test_a_damaged_gguf_file(tmp_path: Path, fails: Check) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(50))
    fails(path, str(path), "GGUF")


# The calibration text


def test_a_missing_tokenizer(own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = own_checkpoint()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    fails(folder, str(folder), "tokenizer")


def shrink_vocabulary(folder: Path) -> None:
    tensors = load_file(folder / SINGLE_NAME)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:50].clone()
    save_file(tensors, folder / SINGLE_NAME)
    edit_config(folder, vocab_size=50)


def test_a_tokenizer_of_another_model(own_checkpoint: MakeCheckpoint, fails: Check) -> None:
    """Its tokens exceed the rows of the embedding."""
    folder = own_checkpoint()
    shrink_vocabulary(folder)
    fails(folder, "tokenizer", "50")


def test_a_target_out_of_reach_names_the_most_that_can_go(make_checkpoint: MakeCheckpoint, fails: Check) -> None:
    """Check that what the message names can be reached, and a little more cannot."""
    checkpoint = make_checkpoint()
    told = fails(checkpoint, "at best", sparsity=0.9)
    (most,) = re.findall(r"ask for --sparsity (\S+) or less, or allow --set heads=id as well\.$", told)
    assert main([str(checkpoint), f"--sparsity={most}", "--calibration=builtin", "--dry-run", "--device=cpu"]) == 0
    told = fails(checkpoint, "at best", sparsity=0.95, settings=["heads=id"])
    (more,) = re.findall(r"ask for --sparsity (\S+) or less\.$", told)
    assert float(more) > float(most)
    options = [f"--sparsity={more}", "--set=heads=id", "--calibration=builtin", "--dry-run", "--device=cpu"]
    assert main([str(checkpoint), *options]) == 0


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "does not exist"), ("", "empty"), ("  \n", "0 tokens"), ("Few words.", "less than")]
)
def test_texts_that_cannot_be_used(
    content: str | None, reason: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, fails: Check
) -> None:
    path = tmp_path / "my-text.txt"
    if content is not None:
        path.write_text(content)
    fails(make_checkpoint(), str(path), reason, calibration=path)


@pytest.mark.parametrize("source", ["c4", "wikitext2", "no-such-organisation/no-such-set"])
def test_a_data_set_without_network(source: str, make_checkpoint: MakeCheckpoint, fails: Check) -> None:
    fails(make_checkpoint(), "network", "builtin", calibration=source)


def test_a_data_set_is_not_opened_if_the_hub_does_not_answer(
    make_checkpoint: MakeCheckpoint, fails: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise datasets would repeat its requests for half a minute."""
    asked = []

    def no_answer(_: Any, name: str, *, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", no_answer)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("the data set is opened"))
    fails(make_checkpoint(), "allenai/c4", "Name or service not known", "network", calibration="c4")
    assert asked == ["allenai/c4"]


# The options


@pytest.mark.parametrize("sparsity", ["abc", "1.5", "-0.1", "nan", "1", "inf", ""])
def test_sparsity_out_of_range(sparsity: str, make_checkpoint: MakeCheckpoint, fails: Check) -> None:
    fails(make_checkpoint(), "--sparsity", sparsity, sparsity=sparsity)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"sparsity": None}, ("--sparsity", "--params")),
        ({"params": "1M"}, ("--sparsity", "--params")),
        ({"sparsity": None, "params": "10T"}, ("10T",)),
        ({"sparsity": None, "params": "0"}, ("--params 0",)),
        ({"sparsity": None, "params": "1B"}, ("1,000,000,000", "above the dense model")),
        ({"sparsity": 0.99}, ("at best", "ask for --sparsity 0.")),
        ({"calibration": "self+"}, ("'self+'", "without a name")),
        ({"settings": ["ffn=none"]}, ("Nothing may be reduced",)),
        ({"recipe": "magic"}, ("magic", "oneshot, stat")),
        ({"device": "cuda:7"}, ("cuda:7", "--device cpu")),
        ({"device": "tpu"}, ("tpu",)),
        ({"settings": ["damping=-1"]}, ("--set damping=-1", "0 or more")),
        ({"settings": ["damping=nan"]}, ("--set damping=nan", "0 or more")),
        ({"settings": ["damping=much"]}, ("--set damping=much", "a number or auto")),
        (
            {"settings": ["damping=auto"], "batch_size": 1000},
            ("--set damping=auto", "--num-sequences", "--batch-size"),
        ),
        ({"num_sequences": 0}, ("--num-sequences",)),
        ({"sequence_length": 1}, ("--sequence-length",)),
        ({"batch_size": 0}, ("--batch-size",)),
        ({"round_to": 0}, ("--round-to",)),
        ({"round_to": 1000}, ("--round-to",)),
        ({"max_memory": "much"}, ("much",)),
        ({"profile": "/no/such/profile"}, ("/no/such/profile is not a readable profile",)),
        ({"max_memory": "0"}, ("--max-memory 0",)),
        ({"settings": ["pivoting=qr", "sketch=none"]}, ("--set pivoting=qr", "--set sketch=")),
        ({"settings": ["sketch_size=-1"]}, ("--set sketch_size=-1", "at least 0")),
    ],
)
def test_options_out_of_range(
    changes: dict[str, Any], names: tuple[str, ...], make_checkpoint: MakeCheckpoint, fails: Check
) -> None:
    fails(make_checkpoint(), *names, **changes)


def test_a_size_that_the_form_cannot_hold(make_checkpoint: MakeCheckpoint, fails: Check) -> None:
    folder = make_checkpoint(groups=4, attention_bias=True)
    fails(folder, "3 heads", "hidden size 32", recipe="stat", settings=["ffn=none"], sparsity=0.03)


# The output


def test_an_output_that_exists(make_checkpoint: MakeCheckpoint, output: Path, fails: Check) -> None:
    output.mkdir(parents=True)
    (output / "precious").write_text("precious")
    fails(make_checkpoint(), str(output), "--overwrite")
    assert (output / "precious").read_text() == "precious"


def test_an_output_that_holds_the_input(own_checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own_checkpoint()
    for place in (folder, folder.parent):
        assert main([str(folder), f"--output={place}", "--sparsity=0.2", "--recipe=random", "--overwrite"]) == 1
        *_, message = capsys.readouterr().err.splitlines()  # after the stages
        assert message.startswith("error: ")
        assert f"{place} holds the input" in message
    assert (folder / "config.json").exists()


def test_an_output_that_cannot_be_written(make_checkpoint: MakeCheckpoint, tmp_path: Path, fails: Check) -> None:
    file = tmp_path / "file"
    file.write_text("a file, not a folder")
    target = file / "out"
    fails(make_checkpoint(), str(target), "cannot be written", output=target)
    fails(make_checkpoint(), "cannot be written", output=Path("/proc/no-such/out"))
    for place in (".", "/"):
        fails(make_checkpoint(), f"--output {place} is not a new folder", output=place)
    assert file.read_text() == "a file, not a folder"


def test_too_little_space(
    make_checkpoint: MakeCheckpoint, output: Path, monkeypatch: pytest.MonkeyPatch, fails: Check
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    fails(make_checkpoint(), str(output.parent), "free")


def test_the_space_is_computed_in_the_dtype_that_is_saved(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, fails: Check
) -> None:
    """Saving a bfloat16 model as float32 doubles it."""
    folder = make_checkpoint(dtype=torch.bfloat16)
    room = round(1.2 * (folder / SINGLE_NAME).stat().st_size)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 0, room))
    fails(folder, "free", save_dtype="float32")


def test_a_disk_that_fills_up_while_writing(
    make_checkpoint: MakeCheckpoint, output: Path, monkeypatch: pytest.MonkeyPatch, fails: Check
) -> None:
    pwrite, written = os.pwrite, 0

    def write_then_fail(file: int, data: memoryview, start: int) -> int:
        nonlocal written
        written += 1
        if written > 12:  # in the second layer
            raise OSError(28, "No space left on device")
        return pwrite(file, data, start)

    monkeypatch.setattr(os, "pwrite", write_then_fail)
    fails(make_checkpoint(), str(output), "No space left", keeps=True)
    assert written > 12


@pytest.mark.parametrize(
    ("writes", "error", "options"),
    [
        ("oneshot.stream.store.ActivationStore.write", OSError(28, "No space left on device"), {}),
        (
            "oneshot.compression.subspaces.save_file",
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            {"recipe": "group-pca"},
        ),
    ],
)
def test_a_scratch_disk_that_fills_up(
    writes: str,
    error: Exception,
    options: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    fails: Check,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(writes, fail)
    fails(make_checkpoint(), "No space left", **options)


def test_a_write_that_the_system_refuses(make_checkpoint: MakeCheckpoint, output: Path, fails: Check) -> None:
    """With a limit on the size of files the kernel itself refuses a write, as with a full disk, without mocks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = make_checkpoint()
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        fails(folder, str(output), "cannot be written", keeps=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# The process


def arguments(checkpoint: Path, output: Path, text: Path) -> list[str]:
    options = ["--sparsity=0.2", "--num-sequences=4", "--sequence-length=16", "--device=cpu"]
    return [str(checkpoint), f"--output={output}", f"--calibration={text}", *options]


def test_an_interrupt_before_the_first_layer_leaves_nothing(
    make_checkpoint: MakeCheckpoint,
    output: Path,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from oneshot.compression import LayerCompressor

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerCompressor, "compress_layer", interrupted)
    assert main([*arguments(make_checkpoint(), output, text_file), "--quiet"]) == 130
    assert capsys.readouterr().err.splitlines() == ["interrupted"]
    assert not list(output.parent.iterdir())


def run_command(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
    )


def test_the_command_line_ends_with_one_line(
    own_checkpoint: MakeCheckpoint, output: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_checkpoint(shard_size="20KB")
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:-10])
    assert main(arguments(folder, output, text_file)) == 1
    told = capsys.readouterr()
    *stages, message = told.err.splitlines()
    assert message.startswith(f"error: {shard}")
    assert stages == [f"opening {folder} …"]
    assert told.out == ""
    assert not output.parent.exists()


def test_a_hub_name_without_network(output: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(Path("some-org/some-model"), output, text_file)) == 1
    *stages, message = capsys.readouterr().err.splitlines()
    assert message.startswith("error: some-org/some-model is not a local path")
    assert "network" in message
    assert stages == ["opening some-org/some-model …"]


def test_debug_keeps_the_exception(output: Path, text_file: Path) -> None:
    """Python then shows its traceback, and the exit code is not 0."""
    with pytest.raises(CheckpointError, match="/no/such/path does not exist"):
        main([*arguments(Path("/no/such/path"), output, text_file), "--debug"])


def test_a_good_run_of_the_command_line(make_checkpoint: MakeCheckpoint, output: Path, text_file: Path) -> None:
    """The other tests of this file would pass on a command line that always fails."""
    result = run_command("oneshot.compress", *arguments(make_checkpoint(), output, text_file))
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.startswith("result ")
    assert "layer 2/2" in result.stderr
    lines = [line for line in re.split(r"[\r\n]+", result.stderr) if line.strip()]
    bars = ("WARNING: ", "profile: ", "layer 1/2: ", "layer 2/2: ", "writing: ", "scoring: ")
    stages = ("opening ", "reading the text ", "planning the sizes ", "writing the report ", "checking the result ")
    assert [line for line in lines if not line.startswith(bars + stages)] == [], "other libraries are silent"
    assert {"config.json", "README.md", "oneshot_report.json", SINGLE_NAME, "tokenizer.json"} <= {
        path.name for path in output.iterdir()
    }


# Evaluation


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--text=no-such-file.txt"], ("no-such-file.txt", "does not exist")),
        (["--device=cuda:7"], ("cuda:7",)),
        (["--sequence-length=1"], ("--sequence-length 1",)),
        (["--baseline=/no/such/path"], ("/no/such/path",)),
        (["--revision=v1"], ("is a local path", "revision v1")),
        (["--baseline-revision=v1"], ("--baseline-revision v1 needs a --baseline",)),
        (["--baseline=no-org/no-model", "--baseline-revision=v1"], ("no-org/no-model",)),
        (["--text={text}", "--sequence-length=100000000"], ("less than one sequence",)),
        (["--text={text}", "--output=/no/such/folder/out.json"], ("/no/such/folder/out.json",)),
        (["--text={text}", "--max-windows=0"], ("--max-windows",)),
        (["--output=/tmp"], ("/tmp is a folder",)),
        (["--prefill-tokens=0"], ("--prefill-tokens 0",)),
        (["--decode-tokens=-1"], ("--decode-tokens -1",)),
        (["--tasks=piqa", "--include-path=/no/such/folder"], ("--include-path /no/such/folder",)),
    ],
)
def test_evaluation_errors(
    options: list[str],
    names: tuple[str, ...],
    make_checkpoint: MakeCheckpoint,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = evaluate.main(
        [str(make_checkpoint()), "--decode-tokens=0", *(option.format(text=text_file) for option in options)]
    )
    captured = capsys.readouterr()
    assert code == 1
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in captured.err
    for name in names:
        assert name in errors[0]


def test_a_task_that_lm_eval_does_not_know(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    # without its own tasks, whose listing takes ten seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    assert evaluate.main([str(make_checkpoint()), "--decode-tokens=0", "--tasks", "no-such-task"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --tasks no-such-task is not known")


def test_evaluation_with_a_tokenizer_of_another_model(
    own_checkpoint: MakeCheckpoint, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_checkpoint()
    shrink_vocabulary(folder)
    assert evaluate.main([str(folder), f"--text={text_file}", "--decode-tokens=0", "--sequence-length=16"]) == 1
    assert "tokenizer" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("has_baselines", [True, False])
def test_a_baseline_with_another_tokenizer(
    has_baselines: bool,
    make_checkpoint: MakeCheckpoint,
    own_checkpoint: MakeCheckpoint,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All its tokens are rows of the embedding, but two of them have changed places; one without any is accepted."""
    folder, other = make_checkpoint(), own_checkpoint()
    if has_baselines:
        content = json.loads((other / "tokenizer.json").read_text())
        tokens = {number: token for token, number in content["model"]["vocab"].items()}
        content["model"]["vocab"] |= {tokens[5]: 6, tokens[6]: 5}
        (other / "tokenizer.json").write_text(json.dumps(content))
    else:
        (other / "tokenizer.json").unlink()
    options = [f"--text={text_file}", "--decode-tokens=0", "--sequence-length=16"]
    code = evaluate.main([str(folder), f"--baseline={other}", *options])
    told = capsys.readouterr().err
    assert code == has_baselines
    assert (f"The tokenizers of {folder} and {other} differ" in told) is has_baselines


def test_evaluation_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(tmp_path / "none")]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_damaged_copies_do_not_reach_the_shared_checkpoint(
    own_checkpoint: MakeCheckpoint, make_checkpoint: MakeCheckpoint
) -> None:
    shutil.rmtree(own_checkpoint())
    assert (make_checkpoint() / SINGLE_NAME).exists()
