"""Sizes of a mixture of experts, beside the width that its experts have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertSizes:
    """State how many experts a layer has, and what stands beside them.

    Attributes:
        count: routed experts, `E`. per_token: how many of them a token passes, `k`.
        shared_width: FFN width of the expert that every token passes; 0 without one. shared_gate: whether a linear to
            one number gates that expert.
    """

    count: int
    per_token: int
    shared_width: int = 0
    shared_gate: bool = False

    def parameters(self, one: int, hidden_size: int) -> int:
        """Return the stored parameters of the layer's FFN; `one`: of a routed expert."""
        return self.count * one + self._beside(hidden_size)

    def active_parameters(self, one: int, hidden_size: int) -> int:
        """Return the parameters that a token passes."""
        return self.per_token * one + self._beside(hidden_size)

    def _beside(self, hidden_size: int) -> int:
        return hidden_size * (self.count + 3 * self.shared_width + self.shared_gate)
