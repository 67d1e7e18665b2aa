"""The import contracts of pyproject.toml, checked by import-linter, and what they cannot say."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def contracts() -> list[dict[str, Any]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_no_contract_is_broken() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(contracts())} kept, 0 broken" in result.stdout


def test_every_folder_and_module_has_a_line() -> None:
    """import-linter says nothing about a module that the contract does not name."""
    (layers,) = (contract["layers"] for contract in contracts() if contract["type"] == "layers")
    named = {name.strip() for line in layers for name in line.split("|")}
    top = [path for path in (ROOT / "oneshot").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert named - {"oneshot_kernels"} == {f"oneshot.{path.stem}" for path in top if path.stem != "__init__"}
    assert "oneshot_kernels" in named


def test_only_some_modules_know_transformers() -> None:
    """The second contract names folders; in the other folders only these files know transformers."""
    importing = {
        path.relative_to(ROOT / "oneshot").as_posix()
        for path in (ROOT / "oneshot").rglob("*.py")
        if re.search(r"^\s*(from|import) (transformers|datasets|lm_eval)\b", path.read_text(), re.MULTILINE)
    }
    assert importing == {
        "api/models.py",
        "api/texts.py",  # functions that are tools of a chat
        "checkpoint/class_names.py",
        "checkpoint/gguf.py",
        "checkpoint/gguf_tokenizer.py",
        "checkpoint/mxfp4.py",
        "checkpoint/nearest.py",  # fields of stock configs
        "checkpoint/stock.py",
        "cli/options.py",  # silences them
        "evaluation/conversation.py",
        "evaluation/generation.py",
        "evaluation/kinds.py",
        "evaluation/tasks.py",
        "export/modeling_nemotron_nas.py",
        "export/modeling_oneshot.py",
        "export/modeling_oneshot_encoder.py",
        "export/modeling_oneshot_resized.py",
        "footprint/bounds.py",  # loads them before the run does, to know the free memory
        "stream/template.py",
        "tasks/names.py",
        "text/growing_cache.py",
        "text/self_written.py",
        "text/files.py",
        "text/sources.py",
        "text/tokenizers.py",
    }


def test_kernels_is_not_a_package() -> None:
    """A top-level package `kernels` would shadow the one that transformers looks for."""
    assert (ROOT / "kernels" / "oneshot_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_module_of_the_tests_has_the_name_of_another() -> None:
    """Tests and benchmarks are imported by their names alone, so one of two equal names would hide the other."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    packages = {file.parent for file in files if file.name == "__init__.py"}
    names = [file.stem for file in files if file.name != "conftest.py" and file.parent not in packages]
    assert {name for name in names if names.count(name) > 1} == set()
