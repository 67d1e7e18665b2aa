"""Sizes and ranks by layer are on the terminal, on the page and in the card, and equal the plan."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from factories import MakeCheckpoint, MakeConfig

from oneshot import Report
from oneshot.pipeline import compress
from oneshot.report.layer_table import layer_table
from oneshot.report.page import report_page
from oneshot.report.terminal import print_report


@pytest.fixture
def report(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> Report:
    """A run whose ranks are replaced: one layer has low ranks alone, the other a width alone."""
    made = compress(make_config(make_checkpoint(), form="per-layer", round_to=1))
    whole = {name: None for name in made.plan["layers"][0] if name.endswith(("_rank", "_size"))}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    layers = [
        whole | sizes | {"intermediate_size": 64, "query_key_rank": 9, "up_rank": 21},
        whole | sizes | {"intermediate_size": 31},
    ]
    unchanged = replace(made.layers[0], sublayers=())
    return replace(made, plan=made.plan | {"layers": layers}, layers=(unchanged, made.layers[1]))


def test_the_table_has_what_some_layer_has_changed(report: Report) -> None:
    headings, rows = layer_table(report)
    assert headings == ["layer", "FFN", "rank q, k", "rank up"]
    assert rows == [["0", "64", "9", "21"], ["1", "31", "–", "–"]]


def test_it_is_on_the_terminal_and_on_the_page(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report)
    lines = capsys.readouterr().out.replace("│", " ").splitlines()
    assert ["0", "64", "9", "21"] in [line.split() for line in lines]
    page = re.sub(r"\s+", "", report_page(report))
    assert "<tr><td>0</td><td>64</td><td>9</td><td>21</td></tr>" in page
    assert "linearsoflowrank" in page
    assert "asitwas" not in page


def test_an_equal_width_is_one_column_and_nothing_is_no_table(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    made = compress(make_config(make_checkpoint(), recipe="magnitude"))
    headings, rows = layer_table(made)
    assert headings == ["layer", "FFN"]
    assert len({tuple(row[1:]) for row in rows}) == 1
    assert "<details>" in (tmp_path / "out" / "README.md").read_text()
    dense = compress(make_config(make_checkpoint(), recipe="magnitude", sparsity=0.0, output=tmp_path / "dense"))
    assert layer_table(dense) == ([], [])
    assert "<details>" not in (tmp_path / "dense" / "README.md").read_text()
