"""Predicted seconds where several processes share a run: what they share out as docs/guides/processes.md says."""

import math
from collections.abc import Mapping

from oneshot.footprint.rates import Rates
from oneshot.footprint.work import Work
from oneshot.machine.sharing import Loads
from oneshot.profiling.embedding import TABLE_PROBES
from oneshot.profiling.profiler import STATISTICS_SEQUENCES
from oneshot.text import SELF
from oneshot.text.self_written import DOCUMENT_TOKENS

Seconds = dict[str, float]  # by phase
OF_TEXT = {"forward", "backward", "sums", "output head", "launches"}
OF_NEURONS = {"pivots", "solve", "energies", "condition"}
RANKED, RANKED_TOGETHER = 4, 2  # tasks of a layer: queries and keys, output, gate, up; and of a sublayer


def of_one_process(
    work: Work, stages: Mapping[str, Seconds], rates: Rates, summed: Mapping[str, float]
) -> dict[str, Seconds]:
    """Return the seconds of the process that takes longest, from what one process alone would take.

    Every process reads each layer, so transfers stay whole. Sums of a stage travel between devices at the rate of the
    link to the host, because no other one is measured.

    Args:
        summed: numbers of float64 that the processes add up for a layer, by stage.
    """
    shared, count = {stage: dict(phases) for stage, phases in stages.items()}, work.machine.workers.size
    if count == 1:
        return shared
    batches = {"curvature": work.curvature_batches, "profile": _batches(work, STATISTICS_SEQUENCES)}
    documents = math.ceil(work.source_tokens.get(SELF, 0) / DOCUMENT_TOKENS)
    probes = min(TABLE_PROBES, work.text.num_sequences)
    for stage, phases in shared.items():
        _scale_(phases, OF_TEXT, _longest_part(batches.get(stage, _batches(work)), count))
        _scale_(phases, {"embedding"}, _longest_part(probes, count))
        _scale_(phases, {"own text"}, _longest_part(math.ceil(documents / work.documents_together), count))
        if stage == "profile" and work.shape.experts is None:
            ffn, ranks = sum(phases.get(phase, 0.0) for phase in OF_NEURONS), phases.get("ranks", 0.0)
            _scale_(phases, OF_NEURONS | {"ranks"}, _longest_share([ffn, *[ranks / RANKED] * RANKED], count))
        else:  # a sublayer needs the one before it
            _scale_(phases, {"ranks"}, _longest_share([1.0] * RANKED_TOGETHER, count))
            _scale_(phases, OF_NEURONS, 1 / count if work.shape.experts is not None else 1.0)
        if stage in summed:
            travelling = 2 * (count - 1) / count * 8 * summed[stage] * work.shape.num_hidden_layers
            phases["exchange"] = travelling / rates.link
    return shared


def _batches(work: Work, most_sequences: int | None = None) -> int:
    sequences = min(work.text.num_sequences, most_sequences or work.text.num_sequences)
    return math.ceil(sequences / work.machine.batch_size)


def _scale_(phases: Seconds, names: set[str], factor: float) -> None:
    phases.update({name: phases[name] * factor for name in names & phases.keys()})


def _longest_part(count: int, processes: int) -> float:
    """Return the share of so many equal items that the process with the most gets."""
    return math.ceil(count / processes) / count if count else 1.0


def _longest_share(costs: list[float], count: int) -> float:
    """Return the share of all costs that the process with the most gets."""
    loads = Loads(count)
    loads.share_out(costs)
    return max(loads.stage) / (sum(costs) or 1.0)
