"""From a config.json to a family."""

from typing import Any

from oneshot.architecture.description import Description, stated_class
from oneshot.errors import CheckpointError
from oneshot.families import (
    bert,
    deepseek,
    falcon,
    falcon_h1,
    gemma3,
    gemma4,
    glm4_moe,
    gpt2,
    gpt_neox,
    granite_hybrid,
    layer_norms,
    lfm2,
    llama,
    llamas,
    mixtures,
    modernbert,
    opt,
    other_mixtures,
    qwen3_next,
    t5,
)
from oneshot.families.refusals import UnknownFamilyError, refuse_recurrent
from oneshot.families.wrappers import ONLY_INSIDE, OTHER_NAMES, WRAPPERS, text_of, within_wrapper

MODULES = (
    *(llama, llamas, gemma3, gemma4, layer_norms, falcon, gpt2, gpt_neox, falcon_h1, granite_hybrid, lfm2, qwen3_next),
    *(mixtures, glm4_moe, deepseek, other_mixtures, opt, bert, modernbert, t5),
)
DESCRIPTIONS = [one for module in MODULES for one in vars(module).values() if isinstance(one, Description)]
FAMILIES = {one.model_type: one for one in (*DESCRIPTIONS, *WRAPPERS) if one.model_type not in ONLY_INSIDE}


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
    if text is None or (text is not wrapper and (text.classes or text.stack.layers != llama.STACK.layers)):
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
