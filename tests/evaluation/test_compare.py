"""The paired test between sets of rows, against SciPy, a linear model and simulated seeds; the table of parts."""

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rows import KINDS, ShowRows, quality_row
from scipy import stats


@pytest.fixture
def compare(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("compare")


def row(seed: int, losses: np.ndarray, **changes: Any) -> dict[str, Any]:
    """A row as `quality.py` writes it; losses `(5, windows)` of a model, beside a dense model with losses of 1."""
    per_text = dict(zip(KINDS, losses.tolist(), strict=True))
    own = {
        "texts": {kind: {"token_hash": kind} for kind in KINDS},
        "recipe": "oneshot",
        "form": "per-layer",
        "settings": {},
        "asked": 0.2,
        "seed": seed,
        "calibration": "general.jsonl+self",
        "calibration_tokens": 131072,
        "calibration_hash": f"of seed {seed}",
        "window_losses": per_text,
        "perplexity": {kind: math.exp(np.mean(values)) for kind, values in per_text.items()},
        "score": math.exp(losses.mean() - 1),
        "worst": "piqa",
        "worst_ratio": 2.0,
    }
    return quality_row(**own | changes)


def test_one_seed_is_the_paired_t_test_of_scipy(compare: ModuleType) -> None:
    draw = np.random.default_rng(0)
    one, other = draw.normal(3, 0.3, 20), draw.normal(3.1, 0.3, 20)
    found = compare.paired_difference((one - other)[None])
    reference = stats.ttest_rel(one, other)
    interval = reference.confidence_interval(0.95)
    assert (found.mean, found.p) == pytest.approx((np.mean(one - other), reference.pvalue))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.standard_error == pytest.approx(stats.sem(one - other))
    assert found.by_seed == pytest.approx((found.mean,))


def test_variance_of_several_seeds_is_that_of_a_linear_model(compare: ModuleType) -> None:
    """Mean squares from residuals of least squares with dummy variables, and Satterthwaite's degrees of freedom."""
    draw = np.random.default_rng(1)
    seeds, windows = 3, 20
    table = (
        draw.normal(0, 0.02, (seeds, 1)) + draw.normal(0, 0.02, (1, windows)) + draw.normal(0, 0.01, (seeds, windows))
    )
    of_seed, of_window = np.indices(table.shape).reshape(2, -1)
    values = table.ravel()

    def residual(*factors: np.ndarray) -> float:
        design = np.column_stack([np.ones(values.size), *(np.eye(int(factor.max()) + 1)[factor] for factor in factors)])
        return float(((values - design @ np.linalg.lstsq(design, values, rcond=None)[0]) ** 2).sum())

    rest = residual(of_seed, of_window)
    squares = [
        (residual(of_seed) - rest) / (windows - 1),
        (residual(of_window) - rest) / (seeds - 1),
        rest / ((seeds - 1) * (windows - 1)),
    ]
    assert min(squares[:2]) > squares[2], "no component is cut off at zero"
    total = squares[0] + squares[1] - squares[2]
    freedom = total**2 / (squares[0] ** 2 / 19 + squares[1] ** 2 / 2 + squares[2] ** 2 / 38)
    found = compare.paired_difference(table)
    assert found.standard_error == pytest.approx(math.sqrt(total / 60))
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, freedom) * found.standard_error)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(table.mean()) / found.standard_error, freedom))
    assert found.by_seed == pytest.approx(table.mean(1))


@pytest.mark.parametrize(("of_seeds", "of_windows"), [(0.0, 0.02), (0.004, 0.02), (0.02, 0.0), (0.0, 0.0)])
def test_the_interval_contains_the_truth_as_often_as_it_says(
    compare: ModuleType, of_seeds: float, of_windows: float
) -> None:
    """Simulated differences of a known mean; with windows alone as units, noise of seeds would be overlooked."""
    draw = np.random.default_rng(2)
    rounds = 1000
    hits = 0
    for _ in range(rounds):
        table = draw.normal(0, of_seeds, (3, 1)) + draw.normal(0, of_windows, (1, 20)) + draw.normal(0, 0.01, (3, 20))
        found = compare.paired_difference(0.03 + table)
        hits += found.low <= 0.03 <= found.high
    assert hits / rounds > 0.93


def test_equal_models_do_not_differ(compare: ModuleType) -> None:
    same = compare.paired_difference(np.zeros((3, 20)))
    assert (same.mean, same.low, same.high, same.p, same.is_real) == (0, 0, 0, 1, False)
    shifted = compare.paired_difference(np.full((3, 20), 0.5))
    assert (shifted.mean, shifted.p, shifted.is_real) == (0.5, 0, True)
    with pytest.raises(ValueError, match="at least two windows, not 1"):
        compare.paired_difference(np.zeros((3, 1)))


def test_rows_are_paired_by_seed_and_window(compare: ModuleType) -> None:
    draw = np.random.default_rng(3)
    losses = {seed: draw.normal(3, 0.3, (2, 5, 4)) for seed in range(3)}
    on = [row(seed, losses[seed][0]) for seed in (2, 0, 1)]
    off = [row(seed, losses[seed][1]) for seed in range(3)]
    off.append(row(7, losses[0][1]))  # a seed that only one side has
    off[1].pop("window_losses")  # an old row
    found = compare.compare_rows(on, off)
    assert found.by_seed == pytest.approx([(losses[seed][0] - losses[seed][1]).mean() for seed in (2, 0)])
    ratios = [math.log(one["score"] / other["score"]) for one, other in ((on[0], off[2]), (on[1], off[0]))]
    assert found.by_seed == pytest.approx(ratios), "the logarithm of the scores' ratio"
    assert compare.compare_rows(on, off[1:2]) is None
    with pytest.raises(ValueError, match="seed 0 were judged on different windows"):
        compare.compare_rows(on, [row(0, losses[0][1], texts={})])


def test_table_of_parts(show_rows: ShowRows) -> None:
    """Rows are found by their settings; a part without rows is left out; old rows have no test."""
    draw = np.random.default_rng(4)
    base = draw.normal(1.4, 0.2, (5, 4))
    noise = {seed: draw.normal(0, 0.01, (5, 4)) for seed in range(3)}
    rows = [row(0, np.ones((5, 4)), recipe="dense", sparsity=0.0)]
    whole = {"ranks": "none"}
    rows += [row(seed, base - 0.3) for seed in range(3)]
    rows += [row(seed, base + noise[seed], settings=whole) for seed in range(3)]
    rows += [row(seed, base - 0.4 + noise[seed], settings={"up_steps": 4}) for seed in range(3)]
    rows += [row(seed, base - 0.3 + noise[seed], settings={"residual_weight": 0}) for seed in range(3)]
    rows += [row(0, base + 0.2, calibration="general.jsonl")]
    del rows[-1]["window_losses"]
    rows += [row(0, base + 0.5, settings={"correction": "none"}, calibration_tokens=4096)]  # fewer tokens
    rows += [row(0, base + 0.5, settings=whole | {"embedding": "none"})]  # not the default less one part
    show_rows(rows)
    table = importlib.import_module("tables.paired").paired_parts_table()
    lines = {line.split(" | ")[0].removeprefix("| "): line.strip("| ").split(" | ") for line in table.splitlines()[2:]}
    assert "correction" not in lines
    assert "ranks of the embedding" not in lines
    assert lines["half of the text from the model itself"][4:] == ["–"] * 4
    scores = [math.exp((base - 0.4 + noise[seed]).mean() - 1) for seed in range(3)]
    steps = lines["`--up-steps 4`"]
    assert steps[2] == f"{np.mean(scores):.3f} ± {np.std(scores, ddof=1):.3f}"
    change = math.expm1(-0.1 + np.mean(list(noise.values())))
    assert steps[4] == f"**−{abs(change):.1%}**"
    assert steps[7].count("−") == 3
    change = math.expm1(-0.3 - np.mean(list(noise.values())))
    assert lines["ranks of linears"][4] == f"**−{abs(change):.1%}**"
    residual = lines["a quarter of the residual"]
    assert not residual[4].startswith("**"), "noise is not real"
    assert float(residual[6]) > 0.05
    show_rows(rows[:1])
    assert importlib.import_module("tables.paired").paired_parts_table() == "Not measured yet."


def test_both_sides_of_a_part_have_the_same_text_or_are_of_the_same_time(show_rows: ShowRows) -> None:
    """The newest rows are taken only where the text is the part."""
    base = np.random.default_rng(6).normal(1.4, 0.2, (5, 4))
    rows = [row(0, np.ones((5, 4)), recipe="dense", sparsity=0.0), row(0, base, date="2026-01-01")]
    rows += [row(0, base + 0.1, settings={"ranks": "none"}, date="2026-01-02")]
    rows += [row(0, base + 0.2, settings={"embedding": "none"}, calibration_hash="other", date="2026-02-01")]
    rows += [row(0, base + 0.3, calibration="general.jsonl", calibration_hash="broad", date="2026-02-01")]
    rows += [row(0, base - 0.5, calibration_hash="newer", date="2026-03-01")]
    show_rows(rows)
    table = importlib.import_module("tables.paired").paired_parts_table()
    scores = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2:4] for line in table.splitlines()[2:5]}
    old, new, ranks, embedding, broad = (f"{math.exp((base + add).mean() - 1):.3f}" for add in (0, -0.5, 0.1, 0.2, 0.3))
    assert scores == {
        "ranks of linears": [old, ranks],
        "ranks of the embedding": [old, embedding],
        "half of the text from the model itself": [new, broad],
    }


def test_table_of_the_models_own_text(show_rows: ShowRows) -> None:
    """Mixtures in the order of their share; only rows that have seconds say what the writing takes."""
    base = np.random.default_rng(5).normal(1.4, 0.2, (5, 4))
    quarter = "general.jsonl+general.jsonl+general.jsonl+self"
    rows = [row(0, np.ones((5, 4)), recipe="dense", sparsity=0.0), row(0, base - 0.1), row(0, base - 0.1)]
    rows[2] |= {"calibration": quarter, "seconds": {"prepare": 30.0, "profile": 40.0, "layers": 80.0, "total": 150.0}}
    rows += [row(0, base, calibration="general.jsonl"), row(0, base, calibration="wikitext2_valid.txt+self")]
    show_rows(rows)
    table = importlib.import_module("tables.own_text").own_text_table()
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:5]]
    assert [line[:2] for line in lines] == [["0%", "general.jsonl"], ["25%", quarter], ["50%", "general.jsonl+self"]]
    assert [line[2] for line in lines] == [f"{math.exp(base.mean() - 1 - less):.3f}" for less in (0, 0.1, 0.1)]
    assert [line[3] for line in lines] == ["–", "**−9.5%**", "**−9.5%**"]
    assert [line[-1] for line in lines] == ["–", "0.25", "–"]


def test_calibration_names_files_of_the_data_folder(harness: ModuleType, tmp_path: Path) -> None:
    given = harness.calibration_files("a.jsonl+a.jsonl+self", tmp_path)
    assert given == f"{tmp_path}/a.jsonl+{tmp_path}/a.jsonl+self"
    record = harness.calibration_record({"calibration": None, "config": {"text": {"calibration": given}}})
    assert record["calibration"] == "a.jsonl+a.jsonl+self"
    alone = harness.calibration_files("a.jsonl", tmp_path)
    assert alone == f"{tmp_path}/a.jsonl+{tmp_path}/a.jsonl"  # without the package's text
    record = harness.calibration_record({"calibration": None, "config": {"text": {"calibration": alone}}})
    assert record["calibration"] == "a.jsonl"
