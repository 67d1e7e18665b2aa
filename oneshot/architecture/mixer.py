"""What mixers lack that only attention has, or only linears that are described one by one."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from oneshot.architecture.layer_shape import RankedKind


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
