"""Whole runs on the pretended device: devices do not mix, nothing waits inside loops, memory stays below its bound."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pipeline_on_pretended_cuda import RUNS, table

from oneshot import profiling
from oneshot.footprint import bounds, memory
from oneshot.footprint.seconds import ARRIVAL_LAUNCHES, EXPERT_LAUNCHES
from oneshot.run import run as shared
from oneshot.stream import EXPERTS_TOGETHER

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
# What the host may wait for in a layer, by stage. A wait of 20 microseconds in a loop over pivots would be seconds.
WAITS_A_LAYER = {
    "upload": 1,  # the finished layer is on the host
    "sums": 1,  # they are finite
    "selection": 1,  # the Gram is finite
    "correction": 6,  # the factorisation held; columns that are dead; errors, condition, coefficients
}
# Of the layer's own sizes: positions of a new width, and the rotary frequencies that transformers makes for it.
WAITS_OF_SIZES = {"forward": 4}
# The influence of the layer, and the size of its probe.
WAITS_OF_A_PROFILE = {"sums": 1, "selection": 1, "correction": 7, "profile": 2}
# Four linears, which profile and layer decompose; the layer stores some.
WAITS_OF_RANKS = {
    "sums": 6,  # Grams are finite
    "correction": 8,  # roots held, three in a profile; pivots of what is stored
    "hidden size": 8,  # eigendecompositions
    "ranks": 4,  # error curves
    "profile": 3,  # errors of the probes, once a sublayer
}
WAITS_OF_CURVATURE = {
    "curvature": 11,  # matrices that a profile and a layer read
    "correction": 4,  # their roots held
}
CHECK = "oneshot/stream/check.py"  # it runs the stock model
LOOPS = ("batches", "neurons", "tokens")
# Runs with activations on disk, that choose by loops on the host, or that decompose ranges of a vocabulary or linears.
WAITING = (
    "activations on disk",
    "per-layer, embedding",
    "per-layer, embedding beside a head",
    "own text",
    "ffn obs",
    "heads obs",
    "sketch, tournament",
    "gram, tournament",
    "ranks, biases",
    "ranks, large",
    "ranks, no curvature",
    "norms inside",
    "hybrid",
    "twice the experts",  # each is solved by itself
    "experts by a profile",
)


@cache
def measured() -> dict[str, dict[str, Any]]:
    """Return what `pipeline_on_pretended_cuda.py` prints, by run; it patches torch, so it has a process of its own."""
    root = HERE.parents[1]
    folders = (root, root / "kernels", root / "tests", HERE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(HERE / "pipeline_on_pretended_cuda.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    print(table(rows))
    return {row["name"]: row for row in rows}


def test_naming_the_runs_leaves_the_package_as_it_is() -> None:
    """Only the process of the runs replaces parts of it: every worker of the suite imports this file."""
    assert shared.measure_curvature is profiling.measure_curvature
    assert bounds.DEVICE_SLACK_BYTES is memory.DEVICE_SLACK_BYTES


@pytest.mark.parametrize("name", RUNS)
def test_devices_do_not_mix(name: str) -> None:
    assert measured()[name]["error"] == ""


@pytest.mark.parametrize(("place", "store"), [("the host", "host"), ("disk", "disk")])
def test_activations_are_where_bounds_put_them(place: str, store: str) -> None:
    assert measured()[f"activations on {place}"]["store"] == store


@pytest.mark.parametrize("name", RUNS)
def test_peaks_are_below_the_prediction(name: str) -> None:
    row = measured()[name]
    assert 0 < row["peak_bytes"] <= row["predicted_bytes"], f"{row['peak_site']}; {row['predicted_stage']}"


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_converted_on_the_host(name: str) -> None:
    assert measured()[name]["converted_on_host"] == {}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_summed_in_the_order_of_chance(name: str) -> None:
    """No operation whose result CUDA does not promise to give again, but in the check, which changes no result."""
    assert {site for site in measured()[name]["by_chance"] if not site.startswith(CHECK)} == set()


@pytest.mark.parametrize("name", RUNS)
def test_every_factorisation_is_cusolvers(name: str) -> None:
    """MAGMA warns, and is slower where torch takes it; the setting of the process is as it was after a run."""
    assert measured()[name]["by_magma"] == {}
    assert measured()[name]["linalg_library"] == "default"


@pytest.mark.parametrize("form", ["oneshot", "per-layer"])
@pytest.mark.parametrize("what", LOOPS)
def test_no_wait_in_a_loop(form: str, what: str) -> None:
    """Over pivots, batches and rows: twice as many of them wait no more."""
    more = f"{form}, twice the {what}"
    if more in RUNS:
        assert measured()[more]["waits"] == measured()[form]["waits"]


@pytest.mark.parametrize("form", ["oneshot", "per-layer", "ranks"])
def test_waits_of_a_layer(form: str) -> None:
    few, many = measured()[form]["waits"], measured()[f"{form}, a layer more"]["waits"]
    allowed = WAITS_A_LAYER if form == "oneshot" else _sum(_sum(WAITS_A_LAYER, WAITS_OF_SIZES), WAITS_OF_A_PROFILE)
    if form == "ranks":
        allowed = _sum(_sum(allowed, WAITS_OF_RANKS), WAITS_OF_CURVATURE)
    for stage in many:
        assert many[stage] - few.get(stage, 0) <= allowed.get(stage, 0), stage


def test_most_runs_wait_rarely() -> None:
    """Of two layers; what is once a run is less than forty."""
    for name, row in measured().items():
        if name not in WAITING:
            assert sum(row["waits"].values()) < 40 + 65 * row["layers"], name


def _sum(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {stage: left.get(stage, 0) + right.get(stage, 0) for stage in left | right}


def test_an_expert_takes_the_kernels_that_seconds_are_predicted_from() -> None:
    """Eight experts more in two layers; the statistics have two batches. Two waits: the Gram held, coefficients."""
    few, many = measured()["experts"], measured()["twice the experts"]
    kernels, waits = ((sum(many[name].values()) - sum(few[name].values())) / (8 * 2) for name in ("kernels", "waits"))
    assert kernels == pytest.approx(EXPERT_LAUNCHES + 2 * ARRIVAL_LAUNCHES / EXPERTS_TOGETHER, rel=0.25)
    assert waits < 2.2
