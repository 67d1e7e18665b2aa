"""Mixtures of experts by their tensor names, and how files hold what the stock class has as one parameter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from oneshot.architecture.axes import Axes
from oneshot.architecture.carried import WithoutLinears
from oneshot.architecture.layer_shape import LayerShape
from oneshot.architecture.shapes import ModelShape
from oneshot.errors import CheckpointError
from oneshot.tensors import Tensors


@dataclass(frozen=True)
class Branches:
    """Name what experts and the FFN beside them read and write through; norms are RMSNorms.

    Of the stream `x`, the sublayer adds `inside(shared_after(shared(before(x))) + after(experts(experts_before(x))))`.
    `before` and `inside` are the sublayer's norms, and `shared` is the mixture's shared expert.

    Attributes:
        router: the module that reads `x`. router_scale: what it multiplies its input with, a number a coordinate.
    """

    router: str
    router_scale: str
    experts_before: str
    after: str
    shared_after: str

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the modules that it names."""
        return self.router, self.experts_before, self.after, self.shared_after

    @property
    def vectors(self) -> tuple[str, ...]:
        """Return the tensors with a number for every coordinate of the stream."""
        norms = self.experts_before, self.after, self.shared_after
        return self.router_scale, *(f"{norm}.weight" for norm in norms)


@dataclass(frozen=True)
class Experts(WithoutLinears):
    """Feed-forward networks with gates, of which a router chooses a few for every token.

    The stock class has the gates and ups of all experts as `gate_up_proj (E, 2m, D)` and their downs as
    `down_proj (E, D, m)`. Files have each linear of each expert by itself, or the same parameters under other names.

    Attributes:
        module: what is called: router, experts and shared expert. router: the module whose weight has a row for every
            expert. experts: the module that holds the two parameters.
        shared_expert: the module of an expert that every token passes, whose linears are `gate_proj`, `up_proj` and
            `down_proj`; None without one. shared_gate: a linear to one number that gates it; None without one.
        beside: a module that reads what `module` reads, and whose output is added to its output: an FFN as wide as a
            shared expert, whose gate and up are one linear. It stays as it is. None without one.
        renormalises: whether the gates of a token's experts are divided by their sum; else they are a softmax over all
            experts as it is.
        scores: what the router makes of its logits. scale: what all gates are multiplied with. chosen_by: a number for
            each expert that is added to its score, by which a token's experts are chosen; None without it.
        router_bias: a number for each expert that is added to its logit; None without it.
        expert_scale: a number for each expert that its gate is multiplied with; None without it.
        branches: norms of the experts and of the shared expert, each its own; then `module` has the experts alone. None
            if all read what `module` reads.
        alternating: whether the stock class has the gates and ups of an expert in turns, and its matrices as `(E, D,
            2m)` and `(E, m, D)`; then its linears have biases.
        stored_linears: of one expert in files, as in `mlp.experts.3.gate_proj`: gate, up and down; None if the files
            have the stock class's parameters.
        stored_names: what names in files begin with, by what they begin with in the stock class.
    """

    module: str = "mlp"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared_expert: str | None = None
    shared_gate: str | None = None
    beside: str | None = None
    renormalises: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    chosen_by: str | None = None
    router_bias: str | None = None
    expert_scale: str | None = None
    branches: Branches | None = None
    alternating: bool = False
    stored_linears: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    stored_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> Literal["ffn"]:
        return "ffn"

    @property
    def gate_up(self) -> str:
        """Return the tensor of the gates and ups of all experts."""
        return f"{self.experts}.gate_up_proj"

    @property
    def down(self) -> str:
        """Return the tensor of the downs of all experts."""
        return f"{self.experts}.down_proj"

    @property
    def gate_up_bias(self) -> str:
        """Return the tensor of the biases of the gates and ups of all experts, if they have any."""
        return f"{self.gate_up}_bias"

    @property
    def down_bias(self) -> str:
        """Return the tensor of the biases of the downs of all experts, if they have any."""
        return f"{self.down}_bias"

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the modules that hold all its tensors."""
        own = () if self.branches is None else (*self.branches.parts, self.shared_expert)
        return tuple(name for name in (self.module, self.beside, *own) if name is not None)

    @property
    def made(self) -> tuple[str, ...]:
        """Return the modules that the stock class makes from sizes of the experts in the config."""
        return (self.module,) if self.branches is None else (self.module, self.branches.router)

    @property
    def of_router(self) -> tuple[str, ...]:
        """Return the tensors of the router that have a number for every expert."""
        return tuple(name for name in (self.router_bias, self.chosen_by, self.expert_scale) if name is not None)

    @property
    def out(self) -> str:
        """Return what writes to the residual stream."""
        return self.module

    @property
    def is_gated(self) -> bool:
        """Return whether an expert has a gate beside its up projection."""
        return True

    def axes(self, shape: ModelShape | LayerShape) -> Axes:
        """Return the axes of its tensors as the stock class has them."""
        axes: Axes = {
            f"{self.router}.weight": ("experts", "stream"),
            self.gate_up: ("experts", "2 neurons", "stream"),
            self.down: ("experts", "stream", "neurons"),
        }
        axes |= dict.fromkeys(self.of_router, ("experts",))
        if self.branches is not None:
            axes |= dict.fromkeys(self.branches.vectors, ("stream",))
        if self.alternating:
            axes |= {self.gate_up_bias: ("experts", "2 neurons"), self.down_bias: ("experts", "stream")}
        if self.shared_expert is not None:
            axes |= {f"{self.shared_expert}.{one}_proj.weight": ("shared", "stream") for one in ("gate", "up")}
            axes[f"{self.shared_expert}.down_proj.weight"] = ("stream", "shared")
        if self.beside is not None:
            axes[f"{self.beside}.input_linear.weight"] = ("2 shared", "stream")
            axes[f"{self.beside}.output_linear.weight"] = ("stream", "shared")
        if self.shared_gate is not None:
            axes[f"{self.shared_gate}.weight"] = ("1", "stream")
        return axes

    def held(self, tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> ModelShape:
        """Return the shape with the sizes that these tensors have."""
        assert shape.experts is not None
        count, _, width = tensors[self.down].shape
        return replace(shape, intermediate_size=width, experts=replace(shape.experts, count=count))

    def from_class(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return a layer's tensors whose gates are before their ups, and whose matrices are `(outputs, inputs)`."""
        named = dict(tensors)
        if self.alternating and self.down in named:
            gate_up, bias = named[self.gate_up].mT, named[self.gate_up_bias]
            named[self.gate_up] = gate_up.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            named[self.gate_up_bias] = bias.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            named[self.down] = named[self.down].mT.contiguous()
        return named

    def to_class(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the inverse of `from_class`."""
        named = dict(tensors)
        if self.alternating and self.down in named:
            gate_up, bias = named[self.gate_up], named[self.gate_up_bias]
            named[self.gate_up] = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).mT.contiguous()
            named[self.gate_up_bias] = bias.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            named[self.down] = named[self.down].mT.contiguous()
        return named

    def from_files(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return a layer's tensors as the stock class has them; experts are copied into one tensor, one by one.

        Raises `CheckpointError` if experts of a layer have different dtypes.
        """
        whole, places = self.stacked(tensors)
        for name, place in places.items():
            place.copy_(tensors[name])
        return self._in_class({name: one for name, one in tensors.items() if name not in places}) | whole

    def stacked(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device | None = None
    ) -> tuple[Tensors, Tensors]:
        """Return parameters for the experts that files have one by one, without values yet, and where each goes.

        Args:
            tensors: a layer's tensors, as files have them; only shapes and dtypes count.
            device: the parameters' device; None for the tensors' device.

        Returns the parameters by the names of the stock class, and parts of them by the names in files; nothing for a
        layer without such experts. Raises as `from_files`.
        """
        if self.stored_linears is None:
            return {}, {}
        gate, up, down = self.stored_linears
        stored = dict(zip(self._in_class(tensors), tensors, strict=True))  # by the name after it is read
        count = sum(name.startswith(f"{self.experts}.") and name.endswith(f".{down}.weight") for name in stored)
        whole, places = Tensors(), Tensors()
        for parameter, linears in ((self.gate_up, (gate, up)), (self.down, (down,))) if count else ():
            names = [[stored[self._stored(number, linear)] for linear in linears] for number in range(count)]
            first = [tensors[name] for name in names[0]]
            rows = [len(one) for one in first]
            whole[parameter] = first[0].new_empty(count, sum(rows), first[0].shape[1], device=device)
            for parts, own in zip(names, whole[parameter], strict=True):
                if any(tensors[name].dtype != own.dtype for name in parts):
                    raise CheckpointError(
                        f"The experts of a layer are stored in different dtypes ({parts[0]}); save the checkpoint in "
                        "one dtype first."
                    )
                places |= zip(parts, own.split(rows), strict=True)
        return whole, places

    def to_files(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the inverse of `from_files`; what is stored by itself is a view."""
        named = dict(tensors)
        if self.stored_linears is not None and self.down in named:
            gate, up, down = self.stored_linears
            for number, both in enumerate(named.pop(self.gate_up)):
                named[self._stored(number, gate)], named[self._stored(number, up)] = both.chunk(2)
            named |= {self._stored(number, down): one for number, one in enumerate(named.pop(self.down))}
        return self._renamed(named, self.stored_names)

    def as_in(self, names: Iterable[str]) -> "Experts":
        """Return the experts as files with these tensors store them: one by one, or as the stock class has them.

        A file has names of the stock class if a model was saved that was not loaded from files.
        """
        listed = list(names)
        is_one = self.stored_linears is not None and any(name.endswith(f".{self.down}") for name in listed)
        own = replace(self, stored_linears=None) if is_one else self
        is_renamed = any(f".{old}" in name for name in listed for old in self.stored_names.values())
        return own if is_renamed else replace(own, stored_names={})

    @property
    def in_class(self) -> "Experts":
        """Return the experts as files store them that have the names and the parameters of the stock class."""
        return replace(self, stored_linears=None, stored_names={})

    def _stored(self, number: int, linear: str) -> str:
        return f"{self.experts}.{number}.{linear}.weight"

    def _in_class(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        return self._renamed(tensors, {stored: name for name, stored in self.stored_names.items()})

    @staticmethod
    def _renamed(tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> Tensors:
        """Return tensors with other beginnings of their names."""

        def renamed(name: str) -> str:
            old = next((old for old in names if name.startswith(old)), "")
            return names.get(old, "") + name.removeprefix(old)

        return {renamed(name): tensor for name, tensor in tensors.items()}
