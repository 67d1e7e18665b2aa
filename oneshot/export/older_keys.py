"""Rotary positions under the keys of config.json that transformers 4 and other engines read (mlx-lm, for one).

transformers 5 states them as `rope_parameters`: one record, or one for each kind of layer. Older classes have keys of
their own; what they cannot state is left out. The config classes of transformers 4.57 have these keys.
"""

from collections.abc import Mapping
from typing import Any

# the base of layers that see all tokens, and of those with windows; None: they have the same one
BASES_BY_KIND: dict[str, tuple[str, str | None]] = {
    "gemma3_text": ("rope_theta", "rope_local_base_freq"),
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "olmo3": ("rope_theta", None),
}
FULL, WINDOWS = "full_attention", "sliding_attention"
# model types with other names of the base and of the share of a head that is turned
OTHER_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
# model types whose older class takes these fields of a scaling and no others; and one that takes no scaling
FIELDS: dict[str, tuple[str, ...]] = {
    "olmo2": ("type", "factor"),
    "phi3": ("type", "short_factor", "long_factor"),
    "modernbert": (),
}
BESIDE = {"phi3": "original_max_position_embeddings"}  # which such a config states beside the scaling


def with_older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that also has the older keys; what it states itself stays."""
    model_type, rotary = str(config.get("model_type")), config.get("rope_parameters")
    older: dict[str, Any] = {}
    if isinstance(rotary, dict):
        full = rotary.get(FULL, rotary)
        older = _by_kind(model_type, rotary) if full is not rotary else _flat(model_type, full)
        if older:
            older |= _scaling(model_type, full)
    text = config.get("text_config")
    inner = {"text_config": with_older_keys(text)} if isinstance(text, dict) else {}
    return older | config | inner


def _flat(model_type: str, rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base, and the share of a head that is turned, of all layers."""
    base, share = OTHER_NAMES.get(model_type, ("rope_theta", "partial_rotary_factor"))
    stated = {base: rotary.get("rope_theta"), share: rotary.get("partial_rotary_factor")}
    return {name: value for name, value in stated.items() if value is not None}


def _by_kind(model_type: str, rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bases of both kinds of layers; nothing if the class of transformers 4 cannot have them."""
    full, local = rotary[FULL], rotary.get(WINDOWS) or {}
    if model_type not in BASES_BY_KIND or local.get("rope_type", "default") != "default":
        return {}
    base, of_windows = BASES_BY_KIND[model_type]
    theta = full.get("rope_theta")
    if of_windows is None:
        return {base: theta} if local.get("rope_theta", theta) == theta else {}
    return {base: theta, of_windows: local.get("rope_theta", theta)}


def _scaling(model_type: str, rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Return how long texts are scaled, and the sections of positions of images; nothing for plain positions."""
    kind = rotary.get("rope_type", "default")
    scaling = {name: one for name, one in rotary.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if kind == "default" and scaling.keys() <= {"rope_type"}:
        return {}
    if model_type not in FIELDS:
        return {"rope_scaling": scaling}
    elsewhere = ("rope_type", BESIDE.get(model_type))
    fields = {"type": kind} | {name: one for name, one in scaling.items() if name not in elsewhere}
    # transformers 5 reads a scaling in the place of `rope_parameters`, so none is better than a part
    return {"rope_scaling": fields} if fields.keys() == set(FIELDS[model_type]) else {}
