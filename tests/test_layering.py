"""The import rule of ARCHITECTURE.md, checked by import-linter."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_imports_point_downwards() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_kernels_is_no_package() -> None:
    """A top-level package `kernels` would shadow the one that transformers looks for."""
    assert (ROOT / "kernels" / "oneshot_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_only_some_modules_know_transformers() -> None:
    allowed = {
        "calibration.py",
        "sampling.py",
        "stream.py",
        "evaluate.py",
        "source.py",
        "bounds.py",  # loads beforehand what the run will, to know what is left
        "conversion.py",
        "per_layer.py",
        "modeling_oneshot.py",
    }
    importing = {
        path.name
        for path in (ROOT / "oneshot").rglob("*.py")
        if any(
            line.strip().startswith((f"from {package}", f"import {package}"))
            for line in path.read_text().splitlines()
            for package in ("transformers", "datasets", "lm_eval")
        )
    }
    assert importing == allowed
