"""The order of the stages: checkpoint -> plan -> calibration -> hidden size -> (per layer) statistics, factors, fold
-> output.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from oneshot.config import CompressionConfig
from oneshot.embedding import reduce_embedding
from oneshot.errors import ConfigError
from oneshot.footprint import current_bounds, gguf_header, offload_folder, refuse_conversion, with_conversion
from oneshot.hidden import StreamSubspaces, principal_subspaces
from oneshot.inputs import Inputs, open_inputs
from oneshot.layer_shards import EMBEDDING, kept_embedding, write_layers
from oneshot.layerwise import LayerCompressor, reads_activations
from oneshot.plan import (
    Budget,
    plan_sizes,
    predicted_divergences,
    profiled_damages,
    spread_hidden_sizes,
    wanted_parameters,
)
from oneshot.profiles import refuse_existing, save_profile
from oneshot.records import CalibrationSet, Footprint, LayerReport, Plan, Profile, Report
from oneshot.report import ProgressBar, peak_bytes, peak_device_bytes, versions, write_report
from oneshot.result import (
    cast,
    expected_bytes,
    finish_folder,
    finished_report,
    output_config,
    output_folder,
    outside_shards,
    refuse_place,
)
from oneshot.sampling import SELF
from oneshot.source import identify, open_model
from oneshot.writer import CheckpointWriter, refuse_output


def compress(config: CompressionConfig, *, show_progress: bool = False) -> Report:
    """Compress a checkpoint into `config.output` and return the report that is also written there.

    The result is a stock checkpoint (transformers loads it with no code of ours). Nothing appears at the output before
    it is complete. Same seed, same machine and same thread count give the same bytes, also where a run was interrupted
    and another went on with `config.resume`.

    Raises a subclass of `OneshotError` with one sentence for everything that a user can mend.
    """
    with open_inputs(config, show_progress=show_progress) as inputs:
        return _compress(config, inputs)


def compress_sizes(
    config: CompressionConfig, sparsities: Sequence[float], *, show_progress: bool = False
) -> list[Report]:
    """As `compress`, once for every sparsity, into `OUT/sparsity-0.10` and so on; what they share is done once.

    All targets are planned before the first run, so that one out of reach is refused before any work.
    """
    configs = [
        replace(config, sparsity=sparsity, output=str(Path(config.output) / f"sparsity-{sparsity:.2f}"))
        for sparsity in sparsities
    ]
    if len({one.output for one in configs}) < len(configs):
        raise ConfigError("Two of the --sparsity values are equal to two decimals; give each once.")
    # whether a model needs further tensors is asked of the target that removes most
    with open_inputs(max(configs, key=lambda one: one.sparsity or 0), show_progress=show_progress) as inputs:
        for one in configs:
            plan = plan_sizes(one, inputs.recipe, inputs.source.shape, budget=inputs.budget(one))
            inputs.footprint(one, plan)
            refuse_place(one, inputs.source.checkpoint)
        return [_compress(one, inputs) for one in configs]


def predict(config: CompressionConfig) -> Footprint:
    """What `compress` would take: an upper bound of its memory, its disk, its parameters, roughly its time.

    Reads headers only, no weights and no text, and writes nothing. The plan is that of layers which are all alike; a
    profile may share the same parameters out otherwise, which the bound covers. A `--budget latency` is taken as one
    of FLOPs, because measuring a layer needs its weights.

    Raises as `compress` does for what is known before the first weight is read.
    """
    offload_folder(config)
    with torch.inference_mode():
        header = gguf_header(config.checkpoint)
        source = open_model(config.checkpoint, Path()) if header is None else identify(header)
        inputs = Inputs(config, Path(), show_progress=False, source=source)
        if header is not None:
            refuse_conversion(config, header, current_bounds(config, inputs.device))
        refuse_place(config, source.checkpoint)
        unmeasured = replace(config, budget="flops") if config.budget == "latency" else config
        source = inputs.source
        plan = plan_sizes(unmeasured, inputs.recipe, source.shape, budget=inputs.budget(unmeasured))
        if plan.stack(source.shape) != source.shape.stack():
            output_config(source, plan)
        return with_conversion(inputs.footprint(config, plan, dry=True), header)


def profile(config: CompressionConfig, *, show_progress: bool = False) -> Profile:
    """Profile a checkpoint into the folder `config.output`: the error curves that plans are made from.

    Raises as `compress`.
    """
    output = output_folder(config)
    refuse_existing(output)
    with open_inputs(config, show_progress=show_progress) as inputs:
        found = inputs.make_profile(config, inputs.footprint(config, None).tier)
        if inputs.workers.is_main:
            save_profile(found, output)
        return found


def _compress(config: CompressionConfig, inputs: Inputs) -> Report:
    watch, recipe, source, workers = inputs.watch, inputs.recipe, inputs.source, inputs.workers
    checkpoint, shape = source.checkpoint, source.shape
    output = output_folder(config)
    refuse_place(config, checkpoint)
    budget = inputs.budget(config)
    plan = workers.share(0, lambda: plan_sizes(config, recipe, shape, budget=budget))
    if plan.stack(shape) != shape.stack():
        output_config(source, plan)  # refuses what the tier's config cannot hold, before any work
    footprint = inputs.footprint(config, plan)
    layers_read_text = reads_activations(recipe, plan, shape)
    by_profile = recipe.reads_profile and plan.reduces_blocks(shape)
    calibration = None
    if plan.hidden is not None or layers_read_text or by_profile:
        calibration = inputs.read_text(config)
    fingerprint = inputs.fingerprint(config, calibration)
    if config.resume and output.exists():
        finished = finished_report(output, fingerprint)
        if finished is not None:
            return finished
        refuse_output(output, overwrite=config.overwrite, resume=False)
    workers.wait()  # until all have looked, before one of them writes
    watch.lap("prepare")

    num_outside = len(outside_shards(source, plan))
    with ExitStack() as stack:
        writer = None
        if workers.is_main:
            writer = stack.enter_context(
                CheckpointWriter(
                    output,
                    num_shards=shape.num_hidden_layers + num_outside,
                    fingerprint=fingerprint,
                    overwrite=config.overwrite,
                    resume=config.resume,
                    expected_bytes=expected_bytes(config.save_dtype, checkpoint, plan.stack(shape).stored_parameters()),
                )
            )
            if inputs.written is not None:
                writer.keep(SELF, {"token_ids": inputs.written.token_ids.tolist()})
        plan, divergences = _plan_by_measurement(config, inputs, plan, budget, footprint.tier, by_profile, writer)
        plan, subspaces = _find_subspaces(config, inputs, plan, calibration, footprint.tier)
        compressor = LayerCompressor(
            config,
            recipe,
            source,
            plan,
            subspaces,
            device=inputs.device,
            dtype=inputs.dtype,
            scratch=inputs.scratch,
            tier=footprint.tier,
            workers=workers,
        )
        warnings = inputs.warnings.take()
        text = calibration if layers_read_text else None
        layers = write_layers(config, inputs, compressor, plan, text, writer)
        watch.lap("layers")
        report = None
        if writer is not None:
            outside = outside_shards(source, plan, kept_embedding(writer, plan))
            for read in outside[writer.num_finished - shape.num_hidden_layers :]:
                writer.add(cast(config.save_dtype, read(subspaces)))
            compressed = finish_folder(config, source, plan, writer)
            watch.lap("write")
            hidden_error = None if subspaces is None else subspaces.mean_error()
            report = _report(
                config, inputs, plan, compressed, calibration, hidden_error, divergences, layers, fingerprint
            )
            report = replace(report, footprint=footprint, warnings=warnings + inputs.warnings.take())
            write_report(report, writer.partial)
            writer.commit()
        shared = workers.share(0, lambda: report)
    assert shared is not None
    return shared


def _plan_by_measurement(
    config: CompressionConfig,
    inputs: Inputs,
    plan: Plan,
    budget: Budget,
    tier: str,
    by_profile: bool,
    writer: CheckpointWriter | None,
) -> tuple[Plan, dict[str, float] | None]:
    """The plan, made from a profile where the recipe wants that, and the divergences that the profile predicts.

    What was measured is kept: a profile takes long, and latencies would differ the next time. So is the embedding at
    its planned ranks, for which the profile is needed, too.
    """
    kept = inputs.workers.share(0, lambda: None if writer is None else writer.kept("plan"))
    if kept is not None:
        return Plan.from_dict(kept["plan"]), kept["divergences"]
    divergences = None
    if by_profile:
        shape, recipe = inputs.source.shape, inputs.recipe
        found = inputs.read_profile(config, tier)
        damages = profiled_damages(found, recipe.allocation)
        plan = inputs.workers.share(0, lambda: plan_sizes(config, recipe, shape, damages, budget))
        divergences = predicted_divergences(config, recipe, shape, plan, found, budget)
        if writer is not None and plan.embedding:
            embedding = inputs.source.checkpoint.read_one(inputs.source.architecture.embedding)
            seen = (found.embedding_gram.to(inputs.device), found.embedding_probabilities.to(inputs.device))
            writer.keep_tensors(EMBEDDING, reduce_embedding(embedding, *seen, plan.embedding))
        inputs.watch.lap("profile")
    if writer is not None and (by_profile or config.budget == "latency"):
        writer.keep("plan", {"plan": asdict(plan), "divergences": divergences})
    return plan, divergences


def _find_subspaces(
    config: CompressionConfig, inputs: Inputs, plan: Plan, calibration: CalibrationSet | None, tier: str
) -> tuple[Plan, StreamSubspaces | None]:
    """The subspaces of a smaller hidden size, and the plan with the sizes that suit them."""
    if plan.hidden is None or calibration is None:
        return plan, None
    shape = inputs.source.shape
    with ProgressBar(
        num_layers=shape.num_hidden_layers,
        num_tokens=calibration.num_tokens,
        visible=inputs.show_progress,
        description="hidden size",
    ) as progress:
        found = principal_subspaces(
            config,
            inputs.source,
            calibration,
            plan.hidden.group_of,
            device=inputs.device,
            dtype=inputs.dtype,
            scratch=inputs.scratch,
            tier=tier,
            advance=progress.advance,
            workers=inputs.workers,
        )
    if config.hidden_size is None and plan.hidden.num_groups > 1:
        plan = spread_hidden_sizes(
            plan,
            shape,
            found.energies,
            target_parameters=wanted_parameters(config, inputs.dense.stored_parameters()),
            round_to=config.round_to,
        )
    assert plan.hidden is not None
    inputs.watch.lap("hidden size")
    return plan, StreamSubspaces(found, plan.hidden, inputs.device)


def _report(
    config: CompressionConfig,
    inputs: Inputs,
    plan: Plan,
    compressed: int,
    calibration: CalibrationSet | None,
    hidden_error: float | None,
    divergences: dict[str, float] | None,
    layers: list[LayerReport],
    fingerprint: dict[str, Any],
) -> Report:
    source = inputs.source
    dense = source.checkpoint.num_parameters
    stacks = {"dense": inputs.dense, "compressed": plan.stack(source.shape)}
    asked = config.sparsity if config.params is None else 1 - config.params / dense
    return Report(
        config=config.to_dict(),
        recipe=asdict(inputs.recipe),
        versions=versions(),
        plan=asdict(plan),
        stored_parameters={"dense": dense, "compressed": compressed},
        block_parameters={name: stack.block_parameters() for name, stack in stacks.items()},
        flops_per_token={name: stack.flops_per_token() for name, stack in stacks.items()},
        kv_bytes_per_token={name: stack.kv_bytes_per_token() for name, stack in stacks.items()},
        sparsity={"asked": asked, "reached": 1 - compressed / dense},
        dense_shape=asdict(source.shape),
        calibration=None
        if calibration is None
        else {
            "source": calibration.source,
            "num_sequences": len(calibration.token_ids),
            "sequence_length": calibration.token_ids.shape[1],
            "num_tokens": calibration.num_tokens,
            "token_hash": calibration.token_hash,
        },
        layers=tuple(layers),
        seconds=inputs.watch.total(),
        peak_bytes=peak_bytes(),
        peak_device_bytes=peak_device_bytes(),
        hidden_error=hidden_error,
        predicted_divergence=divergences,
        fingerprint=fingerprint,
    )
