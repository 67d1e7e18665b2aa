"""The stages that a user sees of a run, and how their predicted seconds compare."""

from oneshot.footprint.rates import Rates
from oneshot.footprint.seconds import predicted_phases
from oneshot.footprint.work import Work
from oneshot.machine import Store

# Rates of a usual machine: two cores of a server, measured in float32, and an H100 (`benchmarks/gpu_estimate.py`).
USUAL_CPU = Rates(4e10, 4e10, 2e10, 2e10, pivoted=1e10)
USUAL_DEVICE = Rates(499e12, 499e12, 50.4e12, 61.2e12, pivot_seconds=6.5e-6, bandwidth=2.76e12, link=54.9e9)


def stage_seconds(work: Work, store: Store) -> dict[str, float]:
    """Return the stages in order, with seconds on a usual machine: only their ratios are meant.

    A stage has 0 if its seconds do not depend on how fast the machine computes.
    """
    phases = predicted_phases(work, USUAL_DEVICE if work.on_cuda else USUAL_CPU, store)
    stages, written = {"reading": 0.0}, phases.pop("prepare").get("own text", 0.0)
    if written:
        stages["writing text"] = written
    for name, seconds in phases.items():
        embedding = seconds.pop("embedding", 0.0)
        stages[name] = sum(seconds.values())
        if embedding:
            stages["ranks of the embedding"] = embedding
        if name == "profile" and work.plan is not None:
            stages["planning the sizes of the layers"] = 0.0
    written_last = {} if work.plan is None else {"writing": 0.0}
    last = {"importance": stages.pop("importance")} if "importance" in stages else {}
    return stages | written_last | last
