"""Progress of a stage, as it is shown and told."""

import warnings

import pytest

from oneshot.report.progress import Progress, ProgressBar


def test_what_is_shown_and_told_ends_at_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts are sums of fractions, and tqdm warns on stderr if their rounding exceeds the total."""
    told: list[Progress] = []
    with warnings.catch_warnings(action="error"):
        for shown in (True, told.append):
            with ProgressBar(num_layers=3, num_tokens=10, visible=shown) as bar:
                for _ in range(3):
                    bar.advance(10 + 1e-9)
    assert [progress.done for progress in told] == pytest.approx([10, 20, 30])
    assert told[-1].done == told[-1].total == 30
    assert "30.0/30.0" in capsys.readouterr().err


def test_without_a_total_everything_is_counted() -> None:
    told: list[Progress] = []
    with ProgressBar(num_layers=3, num_tokens=0, visible=told.append) as bar:
        for _ in range(2):
            bar.advance(7)
    assert told == [Progress("layer 1/3", 7), Progress("layer 1/3", 14)]
