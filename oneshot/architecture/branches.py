"""Norms of a mixture of experts and of the one FFN beside it, where each of both has its own (Gemma 4)."""

from dataclasses import dataclass


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
