"""What a model family must say about itself: its tensor names and what its stock config can hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from oneshot.errors import CheckpointError
from oneshot.records import ModelShape

Q_PROJ = "self_attn.q_proj"
K_PROJ = "self_attn.k_proj"
V_PROJ = "self_attn.v_proj"
O_PROJ = "self_attn.o_proj"
GATE_PROJ = "mlp.gate_proj"
UP_PROJ = "mlp.up_proj"
DOWN_PROJ = "mlp.down_proj"
ATTENTION_NORM = "input_layernorm"
FFN_NORM = "post_attention_layernorm"
ATTENTION_SHORTCUT = "attention_shortcut"  # only in the per-layer form, as the next
FFN_SHORTCUT = "ffn_shortcut"
ROTARY_PAIRS = "self_attn.rotary_pairs"
PER_LAYER_MODEL_TYPE = "oneshot"
LARGEST_SIZE = 2**31 - 1
QUERY_KEY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Architecture:
    """A family of pre-norm decoder-only models whose layer is `x + attn(norm(x))`, then `h + ffn(norm(h))`.

    Everywhere else the tensors of a layer go by Llama's names; a family with names of its own says here which.

    Attributes:
        model_type: the `model_type` of the family's config.json.
        resize_config: `(config, shape) -> config`, the stock config that describes the resized model; raises
            `PlanError` where no stock config can.
        check_config: raises `CheckpointError` for variants of the family that are not supported.
        embedding, positions, final_norm, output_head, layers: names in the checkpoint; `positions` (a learned position
            embedding whose first `position_offset` rows no token uses) may be None.
        own_names: Llama's name of a linear or norm of a layer -> the family's.
        activation: name of the activation function within a layer. width_key: the config's name of the FFN width.
        norm_bias: LayerNorm instead of RMSNorm. gated: whether the FFN has a gate.
        removable_heads: whether the family's layer class can have fewer heads of the same size.
        optional_ffn_biases: whether its config says if the FFN has biases (`mlp_bias`).
    """

    model_type: str
    resize_config: Callable[[dict[str, Any], ModelShape], dict[str, Any]]
    check_config: Callable[[dict[str, Any]], None] = lambda config: None
    embedding: str = "model.embed_tokens.weight"
    positions: str | None = None
    position_offset: int = 0
    final_norm: str = "model.norm"
    output_head: str = "lm_head.weight"
    layers: str = "model.layers"
    own_names: Mapping[str, str] = field(default_factory=dict)
    activation: str = "mlp.act_fn"
    width_key: str = "intermediate_size"
    norm_bias: bool = False
    gated: bool = True
    removable_heads: bool = True
    optional_ffn_biases: bool = False

    @property
    def ffn_linears(self) -> tuple[str, ...]:
        """The linears of the FFN, by Llama's names."""
        return (GATE_PROJ, UP_PROJ, DOWN_PROJ) if self.gated else (UP_PROJ, DOWN_PROJ)

    def layer_prefix(self, layer: int) -> str:
        """`model.layers.3.` for layer 3."""
        return f"{self.layers}.{layer}."

    def own_name(self, module: str) -> str:
        """The family's name of a layer's linear or norm."""
        return self.own_names.get(module, module)

    def to_own_names(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A layer's tensors, named by Llama's names, under the family's."""
        return {_renamed(name, self.own_names): tensor for name, tensor in tensors.items()}

    def to_llama_names(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A layer's tensors, named by the family's names, under Llama's."""
        llama_names = {own: llama for llama, own in self.own_names.items()}
        return {_renamed(name, llama_names): tensor for name, tensor in tensors.items()}

    def shape(self, config: dict[str, Any], stored: Mapping[str, tuple[int, ...]]) -> ModelShape:
        """The sizes the config states; which biases and norms a layer has is read off the stored tensors.

        Raises `CheckpointError` when a size is missing, is no size, or does not go with the others.
        """
        num_positions = 0
        if self.positions is not None:
            if self.positions not in stored:
                raise CheckpointError(f"The checkpoint lacks the tensor {self.positions}; give a complete one.")
            num_positions = max(0, stored[self.positions][0] - self.position_offset) if stored[self.positions] else 0
        hidden_size = self._size(config, "hidden_size")
        num_attention_heads = self._size(config, "num_attention_heads")
        head_dim = self._size(config, "head_dim", hidden_size // num_attention_heads)
        num_key_value_heads = self._size(config, "num_key_value_heads", num_attention_heads)
        if config.get("head_dim") is None and hidden_size % num_attention_heads:
            raise CheckpointError(
                f"config.json states {num_attention_heads} attention heads, which do not divide the hidden size "
                f"{hidden_size}; give a complete {self.model_type} checkpoint."
            )
        if num_attention_heads % num_key_value_heads:
            raise CheckpointError(
                f"config.json states {num_key_value_heads} key-value heads, which do not divide {num_attention_heads} "
                f"attention heads; give a complete {self.model_type} checkpoint."
            )
        if self.positions is None and head_dim % 2:
            raise CheckpointError(
                f"config.json states heads of size {head_dim}, which rotary positions cannot turn; "
                f"give a complete {self.model_type} checkpoint."
            )
        epsilon = config.get("rms_norm_eps")
        if not self.norm_bias and (isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or epsilon < 0):
            raise CheckpointError(
                f"config.json states rms_norm_eps {repr(epsilon)[:100]}, which is no small number; "
                f"give a complete {self.model_type} checkpoint."
            )
        if config.get("sliding_window") is not None:
            self._size(config, "sliding_window")
        prefix = self.layer_prefix(0)
        return ModelShape(
            num_hidden_layers=self._num_layers(config, stored),
            hidden_size=hidden_size,
            intermediate_size=self._size(config, self.width_key),
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            attention_bias=f"{prefix}{self.own_name(Q_PROJ)}.bias" in stored,
            output_bias=f"{prefix}{self.own_name(O_PROJ)}.bias" in stored,
            mlp_bias=f"{prefix}{self.own_name(DOWN_PROJ)}.bias" in stored,
            vocab_size=self._size(config, "vocab_size"),
            query_key_norms=f"{prefix}{QUERY_KEY_NORMS[0]}.weight" in stored,
            norm_bias=self.norm_bias,
            gated=self.gated,
            tied=self.output_head not in stored,
            num_positions=num_positions,
            unused_positions=self.position_offset,
        )

    def _size(self, config: dict[str, Any], key: str, default: int | None = None) -> int:
        """A positive whole number of the config; `default` where the config states none."""
        value = config.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json does not state {key!r}; give a complete {self.model_type} checkpoint.")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
            raise CheckpointError(
                f"config.json states {key} {repr(value)[:100]}, which is no size; "
                f"give a complete {self.model_type} checkpoint."
            )
        return value

    def _num_layers(self, config: dict[str, Any], stored: Mapping[str, tuple[int, ...]]) -> int:
        """The number of layers, which is not believed where there are fewer tensors than that."""
        num_layers = self._size(config, "num_hidden_layers")
        if num_layers > len(stored):
            raise CheckpointError(
                f"config.json states {num_layers} layers where there are {len(stored)} tensors; "
                "give a complete checkpoint."
            )
        return num_layers

    def check_layers(self, shape: ModelShape, stored: Mapping[str, tuple[int, ...]]) -> None:
        """Check the decoder layers' tensors, `name -> shape`, against the config's sizes before any work is done.

        Raises `CheckpointError` naming the first tensor that is missing, too many, or of another size.
        """
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        expected: dict[str, tuple[int, ...]] = {
            f"{Q_PROJ}.weight": (queries, shape.hidden_size),
            f"{K_PROJ}.weight": (keys, shape.hidden_size),
            f"{V_PROJ}.weight": (keys, shape.hidden_size),
            f"{O_PROJ}.weight": (shape.hidden_size, queries),
            f"{UP_PROJ}.weight": (shape.intermediate_size, shape.hidden_size),
            f"{DOWN_PROJ}.weight": (shape.hidden_size, shape.intermediate_size),
            f"{ATTENTION_NORM}.weight": (shape.hidden_size,),
            f"{FFN_NORM}.weight": (shape.hidden_size,),
        }
        if shape.gated:
            expected[f"{GATE_PROJ}.weight"] = expected[f"{UP_PROJ}.weight"]
        if shape.query_key_norms:
            expected |= {f"{norm}.weight": (shape.head_dim,) for norm in QUERY_KEY_NORMS}
        for modules, has_bias in (
            ((Q_PROJ, K_PROJ, V_PROJ), shape.attention_bias),
            ((O_PROJ,), shape.output_bias),
            (self.ffn_linears, shape.mlp_bias),
            ((ATTENTION_NORM, FFN_NORM), shape.norm_bias),
        ):
            if has_bias:
                expected |= {f"{module}.bias": expected[f"{module}.weight"][:1] for module in modules}
        expected_names = {
            self.layer_prefix(layer) + _renamed(name, self.own_names): size
            for layer in range(shape.num_hidden_layers)
            for name, size in expected.items()
        }
        in_layers = {name for name in stored if name.startswith(f"{self.layers}.") and "rotary_emb" not in name}
        for name in sorted(expected_names.keys() | in_layers):
            if stored.get(name) != expected_names.get(name):
                raise CheckpointError(
                    f"{name} has shape {stored.get(name)} where config.json of a {self.model_type} model asks for "
                    f"{expected_names.get(name)}; give a complete, unmodified checkpoint."
                )


def _renamed(name: str, names: Mapping[str, str]) -> str:
    module, _, part = name.rpartition(".")
    return f"{names.get(module, module)}.{part}"


def set_sizes(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """A copy of a Hugging Face config with the sizes of `shape`; keys of the same name in all families.

    `rms_norm_eps` grows as the hidden size shrinks: it stands beside a mean over fewer squares (see `fold_hidden`).
    """
    return config | {
        "hidden_size": shape.hidden_size,
        "rms_norm_eps": config["rms_norm_eps"] * (config["hidden_size"] / shape.hidden_size),
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
    }
