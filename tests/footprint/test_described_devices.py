"""Predictions for cards that are not here: what fits, and how long it would take."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_estimate import (
    CARDS,
    CPU_RATES,
    FIRST_RUN,
    GIB,
    MIXTURE_RUNS,
    RUNS,
    Described,
    described_work,
    estimate,
    first_run,
    footprint_of,
    in_groups,
)
from harness import read_rows

from oneshot.checkpoint import Model, identify
from oneshot.errors import MemoryLimitError
from oneshot.footprint.rates import CAPTURE_SECONDS, Rates
from oneshot.footprint.seconds import operations_of_token, predicted_phases


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
    assert plan("70B", 24, 64, form="per-layer", curvature="none").store == "host"  # the probes, too


def test_what_does_not_fit_says_what_helps() -> None:
    with pytest.raises(MemoryLimitError, match="--sequence-length"):
        plan("8B", 4, 64, form="per-layer", curvature="none")
    with pytest.raises(MemoryLimitError, match="--set curvature=none"):
        plan("70B", 24, 64, form="per-layer", sequence_length=1024)


def test_experts_in_groups_fit_a_smaller_card_than_all_together() -> None:
    name, rates = "Qwen3-30B-A3B", CARDS["RTX 4090"].rates
    seconds = []
    for card, groups, store in ((24, 1, "device"), (9, 3, "device"), (8, 1, "disk"), (5, 6, "disk")):
        config, work = described_work(described(name), card * GIB, MIXTURE_RUNS["neurons"])
        found = footprint_of(config, work, card * GIB, 14 * GIB)
        assert (found.expert_groups, found.store) == (groups, store)
        assert found.device_bytes <= 0.9 * card * GIB
        phases = predicted_phases(in_groups(work, found), rates, found.store)["layers"]
        seconds.append(phases["forward"])
    assert seconds[0] == seconds[2] < seconds[1] < seconds[3]
    with pytest.raises(MemoryLimitError, match=r"--max-device-memory 4[0-9]{3}MiB"):  # one expert at a time, on disk
        footprint_of(*described_work(described(name), 4 * GIB, MIXTURE_RUNS["neurons"]), 4 * GIB, 14 * GIB)


@pytest.mark.parametrize(("run", "most"), [("stock", 60), ("per-layer, self", 125)])
def test_seconds_of_7b_on_an_h200(run: str, most: int) -> None:
    assert 20 < estimate("7B", described("7B"), "H200", run)["total"] < most


def test_the_first_run_took_what_the_model_says() -> None:
    """Of the commit that ran first on a GPU, with its 15 launches for a pivot and its second writing of all files."""
    rows = [row for row in read_rows("gpu") if row["section"] == FIRST_RUN]
    assert {row["model"] for row in rows} == {"1.1B", "7B"}
    for row in rows:
        assert 1 / 1.3 < first_run(described(row["model"]), row)["total"] / row["wall_seconds"] < 1.3


def test_pivots_of_the_experiment_take_what_the_model_says() -> None:
    """Triton in a graph, with updates of the whole Gram: today's of one triangle may take less, and not half."""
    rates = CARDS["H100"].rates
    for row in read_rows("gpu"):
        if row["kind"] == "pivots" and row.get("what") == "triton in a graph, width 128, tile 32":
            taken, pivots = row["seconds"], {4096: 2816, 11008: 7552}[row["n"]]
            assert 0.5 * taken < rates.pivots(row["n"], pivots) < 2 * taken


def test_pivots_cost_launches_and_bandwidth_and_not_cubes() -> None:
    """A rate measured at 768 columns said 10,855 s for what takes about 20 without graphs."""
    rates = CARDS["H200"].rates
    small, large = (rates.pivots(size, size) - CAPTURE_SECONDS for size in (768, 11008))
    assert 11008 / 768 < large / small < 4 * 11008 / 768
    cpu = Rates(1e11, 1e11, 1e11, 1e11, pivoted=1e10)
    assert cpu.pivots(1536, 1000) == pytest.approx(1536**3 / 3 / 1e10)


def test_attention_has_its_own_rate() -> None:
    """A tenth of the rate takes ten times as long."""
    work, usual = described_work(described("7B"), None, RUNS["per-layer"])[1], CPU_RATES
    slow = replace(usual, attention=usual.stream / 10)
    attended = 2 * work.text.sequence_length * work.heads_width
    assert operations_of_token(work, replace(usual, attention=usual.stream)) == operations_of_token(work, usual)
    assert operations_of_token(work, slow) == pytest.approx(operations_of_token(work, usual) + 9 * attended)
    seconds = [predicted_phases(work, rates)["curvature"]["forward"] for rates in (usual, slow)]
    assert seconds[1] / seconds[0] == pytest.approx(operations_of_token(work, slow) / operations_of_token(work, usual))
