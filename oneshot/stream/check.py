"""Check before any work that our way through a model equals its stock class's: a family may be described wrongly.

A few tokens pass transformers' own model with one layer of every kind, and with those whose keys it borrows. Hooks keep
the states before every sublayer. From each of them our own step has to lead to the next. It also finds a release of
transformers that changed a class.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from oneshot.architecture import Stack, fuse
from oneshot.checkpoint import Model, complete_text_config, make_buffers, resized_config, sample_model
from oneshot.checkpoint.checks import lacks_pooler
from oneshot.errors import CheckpointError
from oneshot.families import is_text, with_text
from oneshot.machine import Machine
from oneshot.machine.transfer import uploaded
from oneshot.stream.layer import Layer
from oneshot.stream.layers import LayerBuilder
from oneshot.stream.memory import Memory, memory_of
from oneshot.stream.output_head import OutputHead
from oneshot.tensors import Tensors
from oneshot.text import Text

NUM_TOKENS = 8
WINDOW = 4  # tokens that a sliding window sees here, so that the sequence is longer than it
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative to what a part adds
ROUNDINGS = 2  # of the states, which may be much larger than what a part adds
PART_NAMES = {"heads": "attention", "cross-heads": "cross-attention", "carried": "carried mixer", "ffn": "FFN"}


@dataclass(frozen=True)
class _Step:
    """A part of the model: our own states after it, the stock model's, and the states `before` it (None: zeros)."""

    name: str
    ours: torch.Tensor
    theirs: torch.Tensor
    before: torch.Tensor | None = None

    def difference(self) -> float:
        """Return the difference relative to what the part adds, beyond rounding of the states.

        If the stock model overflows, there is nothing to compare; the run itself will refuse the weights.
        """
        if not self.theirs.isfinite().all():
            return 0.0
        ours, theirs = self.ours.double(), self.theirs.double().view_as(self.ours)
        added = theirs if self.before is None else theirs - self.before.double().view_as(ours)
        rounding = ROUNDINGS * torch.finfo(self.theirs.dtype).eps * theirs.norm()
        lost = (ours - theirs).norm() - rounding
        return float(lost.clamp_min(0) / added.norm().clamp_min(torch.finfo(added.dtype).tiny))


def check_family(model: Model, machine: Machine) -> None:
    """Compare embeddings, every sublayer of one layer of each kind, and predictions with the stock class.

    Raises `CheckpointError` that names the first part that differs.
    """
    config, family = model.checkpoint.config, model.family
    if complete_text_config(family, config).get("sliding_window"):
        narrow = with_text(family, config, {"sliding_window": WINDOW})
        model = replace(model, checkpoint=model.checkpoint.stating(**narrow))
    for kind in sorted(set(model.kinds)):
        numbers = [*model.family.lenders, kind] if model.family.borrows(kind) else [kind]
        layers = {
            stack.layers: [model.read_layer(max(stack.first_layer, number)) for number in numbers]
            for stack in model.family.stacks
        }
        stock = _stock_model(model, machine, numbers, layers)
        for step in _steps(model, machine, numbers, stock, layers):
            difference = step.difference()
            if not difference <= TOLERANCES[machine.dtype]:
                raise CheckpointError(
                    f"The {step.name} of this {model.family.model_type} computes something else here than in "
                    f"{type(stock).__name__} of transformers {version('transformers')} (it differs by "
                    f"{difference:.1%}), so the model is not supported; please report this with its config.json."
                )


def _stock_model(
    model: Model, machine: Machine, numbers: Sequence[int], layers: Mapping[str, Sequence[Tensors]]
) -> Any:
    """Return the stock model of these layers with their weights, and with the first rows of the vocabulary.

    `layers`: the tensors of the layers in every stack, by its prefix.
    """
    config, shape = model.checkpoint.config, model.shape
    if shape.own_sizes:
        config = resized_config(model.family, config, shape.of(numbers[-1]))
    stock = sample_model(config, model.family, machine.dtype, numbers)
    if hasattr(stock, "pooler") and lacks_pooler(model.checkpoint.shapes):
        stock.pooler = None
    make_buffers(stock, machine.device)
    weights = _of_tokens(model, stock, numbers)
    for name, tensor in stock.state_dict().items():
        is_outside = not model.family.is_in_layers(name) and is_text(model.family, name)
        if is_outside and name in model.checkpoint.shapes and name not in weights:
            rows = NUM_TOKENS if tensor.shape[:1] == (model.shape.vocab_size,) else max(tensor.shape, default=1)
            weights[name] = model.checkpoint.read_rows(name, slice(rows))
    for each in model.family.stacks:
        for place, (number, tensors) in enumerate(zip(numbers, layers[each.layers], strict=True)):
            stack = model.family.stack_of(max(each.first_layer, number))
            weights |= {f"{stack.layers}.{place}.{name}": tensor for name, tensor in fuse(tensors, stack).items()}
    dtypes = {name: one.dtype for name, one in stock.state_dict().items()}
    for name, tensor in weights.items():
        module, _, part = name.rpartition(".")
        placed = uploaded(tensor, machine.device).to(dtypes.get(name, machine.dtype))  # biases of zero may be new
        setattr(stock.get_submodule(module), part, nn.Parameter(placed, requires_grad=False))
    for module in stock.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it may be beyond these rows
    stock.tie_weights()
    return stock.eval()


def _of_tokens(model: Model, stock: Any, numbers: Sequence[int]) -> Tensors:
    """Return the parts of these layers of the table of tokens' inputs and of its projection; none without one.

    Layers of the stock model that were left out have zeros.
    """
    stack, inputs = model.family.stack, model.family.stack.token_inputs
    if inputs is None:
        return {}
    checkpoint, (table, projection, _) = model.checkpoint, stack.token_tensors
    ids, columns = torch.arange(min(NUM_TOKENS, model.shape.vocab_size)), [inputs.columns(one) for one in numbers]
    rows = torch.cat([checkpoint.read_some(table, ids, part) for part in columns], 1)
    projected = torch.cat(list(checkpoint.read_panels(projection, columns)))
    further = len(stock.get_parameter(projection)) - len(projected)
    return {table: functional.pad(rows, (0, further)), projection: functional.pad(projected, (0, 0, 0, further))}


class _Watch:
    """Keep the states that modules of a running model read and return, by `name` and `name.out`."""

    def __init__(self, stock: Any, names: list[str]) -> None:
        self.states: dict[str, torch.Tensor] = {}
        self._handles = []
        for name in names:
            module = stock.get_submodule(name)
            self._handles += [
                module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
                module.register_forward_hook(partial(self._after, name)),
            ]

    def _before(self, name: str, _: nn.Module, unnamed: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.states[name] = (unnamed[0] if unnamed else named["hidden_states"]).clone()

    def _after(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self.states[f"{name}.out"] = output[0] if isinstance(output, tuple) else output


def _entrances(stack: Stack, place: int = 0) -> list[str]:
    """Return the modules of a layer of the stock model that read the stream: itself, and the first of a sublayer."""
    layer = f"{stack.layers}.{place}"
    readers = (each.readers[0] if each.before is None else each.before.name for each in stack.sublayers[1:])
    return [layer, *(f"{layer}.{name}" for name in readers)]


def _steps(
    model: Model, machine: Machine, numbers: Sequence[int], stock: Any, layers: Mapping[str, Sequence[Tensors]]
) -> Iterator[_Step]:
    """Yield every part of a model with these layers."""
    family, builder = model.family, LayerBuilder(model, machine, NUM_TOKENS)
    token_ids = torch.arange(NUM_TOKENS).unsqueeze(0) % model.shape.vocab_size
    padding = model.checkpoint.config.get("pad_token_id")  # it has no position in some models
    token_ids[token_ids == padding] = 0 if padding else NUM_TOKENS // 2
    [batch] = Text(token_ids, "a check").batches(1)
    stacks = [
        [(max(stack.first_layer, one), family.stack_of(max(stack.first_layer, one))) for one in numbers]
        for stack in family.stacks
    ]
    norms = [stack.final_norm.name for stack in family.stacks if stack.final_norm is not None]
    entrances = {
        stack.layers: [_entrances(each, place) for place, (_, each) in enumerate(same)]
        for stack, same in zip(family.stacks, stacks, strict=True)
    }
    watch = _Watch(stock, [*norms, *(name for same in entrances.values() for one in same for name in one)])
    inputs: dict[str, Any] = {"input_ids": token_ids.to(machine.device)}
    if family.decoder is not None:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    if family.stack.causal:
        inputs["use_cache"] = False  # a cache of carried mixers alone does not count its tokens
    output = stock(**inputs)
    seen, memory = watch.states, memory_of(model, machine, [batch])
    for whole, same in zip(family.stacks, stacks, strict=True):
        embedding = model.checkpoint.read_rows(whole.embedding, slice(NUM_TOKENS))
        embedded = seen[entrances[whole.layers][0][0]]
        yield _Step("embedding", builder.embed(embedding, batch), embedded)
        for (number, stack), names, tensors in zip(same, entrances[whole.layers], layers[whole.layers], strict=True):
            passed = [*(seen[name] for name in names), seen[f"{names[0]}.out"]]
            yield from _sublayers(builder.layer(number, tensors, memory), stack, number, passed)
        if whole.final_norm is not None:
            normed = seen[f"{whole.final_norm.name}.out"]
            yield _Step("final norm", builder.final_norm(whole)(passed[-1]), normed)
            memory = Memory(normed)
    if family.head is not None and family.reason_against("profile") is None:  # else nothing here computes logits
        own = stock.get_output_embeddings()
        head = OutputHead(builder.before_head(), own.weight, getattr(own, "bias", None), family.head_cap)
        yield _Step("output head", head.logits(passed[-1]), output.logits)


def _sublayers(layer: Layer, stack: Stack, number: int, passed: Sequence[torch.Tensor]) -> Iterator[_Step]:
    """Yield the parts of a layer; `passed`: the stock model's states before each sublayer, and after the layer."""
    for index, sublayer in enumerate(stack.sublayers):
        if stack.waits(index):
            continue
        before, after = passed[index], passed[index + 1]
        parts = stack.sublayers if stack.parallel else (sublayer,)
        name = f"{' beside '.join(PART_NAMES[part.kind] for part in parts)} in layer {number}"
        yield _Step(name, layer.run(index, before.view_as(passed[0])), after, before)
        if stack.experts is not None and sublayer.mixer is stack.experts:
            routing = layer.route(index, before.view_as(passed[0]))
            yield _Step(f"experts' neurons in layer {number}", routing.summed(), routing.mixed)
