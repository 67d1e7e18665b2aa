"""Which per-layer results draft with their layers for further tokens, and the config that vLLM takes for these."""

from typing import Any

from vllm.config import SpeculativeConfig

DRAFTS = {"OneshotGlm4MoeForCausalLM": ("glm4_moe_mtp", "OneshotGlm4MoeMTP")}
"""By the architecture of a result: the model type that vLLM calls such layers by, and the class in `further`."""
of_stock = SpeculativeConfig.hf_config_override


def draft_config(config: Any) -> Any:
    """Return the config of a result's drafts, and of others what vLLM makes of them.

    vLLM asks it in the place of its own function, which knows such layers by names of architectures alone.
    """
    architecture, count = (config.architectures or [""])[0], getattr(config, "num_nextn_predict_layers", None)
    if architecture not in DRAFTS or not count:
        return of_stock(config)
    model_type, draft = DRAFTS[architecture]
    config.update({"model_type": model_type, "n_predict": count, "architectures": [draft]})
    return config
