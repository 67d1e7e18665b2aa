"""The base of forms whose layers have Llama's tensors: their names, their config, and their refusals."""

from oneshot.architecture import Description, StackShape
from oneshot.checkpoint import Model, complete_config
from oneshot.errors import PlanError
from oneshot.export.outside import OutsideNames
from oneshot.export.renamed_layers import RenamedLayers
from oneshot.families import LLAMA

ADAPTERS = 'Adapters of peft need names: `LoraConfig(target_modules="all-linear")`.'
NAMES = OutsideNames(LLAMA.stack.embedding, "model.norm.weight", "lm_head.weight")


class LlamaLayers(RenamedLayers):
    """Name the tensors of every layer as Llama does."""

    def names_of(self, model: Model) -> Description:
        """Return Llama."""
        return LLAMA


def reason_against_llama(model: Model, form: str) -> str | None:
    """Return a sentence why no Llama holds the model's layers; None if one does. Norms of queries count as held."""
    shape, config = model.shape, complete_config(model.checkpoint.config)
    if shape.num_decoder_layers:
        return f"--form {form} has no decoder beside an encoder, unlike {model.family.model_type}; use --form stock."
    reason = model.family.reason_against("per-layer form")
    if shape.layer_norms or not shape.gated:
        return (
            f"--form {form} needs RMSNorms and FFNs with a gate, which {model.family.model_type} does not have; use "
            f"--form {'per-layer' if reason is None else 'stock'}."
        )
    if reason is not None:
        return reason
    if not model.family.like_llama:
        return (
            f"--form {form} holds Llama's layers, which {model.family.model_type} does not have; use --form per-layer."
        )
    if model.family.windowed:
        return (
            f"--form {form} has no sliding attention window, but the model has one of {config['sliding_window']} "
            "tokens; use --form per-layer."
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        return (
            f"--form {form} has FFNs with the activation silu, but the model's is {activation}; use --form per-layer."
        )
    return None


def refuse_different_heads(stack: StackShape, form: str) -> None:
    """Raise `PlanError` if layers with attention have different numbers of query heads."""
    heads = {layer.num_attention_heads for layer in stack.layers} - {0}
    if len(heads) > 1:
        raise PlanError(
            f"--form {form} has the same query heads in every layer, but the plan has from {min(heads)} to "
            f"{max(heads)}; add --form per-layer."
        )
