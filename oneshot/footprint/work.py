"""What there is to do in a run: the sizes that memory and time are predicted from."""

import math
from dataclasses import dataclass

import torch

from oneshot.calibration import split_sources
from oneshot.checkpoint import Checkpoint
from oneshot.config import CompressionConfig
from oneshot.layerwise import reads_activations
from oneshot.layerwise.profiling import STATISTICS_SEQUENCES
from oneshot.recipes import Recipe
from oneshot.records import HiddenPlan, ModelShape, Plan
from oneshot.source import SourceModel

ITEMSIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}  # others of the format take a byte or less
WIDTH_STEPS = 8  # widths that a layer is taken to keep where a profile will say


@dataclass(frozen=True)
class Work:
    """A run in numbers. Bytes are those of tensors as the checkpoint stores them.

    Attributes:
        plan: None for a run that makes a profile and nothing else.
        dtype: of the streams. layer_bytes: of a layer. outside_bytes: of the largest tensor outside the layers.
        profiled_kinds: kinds of blocks whose sensitivity is measured, 0 where no profile is made.
        exact: whether the plan's sizes are those that the run will have; a profile changes them otherwise.
    """

    config: CompressionConfig
    recipe: Recipe
    shape: ModelShape
    plan: Plan | None
    device: torch.device
    dtype: torch.dtype
    model_bytes: int
    layer_bytes: int
    outside_bytes: int
    stored_itemsize: int
    profiled_kinds: int
    exact: bool
    removable_heads: bool

    @property
    def batch_tokens(self) -> int:
        """Tokens that go through a layer together."""
        return min(self.config.batch_size, self.config.num_sequences) * self.config.sequence_length

    @property
    def num_tokens(self) -> int:
        return self.config.num_sequences * self.config.sequence_length

    @property
    def streams_text(self) -> bool:
        """Whether the layers are compressed by what a text says."""
        return self.plan is not None and reads_activations(self.recipe, self.plan, self.shape)

    @property
    def two_streams(self) -> bool:
        return self.recipe.correction == "two-stream"

    @property
    def corrects_up(self) -> bool:
        """Whether `up_proj` is corrected, too."""
        return self.recipe.up_steps > 0 and self.shape.gated

    @property
    def hidden(self) -> HiddenPlan | None:
        """The plan of a narrower residual stream."""
        return None if self.plan is None else self.plan.hidden

    @property
    def slices(self) -> bool:
        """Whether the residual stream gets narrower."""
        return self.hidden is not None

    @property
    def profiles_embedding(self) -> bool:
        """Whether a profile is made that says what a reduced embedding costs."""
        wanted = self.plan is None or self.recipe.embedding != "none"
        return self.profiled_kinds > 0 and wanted and self.shape.reads_embedding_out

    @property
    def may_reduce_embedding(self) -> bool:
        """Whether a profile may say that the embedding shall be reduced."""
        planned = self.plan is not None and not self.exact
        return planned and self.recipe.embedding != "none" and self.shape.reads_embedding_out

    @property
    def texts(self) -> list[str]:
        """Where calibration text comes from; nothing where none is read."""
        reads = self.streams_text or self.slices or self.profiled_kinds > 0
        return split_sources(self.config.calibration) if reads else []

    @property
    def store_bytes(self) -> list[int]:
        """Bytes of each activation store that is there at a time, at most."""
        one = self.shape.hidden_size * self.dtype.itemsize * self.config.sequence_length
        if self.streams_text or self.slices:
            return [one * self.config.num_sequences] * (1 + (self.streams_text and self.two_streams))
        return [one * min(STATISTICS_SEQUENCES, self.config.num_sequences)] if self.profiled_kinds else []

    @property
    def kept_widths(self) -> list[int]:
        """FFN widths that layers may keep: the plan's, or any where a profile will say."""
        if self.plan is None or not self.exact:
            return [math.ceil(self.shape.intermediate_size * part / WIDTH_STEPS) for part in range(1, WIDTH_STEPS + 1)]
        return sorted({layer.intermediate_size for layer in self.plan.layers})


def describe_work(
    config: CompressionConfig,
    recipe: Recipe,
    source: SourceModel,
    plan: Plan | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    profiled_kinds: int,
    exact: bool,
) -> Work:
    """The numbers of a run; arguments as the attributes of `Work`. Reads no weights."""
    checkpoint, architecture = source.checkpoint, source.architecture
    prefix = architecture.layer_prefix(0)
    in_layers = f"{architecture.layers}."
    sizes = tensor_bytes(checkpoint)
    return Work(
        config=config,
        recipe=recipe,
        shape=source.shape,
        plan=plan,
        device=device,
        dtype=dtype,
        model_bytes=sum(sizes.values()),
        layer_bytes=sum(size for name, size in sizes.items() if name.startswith(prefix)),
        outside_bytes=max(size for name, size in sizes.items() if not name.startswith(in_layers)),
        stored_itemsize=max(ITEMSIZES.get(dtype, 1) for dtype in checkpoint.dtypes.values()),
        profiled_kinds=profiled_kinds,
        exact=exact,
        removable_heads=architecture.removable_heads,
    )


def tensor_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of every tensor."""
    return {
        name: math.prod(shape) * ITEMSIZES.get(checkpoint.dtypes[name], 1) for name, shape in checkpoint.shapes.items()
    }
