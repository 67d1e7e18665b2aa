"""Mistral 4: DeepSeek's attention, and experts whose gates are a softmax; it is inside models of images and text."""

from dataclasses import replace

from oneshot.families.deepseek import DEEPSEEK_V3
from oneshot.families.glm4_moe import EXPERTS

MISTRAL4 = replace(
    DEEPSEEK_V3,
    model_type="mistral4",
    stack=DEEPSEEK_V3.stack.with_experts(replace(EXPERTS, scores="softmax", chosen_by=None)),
    further_layers=None,
)
