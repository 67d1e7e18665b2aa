"""Sizes of attention whose keys and values come from a latent: multi-head latent attention (2405.04434)."""

from dataclasses import dataclass

from oneshot.architecture.axes import Axes, linear


@dataclass(frozen=True)
class LatentSizes:
    """State what a token's queries, keys and values are made of; the size of a value is the model's `head_dim`.

    Attributes:
        query_rank: numbers in the latent that queries come from; 0 if they come from the hidden state.
        rank: numbers in the latent that keys and values come from. It is cached, with one rotary part for all heads.
        plain_size, rotary_size: sizes of a head's queries and keys without and with positions.
    """

    query_rank: int
    rank: int
    plain_size: int
    rotary_size: int

    @property
    def key_size(self) -> int:
        """Return the size of a head's queries and keys."""
        return self.plain_size + self.rotary_size

    @property
    def cached(self) -> int:
        """Return the numbers that one token has in the KV cache."""
        return self.rank + self.rotary_size

    def axes(self, module: str, *, biased: bool) -> Axes:
        """Return the axes of an attention module's tensors; `biased`: what reads the hidden state."""
        axes = linear(f"{module}.kv_a_proj_with_mqa", "cached", "stream", biased=biased)
        axes |= {f"{module}.kv_a_layernorm.weight": ("latent",)}
        axes |= linear(f"{module}.kv_b_proj", "heads plain-value", "latent", biased=False)
        axes |= linear(f"{module}.o_proj", "stream", "heads value", biased=biased)
        if not self.query_rank:
            return axes | linear(f"{module}.q_proj", "heads key", "stream", biased=False)
        axes |= linear(f"{module}.q_a_proj", "query-latent", "stream", biased=biased)
        axes |= {f"{module}.q_a_layernorm.weight": ("query-latent",)}
        return axes | linear(f"{module}.q_b_proj", "heads key", "query-latent", biased=False)

    def sizes(self, value_size: int) -> dict[str, int]:
        """Return the sizes of axes that only such attention has."""
        plain_value = self.plain_size + value_size
        return {"cached": self.cached, "latent": self.rank, "query-latent": self.query_rank, "plain-value": plain_value}
