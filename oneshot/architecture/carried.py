"""Mixers that are carried: their weights stay as they are, and the stock layer computes what they add.

Short convolutions, linear attention, state-space models, and attention with a gate are such mixers. All that a layer
has before its FFN belongs to them. Their tensors are not described one by one: one layer's are read from the
checkpoint, and the stock class has the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from oneshot.architecture.axes import Axes
from oneshot.architecture.layer_shape import RankedKind
from oneshot.errors import CheckpointError


class NotAttention:
    """A mixer without heads and without another stack's memory."""

    memory_readers: ClassVar[tuple[str, ...]] = ()
    own_norms: ClassVar[tuple[str, ...]] = ()
    fixed_heads: ClassVar[bool] = False


class WithoutLinears(NotAttention):
    """A mixer whose linears are not described one by one."""

    readers: ClassVar[tuple[str, ...]] = ()  # linears that read the norm's output by themselves
    modules: ClassVar[tuple[str, ...]] = ()
    ranked: ClassVar[Mapping[RankedKind, tuple[str, ...]]] = MappingProxyType({})


@dataclass(frozen=True)
class Carried(WithoutLinears):
    """A mixer in the place of attention whose weights stay as they are, with its norm.

    Attributes:
        title: what it is, for messages.
        out: a linear that writes to the residual stream.
        attends: whether it keeps keys and values of earlier tokens, of the sizes that the config states.
        state: names of sizes in the config; their product is how many numbers of all earlier tokens together it keeps,
            in float32. Empty without such a state.
        scan: products of numbers, or of names of sizes in the config: how many numbers a token has in each kind of
            tensor that a scan by chunks has beside the outputs of linears. Empty without such a scan.
        head_norm, keys: the query norm and the key projection whose shapes give head size and KV heads; None if these
            are the model's.
        lends: whether later layers read these keys and values. borrows: whether it reads the keys and values of the
            last lender of its type, and has none of its own.
    """

    title: str
    out: str
    attends: bool = False
    state: tuple[str, ...] = ()
    scan: tuple[tuple[str | int, ...], ...] = ()
    head_norm: str | None = None
    keys: str | None = None
    lends: bool = False
    borrows: bool = False

    @property
    def kind(self) -> Literal["carried"]:
        return "carried"

    def axes(self, shape: object) -> Axes:
        """Return none: its tensors are not described one by one."""
        return {}


@dataclass(frozen=True)
class CarriedSizes:
    """State the tensors of one carried mixer, and the layers that have it.

    `layers`: their numbers, ascending. `tensors`: names without the layer's prefix, and shapes. `attends`: as in
    `Carried`. `state`: numbers in the state of one layer; 0 without one. `scan`: numbers of a token in one tensor of
    each kind of its scan. `head_dim`, `groups`: the size of its heads, and the number of its KV heads; 0 for the
    model's. `lends`, `borrows`: as in `Carried`.
    """

    layers: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    attends: bool
    state: int = 0
    scan: int = 0
    head_dim: int = 0
    groups: int = 0
    lends: bool = False
    borrows: bool = False

    @property
    def parameters(self) -> int:
        """Return the stored parameters of one layer's mixer."""
        return sum(math.prod(size) for _, size in self.tensors)

    @property
    def width(self) -> int:
        """Return the numbers that a token has in the outputs of all its linears, and in its scan."""
        return sum(size[0] for _, size in self.tensors if len(size) > 1) + self.scan


def carried_layers(config: Mapping[str, Any], mixers: Mapping[str, Carried | None]) -> dict[int, Carried]:
    """Return the carried mixers by the layers for which `layer_types` of a config names them.

    `mixers`: as in `Description`.

    Raises `CheckpointError` for a layer of another type.
    """
    stated = config.get("layer_types")
    types = stated if isinstance(stated, list) else []
    for number, one in enumerate(types):
        if one not in mixers:
            raise CheckpointError(
                f"config.json states layer_types {repr(one)[:100]} for layer {number}, which is not supported; give a "
                f"model whose layers are of the types {', '.join(mixers)}."
            )
    found = ((number, mixers[one]) for number, one in enumerate(types))
    return {number: mixer for number, mixer in found if mixer is not None}
