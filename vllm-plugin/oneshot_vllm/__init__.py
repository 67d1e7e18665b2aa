"""A vLLM plugin: it serves results of oneshot's per-layer form with vLLM's own layers and paged attention."""

__all__ = ["register"]


# families whose layers are not Llama's, by transformers' class; vLLM answered as transformers for each of them
RESIZED = (
    "Cohere2ForCausalLM",
    "Exaone4ForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Glm4ForCausalLM",
    "GraniteForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "MistralForCausalLM",
    "NemotronForCausalLM",
    "Olmo2ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
)
# mixtures of experts, likewise
RESIZED_MIXTURES = (
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)


def register() -> None:
    """Tell transformers the config and vLLM the architectures of the per-layer form; vLLM calls it in every process."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.config import SpeculativeConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from oneshot_vllm.config import OneshotConfig
    from oneshot_vllm.drafts import DRAFTS, draft_config
    from oneshot_vllm.refusals import LlamaRefusals, ResizedRefusals

    AutoConfig.register(OneshotConfig.model_type, OneshotConfig, exist_ok=True)
    ModelRegistry.register_model("OneshotForCausalLM", "oneshot_vllm.model:OneshotForCausalLM")
    MODELS_CONFIG_MAP["OneshotForCausalLM"] = LlamaRefusals  # vLLM asks it when all is known but the weights
    for stock in RESIZED:
        ModelRegistry.register_model(f"Oneshot{stock}", "oneshot_vllm.resized:OneshotResizedForCausalLM")
    for stock in RESIZED_MIXTURES:
        ModelRegistry.register_model(f"Oneshot{stock}", "oneshot_vllm.resized:OneshotResizedMoEForCausalLM")
    MODELS_CONFIG_MAP.update({f"Oneshot{stock}": ResizedRefusals for stock in (*RESIZED, *RESIZED_MIXTURES)})
    for _, draft in DRAFTS.values():
        ModelRegistry.register_model(draft, f"oneshot_vllm.further:{draft}")
    SpeculativeConfig.hf_config_override = staticmethod(draft_config)  # a plugin has no other way in
