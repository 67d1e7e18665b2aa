"""Every use of output curvature by itself, and ideas around it: one compression each, of the same text.

`compressed_by_idea` yields a row for every idea. Uses are switched off, and ideas that are not in the package are
tried, by replacing parts of it for one run, so none of them is a setting. `gpu.py` runs it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from harness import Row
from judging import losses, score, text_scores

from oneshot import Config
from oneshot.compression import curvature as curvature_module
from oneshot.compression import steps, tasks
from oneshot.compression.ranks import RankAccumulator
from oneshot.pipeline import compress
from oneshot.profiling import curvature as measuring_curvature
from oneshot.run import open_run, resources
from oneshot.text import save_token_ids

USES = ("prices", "neurons", "ranks")


@dataclass(frozen=True)
class Idea:
    """State what a run does differently.

    Attributes:
        uses: members of `USES`: prices of sizes, the choice of neurons, the directions that a rank keeps.
        tokens: number of tokens that measure it; None for the package's.
        shrinkage: of the curvature; None for the package's.
    """

    name: str
    uses: tuple[str, ...] = USES
    tokens: int | None = None
    shrinkage: float | None = None


IDEAS = (
    Idea("default"),
    Idea("no curvature", uses=()),
    *(Idea(f"{use} alone", uses=(use,)) for use in USES),
    Idea("4 times the tokens of curvature, shrinkage 0.1", tokens=65_536, shrinkage=0.1),
)


def calibration_tokens(config: Config, folder: Path) -> str:
    """Return a file in `folder` with the calibration's tokens, which several runs read."""
    with open_run(config) as run:
        path = folder / "tokens.safetensors"
        save_token_ids(run.text.token_ids, path)
    return str(path)


def compressed_by_idea(
    config: Config, ideas: Sequence[Idea], dense: Mapping[str, float], windows: dict[str, torch.Tensor]
) -> Iterator[tuple[Row, Path]]:
    """Compress by every idea; yield a row of each, and the folder of the result.

    Args:
        config: what is asked; its text is a file of tokens. dense: the perplexities of the dense model.
    """
    for idea in ideas:
        asked = config if idea.uses else replace(config, method=replace(config.method, curvature="none"))
        with ExitStack() as changes:
            _change(idea, changes)
            report = compress(asked)
        folder = Path(asked.output)
        measured = losses(text_scores([folder], windows, device=torch.device(config.machine.device))[0])
        row = {"idea": idea.name, "asked": report.sparsity["asked"], "sparsity": report.sparsity["reached"]}
        row |= {"seed": config.seed, "seconds": report.seconds, "form": config.form}
        yield row | measured | score(measured["perplexity"], dense), folder


def _change(idea: Idea, changes: ExitStack) -> None:
    """Replace parts of the package as the idea asks."""
    if idea.uses and "prices" not in idea.uses:
        measure_profile = resources.make_profile

        def without_prices(*given: Any, **named: Any) -> Any:
            return measure_profile(*given, **named | {"curvature": None})

        changes.enter_context(patch.object(resources, "make_profile", without_prices))
    if idea.uses and "neurons" not in idea.uses:
        none = PropertyMock(return_value=None)
        changes.enter_context(patch.object(tasks.FeedForwardTask, "neuron_curvature", none))
    if idea.uses and "ranks" not in idea.uses:
        changes.enter_context(patch.object(steps, "RankAccumulator", _PlainRanks))
    if idea.tokens is not None:
        for module in (measuring_curvature, resources):
            changes.enter_context(patch.object(module, "CURVATURE_TOKENS", idea.tokens))
    if idea.shrinkage is not None:
        changes.enter_context(patch.object(curvature_module, "SHRINKAGE", idea.shrinkage))


class _PlainRanks(RankAccumulator):
    """Ranks that count squared errors."""

    def finish(self, workers: Any, curvature: Any = None) -> Any:
        return super().finish(workers)
