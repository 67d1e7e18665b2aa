"""Decide if sizes open where a result is to be served (`--serve`): as equal shares for all GPUs, of whole groups.

A linear that reads the residual stream is shared by its outputs, and one that writes it by its inputs (Megatron-LM,
1909.08053, section 3). So heads and neurons are shared, and groups must divide the inputs that one GPU has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from oneshot.architecture import LayerShape, ModelShape, shapes_of
from oneshot.config import QuantiseName, Target
from oneshot.errors import PlanError
from oneshot.serving import Serving

Half = Literal["attention", "ffn"]
SMALLER_GROUPS = (128, 64, 32, 16)  # of the kernels of quantisers
GROUPS_OF: dict[QuantiseName, tuple[int, ...]] = {"w4a16": (128, 64, 32), "nvfp4": (16,), "mxfp4": (32,)}


class MisfitError(PlanError):
    """No size that a plan may have can be served as it is asked for."""


def inputs_of(shape: ModelShape, number: int, layer: LayerShape, half: Half) -> Iterator[int]:
    """Yield the inputs of every linear in one half of a layer, by its number in the dense model.

    The last one writes the stream, unless the mixer is carried.
    """
    if half == "ffn":
        if layer.intermediate_size:
            yield from (layer.up_rank or layer.middle_size, layer.gate_rank or layer.middle_size)
            if layer.experts is not None and (shared := layer.experts.shared(layer.intermediate_size)):
                yield shared
            yield layer.intermediate_size
    elif layer.carried:
        tensors = shape.carried_tensors(number)
        yield from (size[1] for size in tensors.values() if len(size) == 2)
    elif layer.latent is not None:
        tensors = shapes_of(layer.latent.axes("", biased=False), layer.sizes)
        output = tensors.pop(".o_proj.weight")
        yield from (size[1] for size in (*tensors.values(), output) if len(size) == 2)
    elif layer.num_attention_heads:
        yield from (layer.hidden_size, layer.query_key_rank or layer.hidden_size)
        yield layer.output_rank or layer.num_attention_heads * layer.value_size


def misfit(
    serving: Serving, shape: ModelShape, number: int, layer: LayerShape, half: Half, *, replicates: bool
) -> str | None:
    """Return why half of a layer cannot be served so, as the beginning of a sentence; None if it can.

    `number`: of the layer in the dense model. `replicates`: whether several GPUs may have the same KV head.
    """
    inputs, tp = list(inputs_of(shape, number, layer, half)), serving.tp
    for size in inputs:
        if size % serving.group:
            return f"A linear of layer {number} has {size} inputs, which groups of {serving.group} do not divide"
    if not inputs or (half == "attention" and layer.carried):
        return None
    shared = {"inputs of attention's output": inputs[-1]}
    if half == "ffn":
        shared = {"neurons": inputs[-1]}
        if layer.experts is not None:
            shared["neurons of a shared expert"] = layer.experts.shared(layer.intermediate_size)
    else:
        heads, groups = layer.num_attention_heads, layer.num_key_value_heads
        counts = {"heads": heads}
        if layer.latent is None and not (replicates and tp % groups == 0):
            counts["KV heads"] = groups
        for what, count in counts.items():
            if count % tp:
                return f"Layer {number} has {count} {what}, which {tp} GPUs cannot share equally"
    for what, size in shared.items():
        if size % (tp * serving.group):
            share = f"in groups of {serving.group} weights" if serving.group > 1 else "equally"
            return f"Layer {number} has {size} {what}, which {tp} GPU{'s' * (tp > 1)} cannot share {share}"
    return None


def less_demanding(serving: Serving, groups: Sequence[int]) -> Iterator[Serving]:
    """Yield what asks for less, for advice: the smaller of these `groups`, and then fewer GPUs."""
    yield from (replace(serving, group=group) for group in groups if group < serving.group)
    yield from (replace(serving, tp=tp) for tp in range(serving.tp - 1, 0, -1))
    yield replace(serving, tp=1, group=1)


def with_groups(target: Target, quantise: QuantiseName | None, shape: ModelShape) -> Target:
    """Return the target whose sizes are whole groups of the weights that are rounded together.

    A group that `--serve` states stays. Otherwise it is the largest that divides what the result keeps of the model.

    Raises `PlanError` if none does, or if the stated one is not one that the format has.
    """
    serving, groups = target.serving, () if quantise is None else GROUPS_OF.get(quantise, ())
    if not groups:
        return target
    if serving.group > 1:
        if len(groups) == 1 and serving.group % groups[0]:
            raise PlanError(
                f"--quantise {quantise} rounds weights in groups of {groups[0]} inputs, of which --serve "
                f"group={serving.group} is not a multiple; leave group= out."
            )
        if len(groups) > 1 and serving.group not in groups:  # engines have kernels for these alone
            raise PlanError(
                f"--quantise {quantise} rounds weights in groups of {', '.join(map(str, groups[:-1]))} or {groups[-1]} "
                f"inputs, and not in groups of {serving.group}; give one of them to --serve, or leave group= out."
            )
        return target
    fixed = {target.hidden_size or own.hidden_size for own in shape.distinct}
    fixed |= {own.num_attention_heads * own.head_dim for own in shape.distinct}
    fixed = (fixed | {own.intermediate_size for own in shape.distinct}) - {0}
    group = next((group for group in groups if all(size % group == 0 for size in fixed)), None)
    if group is None:
        odd = [str(size) for size in sorted(fixed) if size % groups[-1]]
        raise PlanError(
            f"--quantise {quantise} rounds weights in groups of {groups[-1]} inputs{' or more' * (len(groups) > 1)}, "
            f"which do not divide the {' and '.join(odd)} inputs of this model's linears; use "
            "--quantise w8a8."
        )
    return replace(target, serve=str(replace(serving, group=group)))
