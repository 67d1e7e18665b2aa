"""Form `per-layer`: a checkpoint whose layers have their own sizes, with the modelling file that reads it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from oneshot.architecture import LayerShape, ModelShape, StackShape
from oneshot.architecture.stated_shapes import NOT_IN_LAYERS
from oneshot.checkpoint import Model, complete_config
from oneshot.checkpoint.own_sizes import kept_of_input
from oneshot.export.llama_layers import ADAPTERS, LlamaLayers
from oneshot.families import COMPRESSED_MODEL_TYPE
from oneshot.planning import Grid, Plan

LAYER_NORM_EPSILON = 1e-5  # PyTorch's default; configs do not state it
MODELLING_FILE = Path(__file__).parent / "modeling_oneshot.py"


class PerLayerForm(LlamaLayers):
    """A checkpoint of our own class under Llama's names: every layer has its own sizes, and LayerNorms are RMSNorms."""

    name = "per-layer"
    modelling_files = (MODELLING_FILE,)

    def loading(self, config: dict[str, Any]) -> str:
        return (
            "It loads with `AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)`, which runs the "
            "modelling file in this folder. `vllm serve FOLDER` opens it with the plugin `oneshot-vllm` of oneshot's "
            f"repository, which runs no code of this folder. {ADAPTERS}"
        )

    def grid(self, model: Model) -> Grid:
        return Grid(
            model.family,
            model.shape,
            refusal=model.family.reason_against("per-layer form"),
            layers_differ=True,
            heads_differ=True,
            sublayers_optional=True,
            inner_sizes=True,
            ranks=True,
            subspaces_differ=True,
            embedding_ranks=True,
            replaces_layer_norms=True,
            maps_tied_head=True,
        )

    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        return per_layer_config(model.checkpoint.config, model.shape, self.grid(model).stack(plan))


def per_layer_config(config: dict[str, Any], shape: ModelShape, stack: StackShape) -> dict[str, Any]:
    """Return the config.json of a per-layer checkpoint from the dense model's config and the new sizes."""
    complete, stated = complete_config(config), global_sizes(stack)
    kept = kept_of_input(config, complete)
    if shape.layer_norms:
        kept |= {"hidden_act": complete["activation_function"], "rms_norm_eps": LAYER_NORM_EPSILON}
    return (
        kept
        | {
            "model_type": COMPRESSED_MODEL_TYPE,
            "architectures": ["OneshotForCausalLM"],
            "auto_map": {
                "AutoConfig": f"{MODELLING_FILE.stem}.OneshotConfig",
                "AutoModel": f"{MODELLING_FILE.stem}.OneshotModel",
                "AutoModelForCausalLM": f"{MODELLING_FILE.stem}.OneshotForCausalLM",
            },
            "vocab_size": stack.vocab_size,
            "hidden_size": stack.embedding_size,
            "intermediate_size": stated["intermediate_size"],
            "num_hidden_layers": len(stack.layers),
            "num_attention_heads": stated["num_attention_heads"],
            "num_key_value_heads": stated["num_key_value_heads"],
            "head_dim": shape.head_dim,
            "tie_word_embeddings": stack.head != "own" and not stack.embedding,
            "embedding": [asdict(table) for table in stack.embedding] or None,
            "head_map": stack.head == "mapped",
            "head_bias": stack.head_bias,
            "num_positions": stack.num_positions,
            "norm_width": shape.hidden_size,
            "layers": [_stored(layer) for layer in stack.layers],
        }
        | ({"own_head": True} if stack.embedding and stack.head == "own" else {})
        | ({"output_head": [asdict(table) for table in stack.output_head]} if stack.output_head else {})
        | ({"centred_embedding": True} if shape.layer_norms and stack.head == "tied" else {})
        | different_sizes(stack)
    )


def _stored(layer: LayerShape) -> dict[str, Any]:
    return {name: value for name, value in asdict(layer).items() if name not in NOT_IN_LAYERS}


def global_sizes(stack: StackShape) -> dict[str, int]:
    """Return the sizes that the config states for all layers: of the first FFN, and of the first attention."""
    attending = next(layer for layer in stack.layers if layer.num_attention_heads)
    return {
        "intermediate_size": next((layer.intermediate_size for layer in stack.layers if layer.intermediate_size), 0),
        "num_attention_heads": attending.num_attention_heads,
        "num_key_value_heads": attending.num_key_value_heads,
    }


def different_sizes(stack: StackShape) -> dict[str, Any]:
    """Return `per_layer_config` as transformers reads it: sizes of layers that differ from those for all layers.

    vLLM reads the heads of every layer from it; our own class has `layers`. Empty if all layers are equal.
    """
    stated = global_sizes(stack)
    different = {
        str(number): own
        for number, layer in enumerate(stack.layers)
        if (own := {name: getattr(layer, name) for name in stated if getattr(layer, name) != stated[name]})
    }
    return {"per_layer_config": different} if different else {}
