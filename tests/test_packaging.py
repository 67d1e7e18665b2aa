"""The distribution: its name and extras in messages and documents exist, data files are in it."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.version import Version

from oneshot.version import __version__

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_extra_that_is_named_exists() -> None:
    """The name `oneshot` on PyPI belongs to another project, so nothing may tell users to install it."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    texts = [(ROOT / name).read_text() for name in files if name.endswith((".py", ".md", ".toml", ".yaml", "Makefile"))]
    named = {match for text in texts for match in re.findall(r"\b(oneshot(?:-llm)?)\[(\w+(?:,\w+)*)\]", text)}
    assert named
    assert {name for name, _ in named} == {PROJECT["project"]["name"]}
    extras = {extra for _, listed in named for extra in listed.split(",")}
    assert extras <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_makefile_installs_extras_that_exist() -> None:
    named = re.findall(r"-e '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text() + (ROOT / "README.md").read_text())
    extras = {extra for listed in named for extra in listed.split(",")}
    assert extras
    assert extras <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    """`floors.txt` pins every dependency of the package and of its extras for users at the least version allowed."""
    extras = PROJECT["project"]["optional-dependencies"]
    listed = [*PROJECT["project"]["dependencies"], *extras["gguf"], *extras["quantise"], extras["pieces"][0]]
    lowest = {
        name: Version(version) for name, version in (re.findall(r"([\w-]+)>=([\d.]+)", line)[0] for line in listed)
    }
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "floors.txt").read_text(), re.MULTILINE))
    assert {name: Version(version) for name, version in pinned.items()} == lowest


def test_data_files_are_in_the_distribution() -> None:
    included = PROJECT["tool"]["setuptools"]["package-data"]
    for path in (ROOT / "oneshot").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(ROOT).parts)
            assert any(path.match(pattern) for pattern in included[package]), path


def test_the_version_is_the_modules() -> None:
    (dynamic,) = PROJECT["tool"]["setuptools"]["dynamic"].values()
    assert dynamic == {"attr": "oneshot.version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_the_citation_is_of_this_version_and_names_no_person() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what the format requires
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["project"]["license"])
    assert citation["authors"] == [{"name": "The oneshot developers"}]


def test_every_environment_takes_the_index_of_torch() -> None:
    """`TORCH_INDEX` chooses the small build of torch; an environment that ignores it downloads gigabytes of CUDA."""
    installs = re.findall(
        r"^\t.*pip install .*-c (?:constraints|floors)\.txt.* torch$", (ROOT / "Makefile").read_text(), re.M
    )
    assert len(installs) == 3  # make setup, make test-floors, make demo
    assert [line for line in installs if "$(TORCH_INDEX)" not in line] == []


def test_the_index_of_torch_is_honoured_where_torch_is_installed_for_users() -> None:
    """`make setup`, `make demo` and `make test-floors`; engines for tests pin a build of their own."""
    lines = re.findall(r"^\t.*pip install .*\btorch$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(lines) == 3
    assert all("$(TORCH_INDEX) torch" in line for line in lines)
