"""Count what the third design was to make smaller, at some commits: `python benchmarks/counts.py 2449bf0 HEAD`.

It prints a table of ARCHITECTURE.md. 2449bf0 is the last commit of the second design. A line tests a mixer's type if it
matches `MIXER_TEST`. All lines of Python files count, comments and empty ones too.
"""

import argparse
import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIXER_TEST = re.compile(r"is_attention|isinstance\([^)]*\b(Attention|FeedForward|Experts)\b")


def sources(commit: str, folder: str) -> dict[str, str]:
    """Return the Python files of a folder at a commit, by their paths."""
    listed = git("ls-tree", "-r", "--name-only", commit, folder).split()
    return {path: git("show", f"{commit}:{path}") for path in listed if path.endswith(".py")}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def lines(files: dict[str, str]) -> int:
    return sum(text.count("\n") for text in files.values())


def fields(package: dict[str, str], name: str) -> int:
    """Return the fields of a dataclass."""
    classes = (node for text in package.values() for node in ast.walk(ast.parse(text)))
    found = next(node for node in classes if isinstance(node, ast.ClassDef) and node.name == name)
    return sum(isinstance(statement, ast.AnnAssign) for statement in found.body)


def counts(commit: str) -> dict[str, int]:
    """Return every number of the table."""
    package = sources(commit, "oneshot")
    plain = {path: text for path, text in package.items() if "/export/modeling_" not in path}
    return {
        "lines that test a mixer's type": sum(
            bool(MIXER_TEST.search(line)) for text in package.values() for line in text.splitlines()
        ),
        "fields of `LayerShape`": fields(package, "LayerShape"),
        "fields of `ModelShape`": fields(package, "ModelShape"),
        "fields of `Profile`": fields(package, "Profile"),
        "fields of `Method`": fields(package, "Method"),
        "lines of `pipeline.py`": lines({"": package["oneshot/pipeline.py"]}),
        "files of `oneshot/` above 300 lines, without modelling files": sum(
            text.count("\n") > 300 for text in plain.values()
        ),
        "files of model families": sum(
            path.startswith("oneshot/families/") and "Description(" in text for path, text in package.items()
        ),
        "lines of `footprint/`": lines({path: text for path, text in package.items() if "/footprint/" in path}),
        "lines of `oneshot/`": lines(package),
        "lines of `benchmarks/`": lines(sources(commit, "benchmarks")),
        "lines of `tests/`": lines(sources(commit, "tests")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commits", nargs="+")
    commits = parser.parse_args().commits
    columns = [counts(commit) for commit in commits]
    print(f"| | {' | '.join(commits)} |\n|---|{'---|' * len(commits)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns)} |")


if __name__ == "__main__":
    main()
