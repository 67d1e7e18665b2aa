"""Rotary positions between a config.json and a GGUF file, in both directions.

llama.cpp divides the frequencies of positions by a number (`linear`), by a table of factors (which Llama 3's converter
writes), or as YaRN does. What only one of both sides can state is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

FACTORS = "rope_freqs.weight"  # the table of factors
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # Phi-3's, for long texts
ROTARY_KEYS = (  # all that a file may state below `rope.`
    *("freq_base", "scale_linear"),
    *(f"scaling.{key}" for key in ("type", "factor", "original_context_length", "finetuned", "attn_factor")),
    *(f"scaling.yarn_{key}" for key in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")),
)
STATED = ("default", "linear", "llama3", "yarn")  # transformers' names of what a GGUF file can state
# What llama.cpp computes with, so a config may state these and nothing else beside a type
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "partial_rotary_factor": 1.0}
# Only the quotients of a length and two bounds decide Llama 3's factors; these are the published bounds.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0
SAME = 1e-4  # relative difference of factors: a file has float32, and its writer may have computed in it


def reason_against_rotary(rotary: Mapping[str, Any]) -> str | None:
    """Return what of `rope_parameters` a GGUF file cannot state; None if it can state all."""
    kind = rotary["rope_type"]
    if kind not in STATED:
        return f"the type {kind}"
    for name, value in YARN.items():
        if rotary.get(name) is not None and rotary[name] != value:
            return f"{name} {rotary[name]}"
    if kind == "yarn" and not math.isclose(attention_factor(rotary), yarn_factor(rotary["factor"]), rel_tol=1e-6):
        return f"attention_factor {attention_factor(rotary):.6g}"
    return None


def yarn_factor(factor: float) -> float:
    """Return YaRN's factor of queries and keys (Peng et al. 2023, equation 22)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(rotary: Mapping[str, Any]) -> float:
    """Return the factor of queries and keys that transformers takes for the type yarn."""
    if rotary.get("attention_factor") is not None:
        return float(rotary["attention_factor"])
    mscale, all_dim = rotary.get("mscale"), rotary.get("mscale_all_dim")
    if not mscale or not all_dim:
        return yarn_factor(rotary["factor"])
    log = math.log(max(1.0, rotary["factor"]))
    return (0.1 * mscale * log + 1.0) / (0.1 * all_dim * log + 1.0)


def rotary_metadata(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys below `rope.` of a GGUF file; factors of the type llama3 are a tensor, `rotary_factors`."""
    keys = {"freq_base": float(rotary["rope_theta"])}
    if rotary["rope_type"] not in ("linear", "yarn"):
        return keys
    keys |= {"scaling.type": rotary["rope_type"], "scaling.factor": float(rotary["factor"])}
    if rotary["rope_type"] == "yarn":
        keys["scaling.original_context_length"] = int(rotary["original_max_position_embeddings"])
    return keys


def rotary_factors(rotary: Mapping[str, Any], head_dim: int) -> np.ndarray | None:
    """Return what llama.cpp divides every rotary frequency by for the type llama3; None for other types.

    Frequencies of long waves are divided by `factor`, short waves keep theirs, and between them both are mixed.
    """
    if rotary["rope_type"] != "llama3":
        return None
    waves = rotary["original_max_position_embeddings"] * _waves(rotary["rope_theta"], head_dim)
    low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
    share = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1 - share) / rotary["factor"] + share)).astype(np.float32)


def rotary_parameters(
    metadata: Mapping[str, Any], factors: np.ndarray | None, *, head_dim: int, context_length: int
) -> dict[str, Any]:
    """Return the `rope_parameters` of a file with these keys below `rope.` and this table of factors.

    Raises `ValueError` with what no config can state, for a sentence.
    """
    theta = float(metadata.get("freq_base", 10000.0))
    kind = metadata.get("scaling.type", "linear")  # llama.cpp's default
    factor = float(metadata.get("scaling.factor") or metadata.get("scale_linear") or 1.0)
    # converters write the config's own factor, beside which llama.cpp takes the usual one (llama-context.cpp)
    usual = {"yarn_ext_factor": (1.0,), "yarn_attn_factor": (1.0, yarn_factor(factor)), "attn_factor": (1.0,)}
    for name, values in usual.items():
        stated = metadata.get(f"scaling.{name}", 1.0)
        if not any(math.isclose(stated, value, rel_tol=1e-6) for value in values):
            raise ValueError(f"rope.scaling.{name} {stated}")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type {kind}")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return _with_factors(theta, factors, head_dim)
    if factors is not None and not np.allclose(factors, 1.0, rtol=SAME):
        raise ValueError(f"rope.scaling.type {kind} beside {FACTORS}")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        if not math.isclose(metadata.get(f"scaling.yarn_{name}", YARN[name]), YARN[name], rel_tol=1e-6):
            raise ValueError(f"rope.scaling.yarn_{name} {metadata[f'scaling.yarn_{name}']}")
    original = int(metadata.get("scaling.original_context_length") or context_length)
    return {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}


def longrope_parameters(
    metadata: Mapping[str, Any], long: np.ndarray, short: np.ndarray, *, context_length: int
) -> dict[str, Any]:
    """Return the `rope_parameters` of the type longrope (Ding et al. 2024) of a file with two tables of factors.

    Raises `ValueError` if it does not state the length up to which the short ones count.
    """
    original = metadata.get("scaling.original_context_length")
    if not original:
        raise ValueError(f"{LONG_FACTORS} without rope.scaling.original_context_length")
    scale = context_length / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    factor = float(metadata.get("scaling.attn_factor", 1.0))
    own = {} if math.isclose(factor, usual, rel_tol=1e-5) else {"attention_factor": factor}
    return {
        "rope_type": "longrope",
        "rope_theta": float(metadata.get("freq_base", 10000.0)),
        "long_factor": [float(one) for one in long],
        "short_factor": [float(one) for one in short],
        "original_max_position_embeddings": int(original),
    } | own


def _with_factors(theta: float, factors: np.ndarray | None, head_dim: int) -> dict[str, Any]:
    """Return the parameters whose `rotary_factors` are a file's table; raises `ValueError` if there are none."""
    if factors is None or np.allclose(factors, 1.0, rtol=SAME):
        return {"rope_type": "default", "rope_theta": theta}
    if factors.shape != (head_dim // 2,):
        raise ValueError(f"{FACTORS} of the shape {factors.shape}")
    original, high = _length_and_bound(factors.astype(np.float64), _waves(theta, head_dim))
    rotary = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(np.round(factors.max(), 4)),
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    found = rotary_factors(rotary, head_dim)
    if original < 1 or found is None or not np.allclose(found, factors, rtol=SAME):
        raise ValueError(f"{FACTORS} with factors that are not Llama 3's")
    return rotary


def _length_and_bound(factors: np.ndarray, waves: np.ndarray) -> tuple[int, float]:
    """Return the context length and the upper bound that a table may have been made for, if the lower bound is 1.

    A factor between 1 and the largest states a share of the unscaled frequency, `(length · wave − low) / (high − low)`.
    Two such shares state length and bound, one the length beside the published bound. Without any, each length does
    that separates both groups.
    """
    largest = factors.max()
    between = (factors > 1 + SAME) & (factors < largest * (1 - SAME))
    share = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
    span = HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR
    if len(share) >= 2:
        slope, start = np.polyfit(waves[between], share, 1)
        span = -LOW_FREQ_FACTOR / start if start < 0 else math.inf
        length = slope * span if start < 0 else 0.0
    elif len(share) == 1:
        length = (share[0] * span + LOW_FREQ_FACTOR) / waves[between][0]
    else:
        length = math.floor(LOW_FREQ_FACTOR / waves[factors >= largest * (1 - SAME)].max())
    return round(length), round(LOW_FREQ_FACTOR + span, 4)


def _waves(theta: float, head_dim: int) -> np.ndarray:
    """Return the waves per token of every pair of values that positions turn, `(head_dim / 2,)`."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of every head in another order: the pairs that positions turn together become neighbours."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the inverse of `interleave`."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
