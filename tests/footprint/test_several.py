"""Predicted seconds of runs that several processes share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_estimate import BATCHES, CARDS, CPU_RATES, MEASURED, MIXTURE_RUNS, RUNS, Described, described_work

from oneshot.checkpoint import identify
from oneshot.footprint.seconds import predicted_phases
from oneshot.footprint.several import OF_NEURONS

Phases = dict[str, dict[str, float]]


def predicted(name: str, run: str, processes: int) -> Phases:
    changes = (RUNS | MIXTURE_RUNS)[run] | BATCHES.get(name, {})
    model, card = identify(Described(name)), CARDS[MEASURED]
    return predicted_phases(described_work(model, card.memory, changes, processes=processes)[1], card.rates)


@pytest.fixture(scope="module")
def dense() -> dict[int, Phases]:
    return {count: predicted("8B", "per-layer", count) for count in (1, 4, 64)}


def test_the_text_is_divided_and_every_process_reads_the_layers(dense: dict[int, Phases]) -> None:
    for stage, phases in dense[1].items():
        for phase in ("forward", "backward", "sums", "output head", "transfer"):
            if phase in phases:
                share = 1 if phase == "transfer" else 1 / 4
                assert dense[4][stage][phase] == pytest.approx(share * phases[phase])
    # 32 batches: half of 64 processes have none
    assert dense[64]["layers"]["forward"] == pytest.approx(dense[1]["layers"]["forward"] / 32)


def test_an_ffn_of_a_profile_is_one_task_and_those_of_layers_wait(dense: dict[int, Phases]) -> None:
    alone, several = dense[1]["profile"], dense[64]["profile"]
    ffn, ranks = sum(alone[phase] for phase in OF_NEURONS), alone["ranks"]
    tasks = OF_NEURONS | {"ranks"}
    assert sum(several[phase] for phase in tasks) == pytest.approx(max(ffn, ranks / 4))
    four = sum(dense[4]["profile"][phase] for phase in tasks)
    assert (ffn + ranks) / 4 <= four <= 4 / 3 * max(ffn, (ffn + ranks) / 4)
    for phase in OF_NEURONS:
        assert dense[64]["layers"][phase] == dense[1]["layers"][phase]
    assert dense[4]["layers"]["ranks"] == pytest.approx(dense[1]["layers"]["ranks"] / 2), "two of a sublayer at a time"
    # 8 batches
    assert dense[64]["curvature"]["forward"] == pytest.approx(dense[1]["curvature"]["forward"] / 8)


def test_text_that_the_model_writes_is_divided_by_what_is_written_at_once() -> None:
    """Of 128 sequences of 2,048 tokens half are written: 512 documents, of which a CPU writes 64 at once."""
    model = identify(Described("7B"))
    alone, several = (
        predicted_phases(described_work(model, None, RUNS["per-layer, self"], processes=count)[1], CPU_RATES)
        for count in (1, 4)
    )
    assert several["prepare"]["own text"] == pytest.approx(alone["prepare"]["own text"] / 4)


def test_experts_are_divided() -> None:
    alone, several = (predicted("Qwen3-30B-A3B", "neurons", count)["layers"] for count in (1, 4))
    for phase in OF_NEURONS | {"forward", "sums", "launches"}:
        assert several[phase] == pytest.approx(alone[phase] / 4)


def test_one_process_exchanges_nothing_and_more_exchange_more(dense: dict[int, Phases]) -> None:
    assert not any("exchange" in phases for phases in dense[1].values())
    for stage in ("curvature", "profile", "layers"):
        assert 0 < dense[4][stage]["exchange"] < dense[64][stage]["exchange"] < 4 / 3 * dense[4][stage]["exchange"]
