"""The experts of every layer from the most to the least needed, as JSON lines for servers that remove them at load."""

from collections.abc import Sequence

from oneshot.json_text import json_text
from oneshot.planning import Profile

SCORE = (
    "predicted KL divergence of the output in nats per token if only the experts before this one stay in this layer, "
    "without a correction: the joint effect of all that go, with the experts that step in and the new gates, times the "
    "measured sensitivity of the layer"
)


def ranking_lines(profile: Profile) -> Sequence[str]:
    """Return a JSON object for each layer with experts; nothing if the profile did not measure whole experts.

    Keys: `layer`; `experts`: numbers from the most to the least needed; `scores` of each, falling, so that a threshold
    over all layers cuts every list; `tokens` that each got; `measured`: what scores are, and on what.
    """
    if not profile.expert_order.numel() or not profile.expert_sensitivity.any():
        return []
    origin, lines = profile.origin, []
    measured = {
        "score": SCORE,
        "model_hash": origin.model_hash,
        "token_hash": origin.token_hash,
        "probe_tokens": origin.probe_tokens,
    }
    for layer, tokens in enumerate(profile.expert_tokens):
        if not tokens.any():  # a layer without experts
            continue
        order = profile.expert_order[layer].long()
        scores = profile.expert_sensitivity[layer] * profile.expert_order_errors[layer]
        line = {"layer": layer, "experts": order.tolist(), "scores": scores.tolist()}
        line |= {"tokens": tokens[order].long().tolist(), "measured": measured}
        lines.append(json_text(line, indent=None))
    return lines
