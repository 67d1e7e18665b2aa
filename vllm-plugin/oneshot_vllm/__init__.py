"""A vLLM plugin: it serves results of oneshot's per-layer form with vLLM's own layers and paged attention."""

__all__ = ["register"]


def register() -> None:
    """Tell transformers the config and vLLM the architecture of the per-layer form; vLLM calls it in every process."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from oneshot_vllm.config import OneshotConfig

    AutoConfig.register(OneshotConfig.model_type, OneshotConfig, exist_ok=True)
    ModelRegistry.register_model("OneshotForCausalLM", "oneshot_vllm.model:OneshotForCausalLM")
