"""The work of a run in numbers, from which memory and time are predicted."""

import math
from dataclasses import dataclass

import torch

from oneshot.architecture import ModelShape
from oneshot.checkpoint import Checkpoint, Model, complete_text_config
from oneshot.checkpoint.dtypes import DTYPE_NAMES, ITEM_BYTES
from oneshot.config import Config, SaveDtype, TextOptions
from oneshot.export.outside import token_table, unchanged_parts
from oneshot.machine import Machine
from oneshot.machine.memory import device_capacity, pinned_bytes
from oneshot.method import Method
from oneshot.planning import Grid, HiddenPlan, Plan
from oneshot.profiling.curvature import curvature_tokens, measured_sizes, sequences_of_batch
from oneshot.profiling.embedding import TABLE_PROBES
from oneshot.profiling.probes import probe_shape
from oneshot.profiling.profiler import STATISTICS_SEQUENCES
from oneshot.schedule import Schedule
from oneshot.stream import holds_scores
from oneshot.text import NUM_KINDS, documents_together, shares, split_sources

WIDTH_STEPS = 8  # widths that a layer may keep if a profile will decide


@dataclass(frozen=True)
class Work:
    """A run in numbers. Bytes are of tensors as the checkpoint stores them.

    Attributes:
        plan: None for a run that only makes a profile. exact: whether its sizes are final; a profile changes them
            otherwise.
        layer_bytes: bytes of a layer. outside_bytes: bytes of what is outside the layers and held at once.
        token_table_bytes: bytes of a table of what every layer reads of its tokens; 0 without one.
        pinned_bytes: bytes of a layer in pinned memory.
        same_dtype: whether weights are stored in the compute dtype.
        device_bytes: what a CUDA device has, or may give.
        measures_latency: whether layers are timed for the budget.
        holds_scores: see `stream.holds_scores`.
        has_masks: whether attention reads masks of every two tokens.
        quantises: whether linears of layers are rounded.
        beside_bytes: what reading a tensor takes beside it and its pages: factors of low rank are multiplied out.
    """

    schedule: Schedule
    method: Method
    text: TextOptions
    machine: Machine
    grid: Grid
    plan: Plan | None
    save_dtype: SaveDtype
    model_bytes: int
    layer_bytes: int
    outside_bytes: int
    pinned_bytes: int
    stored_itemsize: int
    same_dtype: bool
    token_table_bytes: int = 0
    device_bytes: int = 0
    measures_latency: bool = False
    holds_scores: bool = False
    has_masks: bool = False
    beside_bytes: int = 0
    quantises: bool = False

    @property
    def shape(self) -> ModelShape:
        return self.grid.shape

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def dtype(self) -> torch.dtype:
        return self.machine.dtype

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def documents_together(self) -> int:
        """Return how many documents the model writes at once."""
        return documents_together(self.shape, self.dtype, self.device_bytes)

    @property
    def exact(self) -> bool:
        return not self.schedule.plans_by_profile

    @property
    def batch_tokens(self) -> int:
        """Return the tokens that pass a layer together."""
        return min(self.machine.batch_size, self.text.num_sequences) * self.text.sequence_length

    @property
    def num_tokens(self) -> int:
        return self.text.num_tokens

    @property
    def heads_width(self) -> int:
        """Return the outputs of all heads of a layer, which the output projection reads."""
        return self.shape.num_attention_heads * self.shape.head_dim

    @property
    def head_operations(self) -> int:
        """Return the operations of the output head for a token."""
        return 2 * self.shape.vocab_size * self.shape.hidden_size

    @property
    def hidden(self) -> HiddenPlan | None:
        """Return the plan of a narrower residual stream."""
        return None if self.plan is None else self.plan.hidden

    @property
    def reshapes_heads(self) -> bool:
        """Return whether sizes inside heads shrink, or may if a profile decides."""
        inner = self.plan is not None and (self.plan.reduces_values or self.plan.reduces_queries_keys)
        return inner or self.method.plans_inner_sizes

    @property
    def source_tokens(self) -> dict[str, int]:
        """Return the tokens of each source of the calibration text; none if it is not read."""
        return shares(self.num_tokens, split_sources(self.text.calibration)) if self.schedule.reads_text else {}

    @property
    def store_bytes(self) -> list[int]:
        """Return the bytes of each activation store that exists at the same time, at most.

        Keys and values that later layers read are stored beside the states.
        """
        one = (self.shape.hidden_size + self.shape.lent) * self.dtype.itemsize * self.text.sequence_length
        sequences = self.text.num_sequences
        if self.schedule.two_streams:
            batches = math.ceil(sequences / self.machine.batch_size)
            of_dense = self.machine.batch_size * math.ceil(batches / self.schedule.dense_every)
            return [one * sequences, one * min(sequences, of_dense)]
        if self.schedule.streams or self.schedule.finds_subspaces:
            return [one * sequences]
        counted = min(STATISTICS_SEQUENCES, sequences)
        return [one * counted] if self.schedule.makes_profile else []

    @property
    def curvature_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the matrices of output curvature that are measured of a layer."""
        return tuple(measured_sizes(self.grid.family, self.shape, self.grid.family.stack).values())

    @property
    def curvature_sequences(self) -> int:
        """Return the sequences that output curvature is measured on."""
        sequences = math.ceil(curvature_tokens(self.num_tokens) / self.text.sequence_length)
        return min(sequences, self.text.num_sequences)

    @property
    def curvature_batches(self) -> int:
        """Return the batches that they pass in."""
        return math.ceil(self.curvature_sequences / self.curvature_together)

    @property
    def curvature_together(self) -> int:
        """Return how many of them are in a batch at most."""
        sequences, is_mixture = self.curvature_sequences, self.shape.experts is not None
        return min(sequences, sequences_of_batch(sequences, self.machine.batch_size, mixture=is_mixture))

    @property
    def curvature_store_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each activation store while output curvature is measured.

        Beside the states there are lent keys and values, and the gradients at them.
        """
        number = self.dtype.itemsize * self.text.sequence_length * self.curvature_sequences
        lent = (self.shape.lent * number,) * 2 if self.shape.lent else ()
        return (self.shape.hidden_size * number,) * (self.shape.num_hidden_layers + 1) + lent

    @property
    def probe_shape(self) -> tuple[int, int]:
        """Return how many sequences are probes of a profile, and the most tokens of each."""
        causal = self.grid.family.stack.causal and self.grid.family.decoder is None
        return probe_shape(self.text.num_sequences, self.text.sequence_length, causal)

    @property
    def probe_tokens(self) -> int:
        """Return the tokens of all probes."""
        return math.prod(self.probe_shape)

    @property
    def table_probe_tokens(self) -> int:
        """Return the tokens that pass the layers with each smaller table: first ones of the text, and other kinds."""
        return min(TABLE_PROBES, self.text.num_sequences) * self.text.sequence_length + NUM_KINDS * self.probe_shape[1]

    @property
    def predicts_divergences(self) -> bool:
        """Return whether a profile has output curvature, and prices ranks by it."""
        ranked = "rank" in self.schedule.profiled_kinds and self.grid.family.may_have_ranks(self.shape)
        return ranked and self.schedule.weighs_output

    @property
    def kept_widths(self) -> list[int]:
        """Return the FFN widths that layers may keep: the plan's, or any if a profile will decide."""
        if self.plan is None or not self.exact:
            return [math.ceil(self.shape.intermediate_size * part / WIDTH_STEPS) for part in range(1, WIDTH_STEPS + 1)]
        return sorted({layer.intermediate_size for layer in self.plan.layers})


def describe_work(
    config: Config, model: Model, method: Method, grid: Grid, schedule: Schedule, plan: Plan | None, machine: Machine
) -> Work:
    """Return the numbers of a run; it reads no weights. `method` is settled for the grid."""
    sizes, whole = tensor_bytes(model.checkpoint), holds_scores(model, machine.device)
    layers = {*model.kinds, model.shape.num_hidden_layers - 1}  # the last is a decoder's, where layers differ
    if model.shape.own_sizes:
        layers = set(range(model.shape.num_hidden_layers))
    stated = complete_text_config(model.family, model.checkpoint.config)
    windows = stated.get("sliding_window"), stated.get("local_attention")
    of_layers = [
        [size for name, size in sizes.items() if name.startswith(model.family.layer_prefix(layer))] for layer in layers
    ]
    return Work(
        schedule=schedule,
        method=method,
        text=config.text,
        machine=machine,
        grid=grid,
        plan=plan,
        save_dtype=config.save_dtype,
        model_bytes=sum(sizes.values()),
        layer_bytes=max(map(sum, of_layers)),
        outside_bytes=max(sum(sizes[name] for name in part) for part in unchanged_parts(model)),
        token_table_bytes=sizes.get(str(token_table(model)), 0),
        pinned_bytes=max(sum(map(pinned_bytes, of_layer)) for of_layer in of_layers),
        stored_itemsize=max(ITEM_BYTES.get(dtype, 1) for dtype in model.checkpoint.dtypes.values()),
        same_dtype=set(model.checkpoint.dtypes.values()) == {DTYPE_NAMES.get(machine.dtype)},
        device_bytes=device_capacity(machine.device, config.machine.max_device_memory_bytes),
        measures_latency=config.target.budget == "latency",
        holds_scores=whole,
        has_masks=whole or any(0 < (window or 0) < config.text.sequence_length for window in windows),
        beside_bytes=model.checkpoint.beside_bytes,
        quantises=config.quantise is not None,
    )


def tensor_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of every tensor."""
    return {
        name: math.prod(shape) * ITEM_BYTES.get(checkpoint.dtypes[name], 1) for name, shape in checkpoint.shapes.items()
    }
