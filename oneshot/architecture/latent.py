"""Sizes of attention whose keys and values come from a latent: multi-head latent attention (2405.04434)."""

from dataclasses import dataclass


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

    def tensors(
        self, module: str, hidden_size: int, num_heads: int, value_size: int, *, biased: bool
    ) -> dict[str, tuple[int, ...]]:
        """Return the tensors of an attention module and their shapes; `biased`: what reads the hidden state."""
        queries, latent = num_heads * self.key_size, self.rank + self.rotary_size
        listed: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa.weight": (latent, hidden_size),
            "kv_a_layernorm.weight": (self.rank,),
            "kv_b_proj.weight": (num_heads * (self.plain_size + value_size), self.rank),
            "o_proj.weight": (hidden_size, num_heads * value_size),
        }
        if self.query_rank:
            listed["q_a_proj.weight"] = (self.query_rank, hidden_size)
            listed["q_a_layernorm.weight"] = (self.query_rank,)
            listed["q_b_proj.weight"] = (queries, self.query_rank)
        else:
            listed["q_proj.weight"] = (queries, hidden_size)
        for linear in ("kv_a_proj_with_mqa", "q_a_proj", "o_proj") if biased else ():
            if f"{linear}.weight" in listed:
                listed[f"{linear}.bias"] = listed[f"{linear}.weight"][:1]
        return {f"{module}.{name}": size for name, size in listed.items()}
