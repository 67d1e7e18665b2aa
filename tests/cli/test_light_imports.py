"""`import oneshot` and every `--help` load no large library, and a closed pipe causes no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oneshot.cli.main import COMMANDS, main

HEAVY = ("torch", "scipy", "transformers", "datasets", "matplotlib", "numpy", "huggingface_hub")
HELPS = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]


def loaded(code: str) -> set[str]:
    """Return which of the large libraries a fresh process has loaded after some code."""
    ending = f"import json, sys\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", f"{code}\n{ending}"], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_the_package_and_its_config_are_light() -> None:
    assert loaded("import oneshot; oneshot.Config.of('a', 'b', sparsity=0.2); dir(oneshot)") == set()


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_is_light(arguments: list[str]) -> None:
    called = f"from oneshot.cli.main import main\ntry:\n    assert main({arguments}) == 0\n"
    assert loaded(f"{called}except SystemExit as end:\n    assert end.code == 0") == set()


WRONG = [
    ["compress", "x", "--sparsity=much"],
    ["compress", "x", "--sparsity=2"],
    ["compress", "x", "--sparsity=0.2", "--form=stok"],
    ["compress", "x", "--sparsity=0.2", "--set=pivoting=best"],
    ["compress", "x", "--sparsity=0.2", "--set=dampnig=1"],
    ["compress", "x", "--sparsity=0.2", "--max-memory=much"],
    ["compress", "x", "--sparsity=0.2", "--config=/no/such/file"],
    ["compress", "--sparsity=0.2"],
    ["profile", "x", "--num-sequences=0"],
    ["evaluate", "x", "--batch-size=0"],
    ["evaluate", "x", "--limit=3"],
    ["evaluate", "x", "--output=/no/such/folder/out.json"],
    ["completion", "fsh"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_option_is_told_before_large_libraries_are_loaded(arguments: list[str]) -> None:
    called = f"from oneshot.cli.main import main\ntry:\n    assert main({arguments}) == 1\n"
    assert loaded(f"{called}except SystemExit as end:\n    assert end.code == 2") == set()


def test_writing_a_recipe_file_is_light(tmp_path: Path) -> None:
    arguments = ["init", str(tmp_path / "recipe.yaml")]
    assert loaded(f"from oneshot.cli.main import main\nassert main({arguments}) == 0") == set()


def test_every_public_name_is_there() -> None:
    asked = "import oneshot\nfor name in oneshot.__all__: getattr(oneshot, name)\n"
    assert "torch" in loaded(f"{asked}assert set(oneshot.__all__) <= set(dir(oneshot))")


def test_an_unknown_name_is_an_attribute_error() -> None:
    import oneshot

    with pytest.raises(AttributeError, match="has no attribute 'shrink'"):
        oneshot.shrink  # noqa: B018


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_a_reader_that_has_enough_causes_no_traceback(arguments: list[str]) -> None:
    """The reader of the pipe is gone before anything is written, as `head` is after its last line."""
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "oneshot", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert result.stderr == ""


def test_a_command_keeps_the_log_of_torchs_own_code_to_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads the level when it is imported, so it is set before; a level that the user set stays."""
    for level, wanted in ((None, "ERROR"), ("INFO", "INFO")):
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "restored after the test")
        if level is None:
            monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
        else:
            monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", level)
        with pytest.raises(SystemExit):
            main(["init", "--help"])
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == wanted


def test_a_command_shows_no_warnings_of_the_hub() -> None:
    """Without a network it warns of every retry, and our error says the same once."""
    script = (
        "import logging; logging.basicConfig(level=logging.WARNING);"
        "from oneshot.cli.options import silence_libraries; silence_libraries();"
        "logging.getLogger('huggingface_hub.utils._http').warning('Retrying in 8s')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == ""
