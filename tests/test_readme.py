"""Numbers in the documents come from `benchmarks/results/`; commands and keys in the documents exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from oneshot.cli.chat import build_parser as chat_parser
from oneshot.cli.compress import build_parser as compress_parser
from oneshot.cli.evaluate import build_parser as evaluate_parser
from oneshot.cli.imatrix import build_parser as imatrix_parser
from oneshot.cli.profile import build_parser as profile_parser
from oneshot.settings import settings

ROOT = Path(__file__).resolve().parent.parent
GUIDES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("kernels/*/*/*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
    ROOT / "examples/README.md",
]
FOREIGN = {
    *("--model", "--model_args", "--multi_gpu", "--num_processes"),  # lm_eval, accelerate
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"),  # torchrun
    *("--index-url", "--no-deps"),  # pip
    *("--outtype", "--outfile", "--pure", "--imatrix", "--process-output", "--tensor-type-file"),  # llama.cpp
    *("--enforce-eager", "--speculative-config", "--compilation-config", "--model-impl", "--trust-remote-code"),  # vLLM
    *(
        "--tensor-parallel-size",
        "--lora-modules",
        "--fully-sharded-loras",
        "--pipeline-parallel-size",
        "--enable-expert-parallel",
        "--enable-lora",
        "--quantization",
    ),
    *("--tiny", "--sections", "--card-gib", "--host-gib"),  # scripts in benchmarks/
}
EXTERNAL = re.compile(r"(?:https?|mailto):")


def named(document: Path, pattern: str) -> set[str]:
    return set(re.findall(pattern, document.read_text()))


def test_tables_are_rendered_from_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr("sys.argv", ["render.py", "--check"])
    assert importlib.import_module("render").main() == 0, "run python benchmarks/render.py"


@pytest.mark.parametrize("document", GUIDES, ids=lambda path: path.name)
def test_every_option_named_exists(document: Path) -> None:
    parsers = (compress_parser(), evaluate_parser(), profile_parser(), imatrix_parser(), chat_parser())
    known = {option for parser in parsers for option in parser._option_string_actions}
    assert named(document, r"(?<![\w-])--[a-z][\w-]*") - FOREIGN - known == set()


def test_the_demo_ends_with_rows_and_with_options_and_pages_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    ours, favour, against, advice = importlib.import_module("demo").elsewhere().splitlines()
    scores = [[float(score) for score in re.findall(r"× ([0-9.]+)", line)] for line in (ours, favour, against)]
    assert [len(found) for found in scores] == [1, 2, 1]
    assert 1 < scores[1][0] < scores[1][1]  # the best other tool
    assert scores[2][0] > 1
    of_ours, of_small = (float(re.findall(r"([0-9]+) MB", line)[0]) for line in (ours, against))
    assert 0 < of_small < of_ours / 2
    parser = compress_parser()
    options = re.findall(r"--[a-z-]+(?: gguf)?", advice)
    assert options == ["--form gguf", "--max-file-size"]
    assert all(option.partition(" ")[0] in parser._option_string_actions for option in options)
    (page,) = re.findall(r"docs/[\w-]+\.md", advice)
    assert (ROOT / page).exists()


@pytest.mark.parametrize("document", GUIDES, ids=lambda path: path.name)
def test_every_key_named_exists(document: Path) -> None:
    known = {*settings(), "key"}
    assert named(document, r"--set (\w+)=") - known == set()


@pytest.mark.parametrize("root", ["README.md", "docs", "oneshot", "examples"])
def test_every_setting_has_its_flag(root: str) -> None:
    """`--set` takes one setting; the parser takes the next word for the checkpoint. Sentences of code run on."""
    place = ROOT / root
    files = [place] if place.is_file() else [*place.rglob("*.md"), *place.rglob("*.py")]
    assert set().union(*(named(file, r'--set \w+=\w+[\s"]+\w+=\w+') for file in files)) == set()


def test_the_command_line_page_has_every_option() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    options = {
        option
        for parser in (compress_parser(), evaluate_parser(), profile_parser(), imatrix_parser(), chat_parser())
        for action in parser._actions
        for option in action.option_strings
        if action.help != "==SUPPRESS==" and option.startswith("--")
    }
    keys = {option for option in options if f"`{option.removeprefix('--').replace('-', '_')}`" in text}
    shown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert options - keys - shown == set()


def test_the_command_line_page_has_every_key() -> None:
    page = ROOT / "docs" / "command-line.md"
    flags = {option.removeprefix("--").replace("-", "_") for option in named(page, r"(?<![\w-])--[a-z][\w-]*")}
    assert set(settings()) - named(page, r"`(\w+)`") - flags == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_linked_exists(document: Path) -> None:
    targets = named(document, r"\]\(([^)#\s]+)[^)]*\)")
    missing = {target for target in targets if not EXTERNAL.match(target) and not (document.parent / target).exists()}
    assert missing == set()


@pytest.mark.parametrize("document", GUIDES, ids=lambda path: path.name)
def test_python_examples_compile(document: Path) -> None:
    for example in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        ast.parse(example)


def test_the_first_screen_is_short() -> None:
    first, *_ = (ROOT / "README.md").read_text().split("\n## ")
    assert len(first.splitlines()) <= 60
    assert max(map(len, re.findall(r"^[^`|\n!\[].*$", first, re.MULTILINE))) <= 160


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_github_renders_has_no_raw_links_and_no_comments(document: Path) -> None:
    """A comment at the beginning of a line opens a block of HTML in CommonMark, which swallows the rest of the line."""
    faults = []
    for token in MarkdownIt("commonmark").enable("table").parse(document.read_text()):
        if token.type == "html_block":
            lines = token.content.strip().splitlines()
            faults += [line for line in lines if not re.fullmatch(r"<!-- (?:(?!-->).)* -->", line.strip())]
        for child in token.children or ():
            if child.type == "text" and re.search(r"\]\(|<!--|-->", child.content):
                faults.append(child.content)
    assert faults == []


def test_every_function_named_by_a_recipe_exists() -> None:
    sources = [path for package in ("oneshot", "kernels") for path in (ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources)
    known = {path.stem for path in sources} | set(re.findall(r"(?:def|class) (\w+)", code))
    for page in (ROOT / "docs" / "recipes").glob("*.md"):
        for table in re.findall(r"\| [^\n|]+ \| function \| source \|\n(.*?)\n\n", page.read_text(), re.DOTALL):
            cells = [line.split(" | ")[1] for line in table.splitlines()[1:]]
            assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} - known == set()


def test_python_in_the_documents_names_a_model_of_the_hub_or_a_variable() -> None:
    """A bare name is neither a folder that is there nor a name on the hub."""
    pattern = r'oneshot\.(?:compress|predict|profile|evaluate)\("([^"]+)"'
    names = {name for document in GUIDES for name in named(document, pattern)}
    assert names
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", name) for name in names), names
