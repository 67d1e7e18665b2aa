"""From a config.json to a family."""

from typing import Any

from oneshot.architecture.description import Description, stated_class
from oneshot.errors import CheckpointError
from oneshot.families import layer_norms, llamas, mixtures, other_mixtures
from oneshot.families.bert import BERT, CAMEMBERT, DISTILBERT, ELECTRA, ROBERTA, XLM_ROBERTA
from oneshot.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from oneshot.families.falcon import FALCON
from oneshot.families.falcon_h1 import FALCON_H1
from oneshot.families.gemma3 import GEMMA2, GEMMA3
from oneshot.families.gemma4 import GEMMA4
from oneshot.families.glm4_moe import GLM4_MOE
from oneshot.families.gpt2 import GPT2, GPT_BIGCODE
from oneshot.families.gpt_neox import GPT_NEOX
from oneshot.families.granite_hybrid import GRANITE_HYBRID
from oneshot.families.lfm2 import LFM2, LFM2_MOE
from oneshot.families.llama import LLAMA
from oneshot.families.modernbert import MODERNBERT
from oneshot.families.opt import OPT
from oneshot.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from oneshot.families.refusals import UnknownFamilyError, refuse_recurrent
from oneshot.families.t5 import MT5, T5
from oneshot.families.wrappers import ONLY_INSIDE, OTHER_NAMES, WRAPPERS, text_of, within_wrapper

DESCRIPTIONS = (
    LLAMA,
    llamas.MISTRAL,
    llamas.QWEN2,
    llamas.QWEN3,
    llamas.PHI3,
    llamas.GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    llamas.ARCEE,
    layer_norms.COHERE,
    layer_norms.COHERE2,
    llamas.CWM,
    llamas.ERNIE4_5,
    llamas.EXAONE4,
    FALCON,
    llamas.GLM,
    llamas.GLM4,
    GPT2,
    GPT_BIGCODE,
    GPT_NEOX,
    llamas.GRANITE,
    llamas.HELIUM,
    llamas.HUNYUAN,
    llamas.MINISTRAL,
    llamas.MINISTRAL3,
    layer_norms.NEMOTRON,
    FALCON_H1,
    GRANITE_HYBRID,
    LFM2,
    LFM2_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    llamas.OLMO2,
    llamas.OLMO3,
    llamas.SEED_OSS,
    llamas.SMOLLM3,
    layer_norms.STABLELM,
    layer_norms.STARCODER2,
    mixtures.QWEN3_MOE,
    mixtures.QWEN2_MOE,
    mixtures.MIXTRAL,
    mixtures.OLMOE,
    mixtures.GRANITE_MOE,
    GLM4_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    other_mixtures.GPT_OSS,
    other_mixtures.GLM4_MOE_LITE,
    other_mixtures.MINIMAX_M2,
    other_mixtures.DOTS1,
    other_mixtures.SOLAR_OPEN,
    layer_norms.PHI,
    OPT,
    BERT,
    DISTILBERT,
    ROBERTA,
    XLM_ROBERTA,
    CAMEMBERT,
    ELECTRA,
    MODERNBERT,
    T5,
    MT5,
)
FAMILIES = {family.model_type: family for family in (*DESCRIPTIONS, *WRAPPERS)}


def find_family(config: dict[str, Any]) -> Description:
    """Return the family that `config["model_type"]` names.

    Raises `CheckpointError`, with the reason, for recurrent states, other mixtures of experts, and unknown families.
    """
    model_type = config.get("model_type", "(none)")
    if not isinstance(model_type, str):
        raise CheckpointError(f"config.json states model_type {repr(model_type)[:100]}, which is not a name; mend it.")
    refuse_recurrent(model_type)
    if model_type not in FAMILIES:
        _refuse_unknown_mixture(config, model_type, None)
        raise UnknownFamilyError(model_type, FAMILIES)
    classes, stated = FAMILIES[model_type].classes, stated_class(config)
    if classes and stated is not None and stated not in classes:
        raise CheckpointError(
            f"config.json states the class {stated[:100]}; the supported ones of {model_type} are {', '.join(classes)}."
        )
    family = FAMILIES[model_type]
    if family.text_module is not None:
        _refuse_unknown_mixture(config, model_type, family)
        return _wrapped(family, config)
    family.check(config)
    family = family.described_by(config)
    _refuse_unknown_mixture(config, model_type, family)
    return family


def _wrapped(wrapper: Description, config: dict[str, Any]) -> Description:
    """Return the family of a model of images and text as its language model makes it."""
    config = text_of(wrapper, config)
    stated = str(config.get("model_type", wrapper.model_type))
    known = FAMILIES | ONLY_INSIDE
    text = known.get(OTHER_NAMES.get(stated, stated), wrapper if stated == wrapper.model_type else None)
    if text is None or (text is not wrapper and (text.classes or text.stack.layers != LLAMA.stack.layers)):
        raise CheckpointError(
            f"The language model of this {wrapper.model_type} is of the type {stated[:100]}, which is not supported "
            "here; give a model with another one."
        )
    if text is wrapper:  # its config states no type, or is flat
        return wrapper
    text.check(config)
    return within_wrapper(text.described_by(config), wrapper)


def _refuse_unknown_mixture(config: dict[str, Any], model_type: str, family: Description | None) -> None:
    """Raise `CheckpointError` for a mixture of experts whose family, None if it is unknown, has none."""
    if _is_mixture(config, model_type) and (family is None or family.stack.experts is None):
        raise CheckpointError(
            f"The model ({model_type[:100]}) is a mixture of experts of a family that is not supported; give a dense "
            f"model, or one of {', '.join(name for name, one in FAMILIES.items() if one.stack.experts is not None)}."
        )


def _is_mixture(config: dict[str, Any], model_type: str) -> bool:
    """Return whether a config describes a mixture of experts."""
    counts = [config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    is_named = ("mixtral" in model_type or "moe" in model_type) and 0 not in counts
    return is_named or any(counts)
