"""Predicted seconds of the stages of a run: their operations over the measured rates of this machine.

They are right to a factor of two. Downloads, disks, and other work on the machine are not included.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from oneshot_kernels import cholesky_pivots_

from oneshot.compression.up_proj import UP_BATCHES
from oneshot.footprint.work import Work
from oneshot.profiling.embedding import EMBEDDING_PROBES
from oneshot.profiling.profiler import PROBE_SEQUENCES, STATISTICS_SEQUENCES
from oneshot.recipes import WEIGHT_SELECTORS
from oneshot.text import SELF

MATRIX = 1024  # columns of the matrices that are timed on a CPU; a device gets four times as many
PIVOTED = 768
START_SECONDS = 3.0  # tokenizer, headers, report


@dataclass(frozen=True)
class Rates:
    """Operations per second: products in the compute dtype, in float32 and in float64, and pivoted Cholesky."""

    stream: float
    single: float
    double: float
    pivoted: float


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the rates of this machine now; it takes some tenths of a second."""
    size = MATRIX if device.type == "cpu" else 4 * MATRIX

    def product(of: torch.dtype) -> float:
        matrix = torch.ones(size, size, dtype=of, device=device)
        return 2 * size**3 / _seconds(lambda: matrix @ matrix, device)

    gram = torch.eye(PIVOTED, dtype=torch.float64, device=device) + 0.1
    single = product(torch.float32)
    return Rates(
        stream=single if dtype == torch.float32 else product(dtype),
        single=single,
        double=product(torch.float64),
        pivoted=PIVOTED**3 / 3 / _seconds(lambda: cholesky_pivots_(gram.clone(), rank=PIVOTED), device),
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the second of two runs."""
    for _ in range(2):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - started


def predicted_seconds(work: Work, rates: Rates) -> dict[str, float]:
    """Return the seconds by stage, and their `total`."""
    shape = work.shape
    seconds = {"prepare": START_SECONDS}
    forward = 2 * shape.layer_parameters() + 2 * work.text.sequence_length * _heads(work)  # for a token and a layer
    layers, size = shape.num_hidden_layers, shape.intermediate_size
    if SELF in work.texts:
        written = work.num_tokens / len(work.texts)
        seconds["prepare"] += 4 * written * layers * forward / rates.stream  # token by token: slower
    if work.schedule.makes_profile:
        length = work.text.sequence_length
        read = min(STATISTICS_SEQUENCES, work.text.num_sequences) * length
        probes = PROBE_SEQUENCES * length * len(work.schedule.profiled_kinds) * layers / 2
        each = (read + probes) * forward / rates.stream + _gram(size, read) / rates.single
        each += size**3 / 3 / rates.pivoted
        if "heads" in work.schedule.profiled_kinds:
            each += _gram(_heads(work), read) / rates.single
        each += (size**3 / 3 + 8 * size**2 * shape.hidden_size) / rates.double
        logits = 2 * length * shape.vocab_size * shape.hidden_size / rates.single
        seconds["profile"] = layers * each + PROBE_SEQUENCES * (len(work.schedule.profiled_kinds) * layers + 3) * logits
        if work.schedule.makes_profile and work.schedule.profiles_embedding:
            seconds["profile"] += EMBEDDING_PROBES * (layers * length * forward / rates.stream + 6 * logits)
    if work.plan is None:
        return seconds | {"total": sum(seconds.values())}
    if work.schedule.finds_subspaces:
        each = work.num_tokens * (forward / rates.stream + 2 * 2 * shape.hidden_size**2 / rates.single)
        seconds["hidden size"] = layers * (each + 12 * shape.hidden_size**3 / rates.double)
    kept = sum(layer.intermediate_size for layer in work.plan.layers) / layers
    seconds["layers"] = layers * _layer_seconds(work, kept, forward, rates)
    return seconds | {"total": sum(seconds.values())}


def _layer_seconds(work: Work, kept: float, forward: float, rates: Rates) -> float:
    shape, size, tokens = work.shape, work.shape.intermediate_size, work.num_tokens
    by_weights = work.method.ffn in WEIGHT_SELECTORS
    seconds = 0.0
    if work.schedule.streams:
        moves = 1 + (kept / size) + work.schedule.two_streams + work.method.reduces_heads / 2
        residual = 2 * size * shape.hidden_size * work.schedule.two_streams
        seconds += moves * tokens * forward / rates.stream
        seconds += (_gram(size, tokens) + tokens * residual) / rates.single
    if work.method.reduces_ffn and not by_weights:
        pivots = size**3 / 3 if work.method.sketch == "none" else 0.0
        seconds += pivots / rates.pivoted
        if work.method.sketch != "none":
            seconds += 2 * work.method.rows_of_sketch(size) * size * kept / rates.double
        if work.method.ffn == "obs":
            seconds += 4 * size**3 / rates.double
    if work.method.solves:
        right = size - kept + shape.hidden_size * work.schedule.two_streams
        solve = kept**3 / 3 + 2 * kept**2 * right + 2 * shape.hidden_size * kept * (size - kept)
        seconds += (solve + 4 * size**2 * shape.hidden_size) / rates.double
    if work.schedule.corrects_up:
        hidden, steps = shape.hidden_size, work.method.up_steps
        there_and_back = 2 * hidden * (3 * size + (6 + 5 * steps) * kept)
        seconds += tokens / UP_BATCHES * (there_and_back / rates.stream + kept**2 / rates.single)
        seconds += tokens * (
            2 * hidden * (3 * size + 2 * kept) / rates.stream + kept * (kept + 2 * hidden) / rates.single
        )
        seconds += (2 * kept**3 / 3 + 2 * (2 + steps) * kept**2 * hidden) / rates.double
    if work.schedule.finds_subspaces:
        seconds += 6 * shape.hidden_size * shape.layer_parameters() / rates.double
    return seconds


def _heads(work: Work) -> int:
    return work.shape.num_attention_heads * work.shape.head_dim


def _gram(size: int, tokens: int) -> float:
    return float(tokens) * size * size
