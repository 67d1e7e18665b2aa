"""Sizes of a mixture of experts, beside the width that its experts have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertSizes:
    """State how many experts a layer has, what stands beside them, and which layers have none.

    Attributes:
        count: routed experts, `E`. per_token: how many of them a token passes, `k`.
        shared_width: FFN width of the expert that every token passes; 0 without one, or if it is `shared_count` times
            the width of a routed expert. shared_gate: whether a linear to one number gates it.
        router_bias: whether the router has a number for each expert beside its row. biases: whether the linears of
            routed experts have biases. vectors: norms of its own, and others with a number for every coordinate.
        dense_layers: numbers of the layers that have one FFN of `dense_width` instead of experts, ascending.
    """

    count: int
    per_token: int
    shared_width: int = 0
    shared_count: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    biases: bool = False
    vectors: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_width: int = 0

    @property
    def all_active(self) -> bool:
        """Return whether every token passes all experts, so that none can be removed."""
        return self.per_token >= self.count

    def shared(self, width: int) -> int:
        """Return the width of the shared expert beside routed ones of this width; 0 without one."""
        return self.shared_width or self.shared_count * width

    def parameters(self, one: int, hidden_size: int, width: int) -> int:
        """Return the stored parameters of the layer's FFN; `one`: of a routed expert of this width."""
        return self.count * (one + self._biases(hidden_size, width)) + self._beside(hidden_size, width)

    def active_parameters(self, one: int, hidden_size: int, width: int) -> int:
        """Return the parameters that a token passes."""
        return self.per_token * (one + self._biases(hidden_size, width)) + self._beside(hidden_size, width)

    def _biases(self, hidden_size: int, width: int) -> int:
        return self.biases * (2 * width + hidden_size)

    def _beside(self, hidden_size: int, width: int) -> int:
        router = self.count * (hidden_size + self.router_bias)
        return router + hidden_size * (3 * self.shared(width) + self.shared_gate + self.vectors)
