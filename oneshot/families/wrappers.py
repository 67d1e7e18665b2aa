"""Models of images and text: a language model of a known family inside a larger class.

The language model is compressed as its family is. Everything else, such as the vision tower, keeps its names and bits.
With text alone, the wrapper computes what the language model computes (`stream/check`).
"""

import re
from dataclasses import replace
from typing import Any

from oneshot.architecture import FIXED_HEADS_ALONE, Description, Feature
from oneshot.architecture.classes import UNSUPPORTED
from oneshot.families.gemma3 import GEMMA3
from oneshot.families.gemma4 import GEMMA4
from oneshot.families.lfm2 import LFM2
from oneshot.families.llama import LLAMA
from oneshot.families.llamas import GLM4, MISTRAL, QWEN2, QWEN3
from oneshot.families.other_mixtures import MISTRAL4
from oneshot.families.qwen3_next import QWEN3_5, QWEN3_5_MOE

# what the text models of wrappers are called if that is not the name of their family
OTHER_NAMES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "glm4v_text": "glm4"}
# language models that transformers does not read by themselves
ONLY_INSIDE = {MISTRAL4.model_type: MISTRAL4}
# text models whose heads are as wide as the hidden size, whatever their config states of them
WITH_FIXED_HEADS = ("glm4v", "qwen2_vl", "qwen2_5_vl")
CAPPED = ("gemma4",)  # wrappers whose class bounds its logits as the language model's own class does
NO_DEPTH = "--set depth= is not supported for {}, whose layers may also take features of images; leave it out."


def _wrapper(model_type: str, model_class: str, text: Description, module: str = "language_model") -> Description:
    return within_wrapper(
        text, Description(model_type, text.stack, text.resize, classes=(model_class,), text_module=f"model.{module}.")
    )


def within_wrapper(text: Description, wrapper: Description) -> Description:
    """Return a wrapper's description whose language model is of this family."""
    assert wrapper.text_module is not None
    name = wrapper.model_type
    heads: dict[Feature, str] = {"heads": FIXED_HEADS_ALONE.format(name)} if name in WITH_FIXED_HEADS else {}
    return replace(
        text,
        model_type=name,
        stack=text.stack.moved("model.", wrapper.text_module),
        classes=wrapper.classes,
        text_module=wrapper.text_module,
        unused_prefixes=tuple(re.sub("^model[.]", wrapper.text_module, name) for name in text.unused_prefixes),
        unsupported={**text.unsupported, **UNSUPPORTED, **heads, "depth": NO_DEPTH.format(name)},
        like_llama=True,
        head_scale=1.0,  # no wrapper has a factor
        head_cap=text.head_cap if name in CAPPED else None,
    )


WRAPPERS = (
    _wrapper("gemma3", "Gemma3ForConditionalGeneration", GEMMA3),
    _wrapper("gemma4", "Gemma4ForConditionalGeneration", GEMMA4),
    _wrapper("glm4v", "Glm4vForConditionalGeneration", GLM4),
    _wrapper("internvl", "InternVLForConditionalGeneration", QWEN2),
    _wrapper("lfm2_vl", "Lfm2VlForConditionalGeneration", LFM2),
    _wrapper("llava", "LlavaForConditionalGeneration", LLAMA),
    _wrapper("llava_next", "LlavaNextForConditionalGeneration", LLAMA),
    _wrapper("llava_onevision", "LlavaOnevisionForConditionalGeneration", QWEN2),
    _wrapper("mistral3", "Mistral3ForConditionalGeneration", MISTRAL),
    _wrapper("qwen2_vl", "Qwen2VLForConditionalGeneration", QWEN2),
    _wrapper("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", QWEN2),
    _wrapper("qwen3_vl", "Qwen3VLForConditionalGeneration", QWEN3),
    _wrapper("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5),
    _wrapper("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE),
    _wrapper("smolvlm", "SmolVLMForConditionalGeneration", LLAMA, "text_model"),
)


def text_of(family: Description, config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the language model: all of it, or a wrapper's `text_config`."""
    inner = None if family.text_module is None else config.get("text_config")
    return inner if isinstance(inner, dict) else config


def with_text(family: Description, config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json whose language model states other values."""
    text = text_of(family, config)
    return config | changes if text is config else config | {"text_config": text | changes}


def is_text(family: Description, name: str) -> bool:
    """Return whether a tensor belongs to the language model, or to the head that reads its output."""
    return family.text_module is None or name == family.head or name.startswith(family.text_module)
