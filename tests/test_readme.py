"""The README's numbers are those of `benchmarks/results/`, and its commands are options that exist."""

import re
import subprocess
import sys
from pathlib import Path

from oneshot.compress import build_parser as compress_parser
from oneshot.evaluate import build_parser as evaluate_parser
from oneshot.profile import build_parser as profile_parser

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_rendered_from_rows() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run python benchmarks/render.py"


def test_every_option_named_exists() -> None:
    parsers = (compress_parser(), evaluate_parser(), profile_parser())
    known = {option for parser in parsers for option in parser._option_string_actions}
    foreign = {"--model", "--model_args", "--multi_gpu", "--num_processes"}  # of lm_eval and accelerate
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", (ROOT / "README.md").read_text()))
    assert named - foreign - known == set()


def test_every_file_linked_exists() -> None:
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (ROOT / target).exists(), f"{document.name} links to {target}"
