"""Names of checkpoints, texts and outputs with any characters: they work, also in the report, or are refused."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from factories import Fails, MakeCheckpoint, small_arguments

from oneshot.cli.compress import main


@pytest.mark.parametrize("checkpoint", ["n" * 5000, "~no-such-user/model", "/" + "n" * 300])
def test_names_that_the_system_refuses(checkpoint: str, fails: Fails) -> None:
    assert checkpoint[:200] in fails(Path(checkpoint))


@pytest.mark.parametrize("output", ["n" * 300, "~no-such-user/out", "zero\0byte"])
def test_output_names_that_the_system_refuses(
    output: str, make_checkpoint: MakeCheckpoint, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(make_checkpoint()), f"--output={output}", "--sparsity=0.2", f"--calibration={text_file}"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --output ")


NAMES = [
    "with space",
    "q'uo\"te`s",
    "li\nne",
    "ünï-語",
    "[red] *b* <script>x & |",
    "e\x1b[31m",
    "a[1]*?",
]


class _Text(HTMLParser):
    """Collect the texts of a page by element."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self._within: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._within.append(tag)
        self.texts.setdefault(tag, "")

    def handle_endtag(self, tag: str) -> None:
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._within:
            self.texts[self._within[-1]] += data


@pytest.mark.parametrize("name", NAMES)
def test_names_of_folders_and_files(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(shutil.copytree(make_checkpoint(), tmp_path / name))
    text = tmp_path / f"{name}.jsonl"
    text.write_text(json.dumps({"text": text_file.read_text()}) + "\n")
    output = tmp_path / "results" / name
    assert main(small_arguments(folder, output, text)) == 0, capsys.readouterr().err
    assert [path.name for path in output.parent.iterdir()] == [name]
    report = json.loads((output / "oneshot_report.json").read_text())
    assert report["config"]["checkpoint"] == str(folder)
    assert report["config"]["output"] == str(output)
    page = _Text()
    page.feed((output / "report.html").read_text(encoding="utf-8"))
    assert page.texts["title"] == f"{name}, compressed"
    assert "script" not in page.texts
    card = (output / "README.md").read_text(encoding="utf-8")
    headings = [line for line in card.splitlines() if line.startswith("# ")]
    shown = {"li\nne": "li\\\\nne", "e\x1b[31m": "e\\\\x1b\\[31m"}
    escaped = "".join(f"\\{letter}" if letter in "\\`*[]<>&|" else letter for letter in name)
    assert headings == [f"# Compressed from {shown.get(name, escaped)}"]
    AutoModelForCausalLM.from_pretrained(output)


def test_names_that_are_not_unicode(
    make_checkpoint: MakeCheckpoint, own_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path, fails: Fails
) -> None:
    folder = own_checkpoint().rename(tmp_path / "n\udcff")
    assert "n\\udcff cannot be read" in fails(folder)
    text, output = tmp_path / "t\udcff.txt", tmp_path / "out"
    shutil.copy(text_file, text)
    assert main([*small_arguments(make_checkpoint(), output, text), "--quiet"]) == 0
    assert json.loads((output / "oneshot_report.json").read_text())["config"]["text"]["calibration"] == str(text)
    assert "t\\udcff.txt" in (output / "report.html").read_text(encoding="utf-8")
    assert "t\\udcff.txt`" in (output / "README.md").read_text(encoding="utf-8")
