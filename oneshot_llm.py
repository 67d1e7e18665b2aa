"""The command `oneshot` of the distribution oneshot-llm: it tells if another project's package has the same name.

`pip install oneshot` is another project. Its package replaces ours, or is found before ours, and then no import of
ours works.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

OPENING = '"""Training-free, one-shot structured compression of LLM checkpoints."""'  # of our oneshot/__init__.py
MEND = "pip uninstall --yes oneshot && pip install --force-reinstall --no-deps oneshot-llm"


def wrong_package() -> str | None:
    """Return a sentence if the package `oneshot` that Python finds is not ours, or not whole; nothing of it is run."""
    spec = find_spec("oneshot")
    if spec is None or spec.origin is None:
        return f"the package oneshot of oneshot-llm is not installed; run {MEND}."
    opening = Path(spec.origin)
    text = opening.read_text(encoding="utf-8", errors="replace") if opening.suffix == ".py" else ""
    if not text.startswith(OPENING) or not (opening.parent / "cli" / "main.py").is_file():
        return f"{opening.parent} is another project's package of the name oneshot; run {MEND}."
    return None


def main() -> int:
    """Run the command and return its exit code."""
    wrong = wrong_package()
    if wrong is not None:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    from oneshot.cli.main import main as run

    return run()
