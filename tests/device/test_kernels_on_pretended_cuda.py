"""What the kernels would ask of a CUDA device: no host tensors, few launches, no waits in loops, little memory."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
KERNELS_A_PIVOT = 30  # of torch; a GPU replays them in a graph
WIDTH = 128  # of a panel, in panels.py
CHOOSERS = [
    "cholesky_pivots_",
    "greedy_pivots",
    "grouped_pivots",
    "grouped_pivots of a matrix",
    "pivoted_cholesky",
    "pivoted_qr",
    "tournament_pivots",
]


@cache
def measured() -> list[dict[str, Any]]:
    """Return what `kernels_on_pretended_cuda.py` prints; it patches torch, so it is run in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "kernels"), str(HERE)])}
    environment.pop("ONESHOT_KERNELS", None)
    script = [sys.executable, str(HERE / "kernels_on_pretended_cuda.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(name: str) -> list[dict[str, Any]]:
    found = [each for each in measured() if each["name"] == name]
    assert found
    return found


@pytest.mark.parametrize("name", CHOOSERS)
def test_pivots_are_those_of_the_cpu(name: str) -> None:
    assert all(each["error"] <= 1e-10 for each in of(name))


@pytest.mark.parametrize("name", CHOOSERS)
def test_few_kernels_a_pivot(name: str) -> None:
    """Of what is beyond the work for fewer pivots, so that what is done once a call does not count."""
    few, many = of(name)
    taken = many["taken"] - few["taken"]
    assert 0 < (many["kernels"] - few["kernels"]) / taken < KERNELS_A_PIVOT


@pytest.mark.parametrize("name", ["cholesky_pivots_", "greedy_pivots"])
def test_one_wait_a_call(name: str) -> None:
    """For the check that the Gram is finite, and for the number of pivots found."""
    assert [each["waits"] for each in of(name)] == [1, 1]


@pytest.mark.parametrize("name", [name for name in CHOOSERS if name != "tournament_pivots"])
def test_waits_do_not_grow_with_the_pivots(name: str) -> None:
    few, many = of(name)
    assert few["waits"] == many["waits"]


def test_a_tournament_waits_for_its_panels_alone() -> None:
    few, many = of("tournament_pivots")
    panels = (many["rank"] - few["rank"]) // 32
    assert many["waits"] - few["waits"] <= 8 * panels


@pytest.mark.parametrize("name", CHOOSERS)
def test_no_wait_in_the_loops_over_pivots(name: str) -> None:
    assert not [line for each in of(name) for line in each["waits_by_line"] if "panels.py" in line]


def test_pivots_alone_need_one_panel() -> None:
    """The Gram's own memory holds the rest: 1.55 n² numbers in all are reached at n = 256, 1.01 n² at n = 11,008."""
    for each in of("cholesky_pivots_"):
        row = int((each["square_bytes"] // 8) ** 0.5) * 8
        assert each["peak_bytes"] <= (WIDTH + 12) * row
        assert each["peak_bytes"] + each["square_bytes"] <= 1.55 * each["square_bytes"]


def test_a_factor_needs_a_copy_and_its_rows_twice() -> None:
    for each in of("pivoted_cholesky"):
        row = int((each["square_bytes"] // 8) ** 0.5) * 8
        assert each["peak_bytes"] <= each["square_bytes"] + 2 * each["rank"] * row + 16 * row


@pytest.mark.parametrize("name", ["gram_", "mirror_", "cross_gram_", "sketch_"])
def test_sums_are_right_and_do_not_wait(name: str) -> None:
    for each in of(name):
        assert each["waits"] == 0
        assert each["error"] <= {"torch.float32": 2e-4, "torch.float64": 1e-11}[each["out"]]


def test_nothing_is_summed_in_the_order_of_chance() -> None:
    assert not [each for each in measured() if each.get("by_chance")]


@pytest.mark.parametrize("rows", ["torch.bfloat16", "torch.float16"])
def test_halves_are_summed_in_place_as_they_are(rows: str) -> None:
    for name in ("gram_", "cross_gram_"):
        for each in of(name):
            if each["rows"] == rows and each["out"] == "torch.float32":
                assert each["peak_bytes"] == 0


def test_devices_do_not_mix() -> None:
    (found,) = of("mixed devices")
    assert "two, cuda:0 and cpu" in found["message"]
