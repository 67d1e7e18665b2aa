"""The family that the refusal of an unknown one names: configs of transformers' families that are not supported."""

from typing import Any

import pytest
from transformers import AutoConfig

from oneshot.checkpoint.nearest import likenesses, nearest_family
from oneshot.families import FAMILIES

LLAMA_LIKE = ("llama", "olmo2", "glm", "glm4")  # configs that state hardly more than sizes
UNKNOWN: dict[str, tuple[str, ...]] = {
    "diffllama": LLAMA_LIKE,
    "bitnet": LLAMA_LIKE,
    "olmo": ("olmo2",),
    "phi4_multimodal": ("phi3",),
    "vaultgemma": ("gemma2", "gemma3_text"),
    "persimmon": ("stablelm", "phi"),
    "gptj": ("gpt2", "gpt_bigcode"),
    "openai-gpt": ("gpt2",),
    "minimax": ("mixtral",),
    "ernie": ("bert",),
    "deberta-v2": ("bert",),
    "umt5": ("t5", "mt5"),
    "longt5": ("t5", "mt5"),
    "idefics3": ("smolvlm",),
    "idefics2": ("smolvlm", "mistral3", "llava"),
}
UNLIKE = ("mpt", "wav2vec2", "clip", "bart", "resnet")


def config_of(model_type: str) -> dict[str, Any]:
    return AutoConfig.for_model(model_type).to_dict()


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_the_nearest_family_of_unknown_ones(model_type: str) -> None:
    assert model_type not in FAMILIES
    assert nearest_family(config_of(model_type)) in UNKNOWN[model_type]


@pytest.mark.parametrize("model_type", UNLIKE)
def test_a_config_that_is_like_none_names_none(model_type: str) -> None:
    assert nearest_family(config_of(model_type)) is None


def test_nothing_is_like_an_empty_config() -> None:
    assert nearest_family({}) is None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_most_like_itself(model_type: str) -> None:
    likeness = likenesses(config_of(model_type))
    assert likeness[model_type] == max(likeness.values()) > 0.8


def test_the_old_name_of_rotary_positions_counts() -> None:
    """Files of before transformers 5 state `rope_theta`."""
    config = config_of("diffllama")
    old = {"rope_theta" if field == "rope_parameters" else field: value for field, value in config.items()}
    assert likenesses(old) == likenesses(config)
