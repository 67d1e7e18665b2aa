"""Predictions for cards that are not here: what fits, and how long it would take."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_estimate import CARDS, GIB, Described, described_work, estimate, footprint_of

from oneshot.checkpoint import Model, identify
from oneshot.errors import MemoryLimitError
from oneshot.footprint.seconds import Rates


@cache
def described(name: str) -> Model:
    return identify(Described(name))


def plan(name: str, card: int, host: int, **changes: Any) -> Any:
    """Return the footprint on a card and a host of so many GiB."""
    config, work = described_work(described(name), card * GIB, changes)
    return footprint_of(config, work, card * GIB, host * GIB)


def test_70b_fits_a_card_of_24_gib_and_a_host_of_64() -> None:
    found = plan("70B", 24, 64)
    assert found.store == "host"
    assert found.device_bytes < 0.9 * 24 * GIB
    assert plan("70B", 24, 64, form="per-layer", sequence_length=1024).store == "host"


def test_what_does_not_fit_says_what_helps() -> None:
    with pytest.raises(MemoryLimitError, match="--sequence-length"):
        plan("70B", 24, 64, form="per-layer")


@pytest.mark.parametrize(("run", "most"), [("stock", 60), ("per-layer, self", 120)])
def test_seconds_of_7b_on_an_h200(run: str, most: int) -> None:
    assert 20 < estimate("7B", described("7B"), "H200", run)["total"] < most


def test_pivots_cost_launches_and_bandwidth_and_not_cubes() -> None:
    """A rate measured at 768 columns said 10,855 s for what takes about 20."""
    rates = CARDS["H200"].rates
    small, large = rates.pivots(768, 768), rates.pivots(11008, 11008)
    assert 11008 / 768 < large / small < 4 * 11008 / 768
    cpu = Rates(1e11, 1e11, 1e11, 1e11, pivoted=1e10)
    assert cpu.pivots(1536, 1000) == pytest.approx(1536**3 / 3 / 1e10)
