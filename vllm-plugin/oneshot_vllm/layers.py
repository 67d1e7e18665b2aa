"""A layer with sizes of its own, from vLLM's layers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from vllm.config import CacheConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.distributed.utils import divide
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.utils import set_weight_attrs

from oneshot_vllm.adapters import Adaptable
from oneshot_vllm.config import OneshotConfig
from oneshot_vllm.low_rank import coordinates_of

# of attention's backends in vLLM; smaller heads get zeros
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# whose positions vLLM turns as transformers does, whatever the length of a text
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def padded_head(size: int) -> int:
    """Return the smallest head size of vLLM's attention that holds a head. Raises `ValueError` for larger heads."""
    for known in HEAD_SIZES:
        if known >= size:
            return known
    raise ValueError(f"A head has {size} values, and vLLM's attention takes at most {HEAD_SIZES[-1]}.")


@dataclass(frozen=True)
class Made:
    """State what all layers are made with: vLLM's cache, and how linears are quantised, None for not at all."""

    cache: CacheConfig
    quant: QuantizationConfig | None

    def linear(self, name: str) -> dict[str, Any]:
        """Return the arguments of the linear of a name, by which checkpoints say what is quantised."""
        return {"quant_config": self.quant, "prefix": name, "return_bias": False}


def norm_of(config: OneshotConfig, width: int) -> RMSNorm:
    """Return an RMSNorm whose epsilon suits a mean over `width` instead of `norm_width` squares."""
    return RMSNorm(width, eps=config.rms_norm_eps * config.norm_width / width)


class OneshotAttention(Adaptable):
    """Grouped-query attention with sizes of its own, and rotary pairs chosen by each KV group where they are fewer.

    GPUs share the heads. If they are more than the KV heads, several have the same KV head, from all of which it is
    taken: so few are computed as a whole.
    """

    def __init__(self, config: OneshotConfig, sizes: dict[str, Any], made: Made, prefix: str) -> None:
        super().__init__()
        heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        self.key_size, self.value_size = sizes["query_key_size"], sizes["value_size"]
        num_gpus = get_tensor_model_parallel_world_size()
        self.heads, self.groups, self.all_groups = divide(heads, num_gpus), max(1, groups // num_gpus), groups
        self.first_group = get_tensor_model_parallel_rank() * groups // num_gpus
        width, bias = sizes["hidden_size"], sizes["attention_bias"]
        rank = sizes["query_key_rank"]
        queries, keys, values = heads * self.key_size, groups * self.key_size, groups * self.value_size
        self.qk_read = coordinates_of(width, rank)
        if groups % num_gpus:
            reads = rank or width
            self.q_proj = ColumnParallelLinear(reads, queries, bias=bias, **made.linear(f"{prefix}.q_proj"))
            self.k_proj = ReplicatedLinear(reads, keys, bias=bias, **made.linear(f"{prefix}.k_proj"))
            self.v_proj = ReplicatedLinear(width, values, bias=bias, **made.linear(f"{prefix}.v_proj"))
        elif rank:
            self.qk_proj = MergedColumnParallelLinear(
                rank, [queries, keys], bias=bias, **made.linear(f"{prefix}.qk_proj")
            )
            self.v_proj = ColumnParallelLinear(width, values, bias=bias, **made.linear(f"{prefix}.v_proj"))
        else:
            self.qkv_proj = MergedColumnParallelLinear(
                width, [queries, keys, values], bias=bias, **made.linear(f"{prefix}.qkv_proj")
            )
        self.own_sizes = [self.heads * self.key_size, self.groups * self.key_size, self.groups * self.value_size]
        rank, read = sizes["output_rank"], heads * self.value_size
        self.o_read = coordinates_of(read, rank)
        self.o_proj = RowParallelLinear(
            rank or read,
            sizes["middle_size"],
            bias=sizes["output_bias"],
            input_is_parallel=not rank,
            **made.linear(f"{prefix}.o_proj"),
        )
        norms, epsilon = sizes["query_key_norms"], config.rms_norm_eps
        self.q_norm = RMSNorm(self.key_size, eps=epsilon) if norms else nn.Identity()
        self.k_norm = RMSNorm(self.key_size, eps=epsilon) if norms else nn.Identity()
        self.rotary = None
        self.pairs_selected = sizes["rotary_selected"]
        if config.num_positions == 0:
            self._turn_by(config)
        self.padded_size = padded_head(max(self.key_size, self.value_size))
        self.attn = Attention(
            self.heads,
            self.padded_size,
            config.head_dim**-0.5,
            num_kv_heads=self.groups,
            cache_config=made.cache,
            prefix=f"{prefix}.attn",
        )

    def _turn_by(self, config: OneshotConfig) -> None:
        kind = config.rope_parameters["rope_type"]
        if kind not in ROPE_TYPES:
            raise ValueError(
                f"Rotary positions of type {kind!r} were not compared with transformers; start vLLM with "
                "--model-impl transformers --trust-remote-code."
            )
        self.rotary = get_rope(config.head_dim, config.max_position_embeddings, True, config.rope_parameters)
        if self.pairs_selected:
            self.rotary_pairs: torch.Tensor
            self.register_buffer("rotary_pairs", torch.zeros(self.groups, self.key_size // 2, dtype=torch.int64))
            set_weight_attrs(self.rotary_pairs, {"weight_loader": self._load_pairs})

    def _load_pairs(self, pairs: torch.Tensor, loaded: torch.Tensor) -> None:
        pairs.copy_(loaded[self.first_group : self.first_group + self.groups])

    def forward(self, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Positions `(tokens,)` and states `(tokens, width)` -> what attention adds to the stream."""
        queries, keys, values = self.projected(states)
        queries, keys = self.heads_of(queries, self.q_norm), self.heads_of(keys, self.k_norm)
        if self.pairs_selected:
            queries, keys = self.turned(positions, queries), self.turned(positions, keys)
        elif self.rotary is not None:
            queries, keys = self.rotary(positions, queries.flatten(1), keys.flatten(1))
        output = self.attn(
            self.padded(queries, self.key_size), self.padded(keys, self.key_size), self.padded(values, self.value_size)
        )
        if self.padded_size > self.value_size:
            output = output.view(-1, self.heads, self.padded_size)[..., : self.value_size].flatten(1)
        if not isinstance(self.o_read, nn.Identity):
            output = self.o_read(tensor_model_parallel_all_gather(output))
        return self.o_proj(output)

    def projected(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States `(tokens, width)` -> this GPU's queries, keys and values, `(tokens, heads · size)`."""
        read = self.qk_read(states)
        if hasattr(self, "qkv_proj"):
            queries, keys, values = self.qkv_proj(read).split(self.own_sizes, dim=-1)
        elif hasattr(self, "qk_proj"):
            queries, keys = self.qk_proj(read).split(self.own_sizes[:2], dim=-1)
            values = self.v_proj(states)
        else:
            queries = self.q_proj(read)
            of_all = self.k_proj(read), self.v_proj(states)
            keys, values = (one.unflatten(-1, (self.all_groups, -1))[:, self.first_group] for one in of_all)
        return queries, keys, values

    def heads_of(self, flat: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """`(tokens, heads · k)` -> normed heads `(tokens, heads, k)`."""
        return norm(flat.reshape(len(flat), -1, self.key_size))

    def padded(self, states: torch.Tensor, size: int) -> torch.Tensor:
        """Heads of a size, of any shape -> `(tokens, heads · padded size)`, with zeros at the end of every head."""
        if size == self.padded_size:
            return states.flatten(1)
        return nn.functional.pad(states.reshape(len(states), -1, size), (0, self.padded_size - size)).flatten(1)

    def turned(self, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Turn heads `(tokens, heads, k)` by the rotary pairs of their KV group."""
        assert self.rotary is not None
        table = self.rotary.cos_sin_cache.index_select(0, positions).to(states.dtype)
        cos, sin = (half[:, self.rotary_pairs].unsqueeze(2) for half in table.chunk(2, dim=-1))
        first, second = states.unflatten(1, (self.groups, -1)).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(1, 2)


class OneshotMLP(Adaptable):
    """The FFN, with or without a gate."""

    def __init__(self, config: OneshotConfig, sizes: dict[str, Any], made: Made, prefix: str) -> None:
        super().__init__()
        width, middle, bias = sizes["intermediate_size"], sizes["middle_size"], sizes["mlp_bias"]
        gate_rank, up_rank, self.gated = sizes["gate_rank"], sizes["up_rank"], sizes["gated"]
        self.merged = self.gated and not gate_rank and not up_rank
        if self.merged:
            self.gate_up_proj = MergedColumnParallelLinear(
                middle, [width, width], bias=bias, **made.linear(f"{prefix}.gate_up_proj")
            )
            self.act_and_mul = get_act_and_mul_fn(config.hidden_act)
        else:
            self.act_fn = ACT2FN[config.hidden_act]
            self.up_read = coordinates_of(middle, up_rank)
            self.up_proj = ColumnParallelLinear(up_rank or middle, width, bias=bias, **made.linear(f"{prefix}.up_proj"))
            if self.gated:
                self.gate_read = coordinates_of(middle, gate_rank)
                self.gate_proj = ColumnParallelLinear(
                    gate_rank or middle, width, bias=bias, **made.linear(f"{prefix}.gate_proj")
                )
        self.down_proj = RowParallelLinear(width, sizes["output_size"], bias=bias, **made.linear(f"{prefix}.down_proj"))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """States `(tokens, width)` -> what the FFN adds to the stream."""
        if self.merged:
            return self.down_proj(self.act_and_mul(self.gate_up_proj(states)))
        up = self.up_proj(self.up_read(states))
        inner = self.act_fn(self.gate_proj(self.gate_read(states))) * up if self.gated else self.act_fn(up)
        return self.down_proj(inner)


class OneshotDecoderLayer(Adaptable):
    """`W x + attn(norm(x))`, then `V h + ffn(norm(h))`; W and V only where the stream enters another subspace.

    Attention without heads and an FFN without neurons are absent, also their norms.
    """

    def __init__(self, config: OneshotConfig, sizes: dict[str, Any], made: Made, prefix: str) -> None:
        super().__init__()
        hidden, middle, output = sizes["hidden_size"], sizes["middle_size"], sizes["output_size"]
        self.self_attn, self.input_layernorm, self.attention_shortcut = None, None, None
        if sizes["num_attention_heads"]:
            self.self_attn = OneshotAttention(config, sizes, made, f"{prefix}.self_attn")
            self.input_layernorm = norm_of(config, hidden)
        if sizes["attention_shortcut"]:
            self.attention_shortcut = ReplicatedLinear(
                hidden, middle, bias=False, **made.linear(f"{prefix}.attention_shortcut")
            )
        self.mlp, self.post_attention_layernorm, self.ffn_shortcut = None, None, None
        if sizes["intermediate_size"]:
            self.mlp = OneshotMLP(config, sizes, made, f"{prefix}.mlp")
            self.post_attention_layernorm = norm_of(config, middle)
        if sizes["ffn_shortcut"]:
            self.ffn_shortcut = ReplicatedLinear(middle, output, bias=False, **made.linear(f"{prefix}.ffn_shortcut"))

    def forward(
        self, positions: torch.Tensor, branch: torch.Tensor | None, stream: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the branch and the stream after the layer; their sum is the residual stream, None counts as zeros."""
        if self.self_attn is not None:
            states, stream = normed(self.input_layernorm, branch, stream)
            branch = self.self_attn(positions, states)
            if self.attention_shortcut is not None:
                stream = self.attention_shortcut(stream)
        elif self.attention_shortcut is not None:
            branch, stream = None, self.attention_shortcut(total(branch, stream))
        if self.mlp is not None:
            states, stream = normed(self.post_attention_layernorm, branch, stream)
            branch = self.mlp(states)
            if self.ffn_shortcut is not None:
                stream = self.ffn_shortcut(stream)
        elif self.ffn_shortcut is not None:
            branch, stream = None, self.ffn_shortcut(total(branch, stream))
        return branch, stream


def total(branch: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """Return the residual stream."""
    return stream if branch is None else stream + branch


def normed(norm: Any, branch: torch.Tensor | None, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normed residual stream, and the residual stream; one kernel adds and norms."""
    return (norm(stream), stream) if branch is None else norm(branch, stream)
