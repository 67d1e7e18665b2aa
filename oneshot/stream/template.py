"""Modules of the stock class without weights, and the arguments that the stock model calls its layers with."""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from oneshot.architecture import Carried, Stack
from oneshot.checkpoint import Model, make_buffers, sample_model
from oneshot.families import with_text
from oneshot.machine import Machine
from oneshot.stream.attention import attend_by_sequence, holds_scores
from oneshot.stream.layer import SHARED


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
