"""Making a profile: the layers in order, then the tables of the vocabulary."""

import logging
from collections.abc import Sequence
from functools import partial

from oneshot.architecture import Table
from oneshot.checkpoint import Model
from oneshot.checkpoint.safe_files import config_hash
from oneshot.compression import Curvature
from oneshot.machine import Machine
from oneshot.method import Method
from oneshot.planning import Profile, ProfileOrigin, removed_unit
from oneshot.profiling.embedding import no_table_profile, profile_tables, table_steps
from oneshot.profiling.profiler import LayerProfiler
from oneshot.report.progress import ProgressBar, Tracker
from oneshot.report.provenance import versions
from oneshot.stream import read_ahead
from oneshot.text import Text

logger = logging.getLogger(__name__)


def make_profile(
    model: Model,
    text: Text,
    method: Method,
    machine: Machine,
    *,
    kinds: Sequence[str],
    tables: Sequence[Table],
    curvature: Curvature | None = None,
    tracker: Tracker | None = None,
) -> Profile:
    """Pass the dense model once over the first sequences and measure what smaller sizes cost.

    Args:
        kinds: members of `probes.PROBED_KINDS` whose sensitivity is measured.
        tables: of the vocabulary, whose ranks are measured; with the embedding a few sequences pass the layers once
            more.
        curvature: output curvature, in whose metric errors are measured; None for squared errors.
    """
    tracker = Tracker() if tracker is None else tracker
    num_layers, unit = model.shape.num_hidden_layers, removed_unit(method, model.shape)
    layers = partial(read_ahead, model, machine.device)
    profiler = LayerProfiler(
        model, machine, text, head_unit=unit, damping=method.fixed_damping, probed=kinds, curvature=curvature
    )
    progress = ProgressBar(tracker, num_layers=num_layers, total=profiler.states.num_tokens, stage="profile")
    profiler.states.advance = progress.advance
    for layer, tensors in enumerate(layers()):
        profiler.profile_layer(layer, tensors)
        del tensors  # free before the next layer is waited for
    of_tables = no_table_profile()
    if tables:
        steps = table_steps(model, tables)
        progress = ProgressBar(tracker, total=steps, stage="ranks of the embedding", unit="steps")
        of_tables = profile_tables(
            *(model, profiler.states, profiler.text, layers),
            other_kinds=profiler.other_kinds,
            tables=tables,
            curvature=curvature,
            advance=progress.advance,
        )
    tracker.step("comparing outputs", brief=True)
    origin = ProfileOrigin(
        model_hash=model.checkpoint.content_hash(),
        config_hash=config_hash(model.checkpoint.folder),
        token_hash=text.token_hash,
        head_unit=unit,
        damping=method.fixed_damping,
        probe_tokens=profiler.num_probe_tokens,
        versions=versions(),
        curvature="none" if curvature is None else method.curvature,
        weights={} if model.checkpoint.log is None else model.checkpoint.log.hashes,
    )
    profile = profiler.finish(origin, of_tables)
    if machine.workers.is_main:
        _warn_of_unseen(profile)
    return profile


def _warn_of_unseen(profile: Profile) -> None:
    """Warn of experts whose cost a profile does not know."""
    routed = profile.expert_tokens[profile.expert_tokens.sum(1) > 0]
    unseen = int((routed == 0).sum())
    if unseen:
        logger.warning(
            "In the profile %d of the %d experts of all layers got no token, so what they cost counts as nothing; give "
            "text of every kind that the model is for.",
            *(unseen, routed.numel()),
        )
