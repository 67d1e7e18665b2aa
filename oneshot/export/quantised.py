"""The layers of a result whose linears are quantised, as they are stored."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from oneshot.architecture import Attention, FeedForward, LayerShape, Stack, StackShape
from oneshot.checkpoint import Model
from oneshot.checkpoint.compressed_tensors import SCALE
from oneshot.checkpoint.quantisation import Quantisation, refuse_without_package
from oneshot.compression.rounding import quantised_weights
from oneshot.config import Config, QuantiseName, SaveDtype
from oneshot.errors import ConfigError, PlanError
from oneshot.export.companions import empty_model
from oneshot.export.form import Form
from oneshot.export.resized import ResizedForm
from oneshot.export.saving import SAVED_DTYPES, cast
from oneshot.planning import GROUPS_OF, Grid
from oneshot.serving import ENGINES, Serving
from oneshot.tensors import Tensors

WEIGHT = ".weight"
HEAD = "lm_head"  # engines ask for it, also where the embedding is the head
READ_THROUGH = 0.08  # of the linears' parameters, at most, in plans of three models without 10, 20 and 30 %
ORDER = ".columns"  # what reads a linear of low rank has it, which says so


def quantised_layer(
    form: Form,
    model: Model,
    number: int,
    tensors: Tensors,
    scales: Tensors,
    quantisation: Quantisation,
    save_dtype: SaveDtype,
) -> Tensors:
    """Return the tensors of the result's layer `number` under their stored names, with or without values.

    `scales`: of the weights that are quantised, by name, see `Quantisation.scales`.
    """
    orders = {name: tensor for name, tensor in tensors.items() if name.endswith(ORDER)}
    of_weights, stored = form.layer(model, number, scales | orders), Tensors()
    shared = _global_scales(quantisation, model.family.stack_of(number), scales)
    if shared:
        shared = form.layer(model, number, shared | orders)
    for name, tensor in form.layer(model, number, tensors).items():
        if name in of_weights and not name.endswith(ORDER):
            own = replace(quantisation, over=float(shared[name][0, 0])) if name in shared else quantisation
            stored |= own.packed(name.removesuffix(WEIGHT), tensor, of_weights[name])
        else:
            stored |= cast(save_dtype, {name: tensor})
    return stored


def _global_scales(quantisation: Quantisation, stack: Stack, scales: Tensors) -> Tensors:
    """Return the global scale of every weight `(m, 1)`, by its name; empty without values, or for other schemes."""
    found = Tensors()
    for names in quantised_weights(stack, scales) if quantisation.has_global_scale else []:
        together = [scales[name] for name in names]
        if not together[0].is_meta:
            over = quantisation.for_scales(together).over
            found |= {name: one.new_full((len(one), 1), over) for name, one in zip(names, together, strict=True)}
    return found


def empty_scales(quantisation: Quantisation, stack: Stack, tensors: Tensors) -> Tensors:
    """Return scales without values of the quantised weights of a layer without values, by their names."""
    names = chain.from_iterable(quantised_weights(stack, tensors))
    return {name: quantisation.empty_scales(tensors[name]) for name in names}


def quantised_bytes(quantisation: Quantisation, stack: StackShape, *, awaits_ranks: bool = False) -> int:
    """Return the bytes of weight files of a model of these sizes, without their headers.

    `awaits_ranks`: a profile will give linears low ranks, and they read through matrices that are not quantised.
    """
    sizes = [size for layer in stack.layers for size in linears_of(layer)]
    others = stack.stored_parameters() - stack.indices() - sum(outputs * inputs for outputs, inputs in sizes)
    counted = ((count, *size) for size, count in Counter(sizes).items())
    linears = sum(count * quantisation.linear_bytes(*size) for count, *size in counted)
    if awaits_ranks:
        through = round(READ_THROUGH * sum(outputs * inputs for outputs, inputs in sizes))
        linears, others = round((1 - READ_THROUGH) * linears), others + through
    return others * quantisation.dtype.itemsize + torch.int64.itemsize * stack.indices() + linears


def linears_of(layer: LayerShape) -> Iterator[tuple[int, int]]:
    """Yield the outputs and the inputs of the linears of a layer that are quantised."""
    heads, groups, width = layer.num_attention_heads, layer.num_key_value_heads, layer.intermediate_size
    if heads:
        read = layer.query_key_rank or layer.hidden_size
        yield from ((count * layer.query_key_size, read) for count in (heads, groups))
        yield groups * layer.value_size, layer.hidden_size
        yield layer.middle_size, layer.output_rank or heads * layer.value_size
    if width:
        if layer.gated:
            yield width, layer.gate_rank or layer.middle_size
        yield width, layer.up_rank or layer.middle_size
        yield layer.output_size, width


def quantisation_of(config: Config, model: Model) -> Quantisation | None:
    """Return what the linears of a result become; None if they are not quantised. The target's groups are settled.

    Raises `PlanError` for a dtype in which compressed-tensors does not read the numbers.
    """
    if config.quantise is None:
        return None
    like = model.without_values().read_layer(0)[f"{model.family.stack.token_mixer.out}.weight"]
    groups = GROUPS_OF.get(config.quantise, (0,))
    group = groups[0] if len(groups) == 1 else config.target.serving.group
    found = Quantisation(config.quantise, group, SAVED_DTYPES.get(config.save_dtype, like.dtype))
    if found.scheme.weights.scale_dtype is not None and found.dtype != torch.bfloat16:
        raise PlanError(
            f"--quantise {config.quantise} stores numbers that compressed-tensors reads in bfloat16 alone; add "
            "--save-dtype bfloat16."
        )
    return found


def quantisation_config(
    quantisation: Quantisation, config: dict[str, Any], names: Iterable[str], further: Iterable[str]
) -> dict[str, Any]:
    """Return `quantization_config` of a result's `config`, whose files have tensors of these names.

    `further`: the tensors of layers for tokens after the next one, which stay.
    """
    ending = f".{SCALE}"
    done = {name.removesuffix(ending) for name in names if name.endswith(ending)}
    linears = [name for name, module in empty_model(config).named_modules() if isinstance(module, nn.Linear)]
    beside = [name.removesuffix(WEIGHT) for name in sorted(further) if name.endswith(WEIGHT)]
    return quantisation.config([name for name in dict.fromkeys((*linears, HEAD, *beside)) if name not in done])


def refuse_quantising(name: QuantiseName, model: Model, serving: Serving) -> None:
    """Raise `PlanError` if nothing can be quantised, or a model has other layers than attention and FFNs of linears."""
    refuse_without_package()
    family = model.family
    if serving.engine in ("mlx", "trtllm", "llama.cpp"):
        raise PlanError(
            f"--quantise writes the format compressed-tensors, which {ENGINES[serving.engine]} does not open; leave it "
            "out, or name another engine."
        )
    others = {
        "encoders": not family.stack.causal or family.decoder is not None,
        "mixtures of experts": model.shape.experts is not None,
        "language models of images": family.text_module is not None,
        "attention with a latent": any(one.latent for one in family.stack.attentions),
        "hybrids": any(
            not isinstance(one.mixer, Attention | FeedForward)
            for each in range(model.shape.num_hidden_layers)
            for one in family.stack_of(each).sublayers
        ),
        "linears of the class Conv1D": bool(family.stack.transposed),
    }
    found = next((what for what, is_so in others.items() if is_so), None)
    if found is not None:
        raise PlanError(
            f"--quantise {name} rounds the linears of decoders with attention and FFNs; for {found} such as "
            f"{family.model_type}, leave it out and quantise the result with llm-compressor."
        )


def refuse_quantised_form(form: Form, model: Model, serving: Serving) -> None:
    """Raise `PlanError` if the engine that is named opens a form, and not with quantised linears."""
    if serving.engine == "vllm" and isinstance(form, ResizedForm):
        raise PlanError(
            f"vLLM's plugin has no quantised linears for the layers of {model.family.model_type}; add --form stock, or "
            "leave --quantise out."
        )


def refuse_quantising_kept(grid: Grid) -> None:
    """Raise `ConfigError` for layers that `--keep` says stay as they are: their linears would be rounded."""
    if grid.kept.attention or grid.kept.ffn:
        raise ConfigError(
            "--keep of layers and --quantise do not go together, because that rounds the linears of every layer; leave "
            "one out, or keep embed_tokens alone."
        )
