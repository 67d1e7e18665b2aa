"""The console script: it runs our command, and tells if `oneshot` is another project's package."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import oneshot_llm

ROOT = Path(__file__).resolve().parent.parent
CODE = "import sys, oneshot_llm; sys.exit(oneshot_llm.main())"


def run(*places: Path) -> subprocess.CompletedProcess[str]:
    # only these places: -S leaves out what is installed
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-S", "-c", CODE, "--version"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd="/")


@pytest.mark.parametrize("mixed", [False, True], ids=["found first", "in one folder with ours"])
def test_another_package_of_the_name_is_one_sentence(mixed: bool, tmp_path: Path) -> None:
    other = tmp_path / "oneshot"
    (other / "cli").mkdir(parents=True)
    (other / "__init__.py").write_text('"""Run once."""\nraise RuntimeError("it was run")\n')
    if mixed:
        (other / "cli" / "main.py").write_text("def main() -> int:\n    return 0\n")
    done = run(tmp_path, ROOT)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {other} is another project's package of the name oneshot; run pip uninstall --yes oneshot && "
        "pip install --force-reinstall --no-deps oneshot-llm.\n"
    )


def test_a_missing_package_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "oneshot_llm.py").write_text((ROOT / "oneshot_llm.py").read_text())
    done = run(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "is not installed; run pip" in done.stderr


def test_our_own_package_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["oneshot", "--version"])
    assert oneshot_llm.main() == 0
    assert capsys.readouterr().out.startswith("oneshot ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"oneshot": "oneshot_llm:main"}
    assert project["tool"]["setuptools"]["py-modules"] == ["oneshot_llm"]
