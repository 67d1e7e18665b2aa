"""Modules of the stock class without weights, and the arguments that the stock model calls its layers with.

Attention that holds whole scores `(heads, length, length)` takes one sequence at a time, whatever the batch.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from oneshot.architecture import Carried, Stack
from oneshot.checkpoint import Model, attention_of, make_buffers, sample_model, stock_classes
from oneshot.families import with_text
from oneshot.machine import Machine
from oneshot.stream.layer import SHARED

BY_SEQUENCE = "oneshot-by-sequence-{}"  # with the implementation of the stock class: `eager` or `sdpa`


class Template:
    """Modules of the stock class without weights, for one size of layers.

    Args:
        config: config of the stock class with these sizes. sequence_length: tokens of every sequence in the layers.

    Attributes:
        layers: by the prefix of a stack: one layer of each kind, by the first layer of that kind (`Model.kinds`).
        final_norms: by the prefix of their stack. embedding_norm: None without one.
        arguments: what the stock model passes to the layers of a kind; their attention gets the same.
    """

    def __init__(self, config: dict[str, Any], model: Model, machine: Machine, sequence_length: int) -> None:
        family, stack, kinds = model.family, model.family.stack, sorted(set(model.kinds))
        whole = sample_model(config, family, machine.dtype, kinds)
        self.embedding_norm: nn.Module | None = None
        if stack.embedding_norm is not None:
            self.embedding_norm = whole.get_submodule(stack.embedding_norm.name).requires_grad_(False)
        self.layers: dict[str, dict[int, nn.Module]] = {}
        self.final_norms: dict[str, nn.Module] = {}
        for each in family.stacks:
            modules = whole.get_submodule(each.layers).eval().requires_grad_(False)
            self.layers[each.layers] = dict(zip(kinds, modules, strict=True))
            if each.final_norm is not None:
                norm = whole.get_submodule(each.final_norm.name).requires_grad_(False)
                self.final_norms[each.layers] = norm
        if stack.relative_bias is not None:
            # each layer computes its positions from the table, and scores are causal where the module says so
            self.arguments: dict[int, dict[str, Any]] = {kind: {} for kind in kinds}
        elif stack.rotary:
            example = torch.zeros(1, sequence_length, model.shape.hidden_size, dtype=machine.dtype)
            mixers = [family.stack_of(kind).token_mixer for kind in kinds]
            layers = whole.get_submodule(stack.layers)
            needed = [
                {} if isinstance(mixer, Carried) else _required(layer.get_submodule(mixer.module))
                for mixer, layer in zip(mixers, layers, strict=True)
            ]
            caller = whole
            if family.alone:
                plain = with_text(family, config, dict(family.alone))
                caller = sample_model(plain, replace(family, carried_layers={}), machine.dtype, kinds)
            recorded = _stock_arguments(caller, stack, example.to(machine.device))
            self.arguments = dict(
                zip(kinds, [one | more for one, more in zip(needed, recorded, strict=True)], strict=True)
            )
        else:
            # scaled dot product attention is causal by itself where the module says so
            self.arguments = {kind: {"attention_mask": None} for kind in kinds}
        if holds_scores(model, machine.device):  # after the masks, which depend on the implementation
            attend_by_sequence(model, whole)


def _required(attention: nn.Module) -> dict[str, Any]:
    """Return None for every argument that attention needs to be given beside the states."""
    _, *further = inspect.signature(attention.forward).parameters.values()
    named = (one for one in further if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty)
    return {one.name: None for one in named}


class _Recorder(nn.Module):
    """Stand in for a layer: keep the arguments that it is called with, and change nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {}
        self._layer = [layer]  # not a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)  # such as the type of its attention

    def forward(self, hidden_states: torch.Tensor, *unnamed: Any, **arguments: Any) -> torch.Tensor:
        assert all(one is None for one in unnamed), "the stock model names the arguments of its layers"
        self.arguments = {name: value for name, value in arguments.items() if value is not None and value is not False}
        return hidden_states


def _stock_arguments(whole: Any, stack: Stack, example: torch.Tensor) -> list[dict[str, Any]]:
    """Return what the stock model calls each of its layers with, for states like the `example`.

    It makes masks (None if scaled dot product attention needs none) and rotary positions, which may depend on the
    layer. The model is spoilt: its layers and its norms are gone.
    """
    base = whole.get_submodule(stack.layers.rpartition(".")[0])
    make_buffers(whole, example.device)
    layers = whole.get_submodule(stack.layers)
    recorders = [_Recorder(layer) for layer in layers]
    for number, recorder in enumerate(recorders):
        layers[number] = recorder
    for norm in (stack.embedding_norm, stack.final_norm):
        if norm is not None:
            whole.set_submodule(norm.name, nn.Identity())
    base(inputs_embeds=example, **({"use_cache": False} if stack.causal else {}))
    recorded = [{"attention_mask": None} | recorder.arguments for recorder in recorders]
    return [{name: one for name, one in arguments.items() if name != SHARED} for arguments in recorded]


def holds_scores(model: Model, device: torch.device) -> bool:
    """Return whether attention holds a number for every head and every two tokens of a sequence.

    Eager attention does (Gemma 2, gpt-oss), and on a CPU also scaled dot product attention if values and keys have
    different sizes (torch 2.13).
    """
    widths_differ = model.shape.query_key_size != model.shape.head_dim
    return _implementation(model) == "eager" or (device.type == "cpu" and widths_differ)


def attend_by_sequence(model: Model, module: Any) -> None:
    """Let a module of transformers attend to one sequence of a batch after another, with the stock implementation."""
    from transformers import AttentionInterface

    own = _implementation(model)
    AttentionInterface.register(BY_SEQUENCE.format(own), partial(_by_sequence, own))
    module.config._attn_implementation = BY_SEQUENCE.format(own)


def _implementation(model: Model) -> str:
    config = model.checkpoint.config
    chosen = attention_of(stock_classes(config)[1], config)
    return chosen if isinstance(chosen, str) else chosen["text_config"]


def _by_sequence(
    own: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of `query`, `key` and `value`, each `(sequences, heads, length, size)`.

    The signature is the one of transformers' attention functions.
    """
    attend: Callable[..., tuple[torch.Tensor, Any]]
    if own == "eager":
        attend = sys.modules[type(module).__module__].eager_attention_forward  # each family's file has its own
    else:
        from transformers import AttentionInterface

        attend = AttentionInterface()[own]
    masks = [attention_mask] * len(query)
    if attention_mask is not None and len(attention_mask) == len(query):
        masks = list(attention_mask.split(1))
    parts = zip(query.split(1), key.split(1), value.split(1), masks, strict=True)
    return torch.cat([attend(module, *part, **options)[0] for part in parts]), None
