"""The matrices of a GGUF result, rounded to their types; layers one after another, with error feedback between blocks.

ggml rounds a block of columns at once, so what that breaks is given to the blocks that are rounded after it. With
`G = U D Uᵀ`, U unit upper triangular in blocks and D block diagonal, errors `E = W − Q` cost
`Σ_b tr((E_b + E_{<b} U_{<b,b}) D_b (E_b + E_{<b} U_{<b,b})ᵀ)`. So block b is rounded from `W_b + E_{<b} U_{<b,b}`, and
the diagonal of `D_b` is the importance of its columns. With blocks of one column this is GPTQ (`compression/rounding`).
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from oneshot.checkpoint.gguf_rotary import interleave
from oneshot.compression.overflow import naming_the_layer
from oneshot.compression.rounding import TOKENS_PER_COLUMN, feedback_factor, row_energies, trusted_gram
from oneshot.compression.statistics import GramAccumulator, Statistics
from oneshot.export.gguf_tensors import beyond_float16
from oneshot.export.quantisers import block_of, quantise, read_rows, usable_importance
from oneshot.export.result_model import EMBEDDING, HEAD, ResultLayer, ResultModel
from oneshot.machine.transfer import as_like

LAYER = "model.layers."
PANEL_VALUES = 2**22  # that are rounded at once
# linears that read the same: the first of a layer that is there stands for all
READERS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


class RoundedTensors:
    """Round the matrices of a result: its tables, and layers in order, each on what is rounded before it.

    Args:
        model: the result in 16 or 32 bits, with the text. kinds: the type of every matrix, by its module. tables:
            importance of the columns of tables, and the Gram of what an output head reads, by module. tell: receives
            the number of a layer before it is rounded.
    """

    def __init__(
        self,
        model: ResultModel,
        kinds: Mapping[str, str],
        tables: Mapping[str, tuple[np.ndarray | None, Statistics | None]],
        tell: Callable[[int], None],
    ) -> None:
        self._model, self._kinds, self._tables, self._tell = model, kinds, tables, tell
        self._rounded, self._next = dict[str, np.ndarray](), 0
        table = model.table(EMBEDDING)
        self._rounded[EMBEDDING] = self._round_table(EMBEDDING, table)
        self._states = model.embedded(table)

    def take(self, module: str) -> np.ndarray:
        """Return a matrix in its type `(m, bytes)`, as the file has it, once. Layers are asked for in order."""
        if module == HEAD:
            return self._round_table(HEAD, self._model.table(HEAD))
        while module not in self._rounded:
            self._round_next()
        return self._rounded.pop(module)

    def close(self) -> None:
        """Free the states of the text."""
        self._states.close()

    def _round_table(self, module: str, table: torch.Tensor) -> np.ndarray:
        """Return a table in its type, panel by panel; the values become what an engine reads."""
        kind, panels = self._kinds[module], []
        importance, products = self._tables[module]
        factor = None if products is None else block_factor(products, block_of(kind))
        for rows in table.split(max(1, PANEL_VALUES // table.shape[1])):
            if factor is None:
                panels.append(quantise(rows.numpy(), kind, importance))
            else:
                panels.append(rounded_with_feedback(rows, kind, factor))
            rows.copy_(_read(module, rows, panels[-1], kind))
        return np.concatenate(panels)

    def _round_next(self) -> None:
        """Round a layer, and replace the states by what it then gives."""
        model, number = self._model, self._next
        self._tell(number)
        layer = model.layer(number)
        tensors, grams = layer.tensors, self._grams(layer, number)
        for together in READERS:
            factors: dict[int, BlockFactor | None] = {}
            for name in together:
                if f"{name}.weight" not in tensors:
                    continue
                module, weight = f"{LAYER}{number}.{name}", tensors[f"{name}.weight"]
                kind, linear = self._kinds[module], layer.module.get_submodule(name)
                size = block_of(kind)
                if size not in factors:
                    factors[size] = block_factor(grams[together[0]], size)
                stored = rounded_with_feedback(weight, kind, factors[size])
                read = _read(module, weight, stored, kind)
                linear.weight.data = as_like(read, linear.weight)  # type: ignore[arg-type]
                heads = model.source.interleaved_heads(f"{module}.weight")
                self._rounded[module] = stored if heads is None else interleave(stored, heads)
        for batch in model.batches:
            self._states.write(batch.rows, layer.run(self._states.read_batch(batch)))
        self._next += 1

    def _grams(self, layer: ResultLayer, number: int) -> dict[str, Statistics]:
        """Return the Grams of what a layer's linears read, by the first of those that read the same."""
        model, sums, tensors = self._model, dict[str, GramAccumulator](), layer.tensors
        with ExitStack() as hooks:
            for name in (together[0] for together in READERS):
                if f"{name}.weight" in tensors:
                    size = tensors[f"{name}.weight"].shape[1]
                    sums[name] = GramAccumulator(size, output_size=None, device=model.machine.device)
                    part = layer.module.get_submodule(name)
                    hooks.enter_context(part.register_forward_pre_hook(_listener(sums[name])))
            for batch in model.batches:
                layer.run(self._states.read_batch(batch))
        with naming_the_layer(number, lambda: tensors):
            return {name: one.finish() for name, one in sums.items()}


def _read(module: str, weight: torch.Tensor, stored: np.ndarray, kind: str) -> torch.Tensor:
    """Return what an engine reads of a rounded weight. Raises `PlanError` if that is not finite."""
    read = torch.from_numpy(read_rows(stored, kind, weight.shape[1]))
    if not bool(torch.isfinite(torch.stack(read.aminmax())).all()):
        raise beyond_float16(module, float(weight.abs().max()))
    return read


def _listener(sums: GramAccumulator) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    return lambda _, inputs: sums.update_(inputs[0].flatten(0, -2))


def rounded_with_feedback(weight: torch.Tensor, kind: str, factor: "BlockFactor | None") -> np.ndarray:
    """Return a weight `(m, n)` in a type `(m, bytes)`, its blocks of columns rounded from those with most energy on.

    `factor`: of what the linear reads; None if no token has reached it, and errors are not weighed then.
    """
    if factor is None:
        return quantise(weight.numpy(), kind, None)
    step = max(1, PANEL_VALUES // weight.shape[1])
    return np.concatenate([_rounded_rows(rows, kind, factor) for rows in weight.split(step)])


@dataclass(frozen=True)
class BlockFactor:
    """The factor of a Gram by blocks of columns.

    Attributes:
        blocks: numbers of blocks in the order of rounding. feedback: `U (n, n)` float32 in this order; only what
            is above its blocks of the diagonal is read. importance: `(n,)` float32 in this order, diagonals of `D`.
        few: from few tokens what is known of the Gram `(n, n)`, float32 in the order of columns. Rows that the nearest
            values suit better by it get these, because a huge token can make feedback lose more. None: from many.
    """

    blocks: tuple[int, ...]
    feedback: torch.Tensor
    importance: torch.Tensor
    few: torch.Tensor | None


def block_factor(statistics: Statistics, size: int) -> BlockFactor | None:
    """Return the factor of a Gram for blocks of `size` columns; None if it is zero, or for F16, which has no blocks."""
    if size == 1:
        return None
    energies = statistics.gram.diagonal().unflatten(0, (-1, size)).sum(1, dtype=torch.float64)
    blocks = energies.argsort(descending=True, stable=True)
    order = torch.arange(len(statistics.gram), device=blocks.device).unflatten(0, (-1, size))[blocks].flatten()
    factor = feedback_factor(statistics.gram, statistics.num_rows, order)
    if factor is None:
        return None
    importance = []
    for start in range(0, len(order), size):
        within = factor[start : start + size, start : start + size]
        importance.append(within.square().sum(1))
        above = factor[:start, start : start + size]
        above.copy_(torch.linalg.solve_triangular(within, above, upper=True, left=False))
    few = None
    if statistics.num_rows < TOKENS_PER_COLUMN * len(order):
        few = trusted_gram(statistics.gram, statistics.num_rows).float().cpu()
    return BlockFactor(tuple(blocks.tolist()), factor.float().cpu(), torch.cat(importance).float().cpu(), few)


def _rounded_rows(weight: torch.Tensor, kind: str, factor: BlockFactor) -> np.ndarray:
    size = weight.shape[1] // len(factor.blocks)
    errors, stored = torch.zeros_like(weight), dict[int, np.ndarray]()
    for place, block in enumerate(factor.blocks):
        start, stop = place * size, (place + 1) * size
        own = weight[:, block * size : (block + 1) * size]
        wanted = own + errors[:, :start] @ factor.feedback[:start, start:stop]
        stored[block] = quantise(wanted.numpy(), kind, factor.importance[start:stop].numpy())
        errors[:, start:stop] = own - torch.from_numpy(read_rows(stored[block], kind, size))
    rows = np.concatenate([stored[block] for block in range(len(stored))], axis=1)
    return rows if factor.few is None else _better_rows(weight, kind, rows, factor.few)


def _better_rows(weight: torch.Tensor, kind: str, rows: np.ndarray, gram: torch.Tensor) -> np.ndarray:
    """Return the stored `rows`, or the nearest where these lose less by a Gram of the inputs."""
    nearest = quantise(weight.numpy(), kind, usable_importance(gram.diagonal().numpy()))
    lost, by_nearest = (
        row_energies(weight - torch.from_numpy(read_rows(one, kind, weight.shape[1])), gram) for one in (rows, nearest)
    )
    return np.where((lost <= by_nearest).unsqueeze(1).numpy(), rows, nearest)
