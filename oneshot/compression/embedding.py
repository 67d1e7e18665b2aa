"""An embedding or output head with fewer coordinates for rarer tokens: ranges of the vocabulary with their own ranks.

Tokenizers number their tokens roughly by frequency, so a range of numbers is a range of frequencies. From there tokens
move to the range whose directions fit them best. The rows of a range, `E_g (rows, D)`, become `U V` of rank r:
block-wise low rank as in GroupReduce (Chen et al. 2018, arXiv 1806.06950), also in that tokens move, weighted by token
and by direction: `min ‖diag(w)^½ (E_g − U V) H^½‖_F`. `H` is what a change of a row costs. As a row of the output head
that is the Gram of the states that the head reads. As the input of the first layer it is the output curvature of the
states there, if it is measured. A tied table has both costs. The weights `w` are the roots of the tokens'
probabilities, because other texts predict other tokens. An interpolative decomposition of V then removes what the two
factors store twice: with r pivot columns of V, `V = V_r [I, T]`. So the range is stored as `U V_r`, which is the
approximation at r of the coordinates, and as `T`. That is r² numbers less, and nothing is lost.

The rows of marks (a chat's turns, a tool call) stay as they are, because text hardly shows what they are for: their
directions come first, and then the principal directions of the other rows in what is left.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from oneshot_kernels import suffix_sums
from torch.nn import functional

from oneshot.architecture import Table, TableShape
from oneshot.compression.fold import PANEL_ROWS, times
from oneshot.linalg.assignment import balanced_assignment
from oneshot.linalg.interpolative import spanning_columns
from oneshot.linalg.low_rank import damped_root
from oneshot.linalg.pca import energies_along, principal_components
from oneshot.linalg.sums import panels
from oneshot.machine import ALONE, Workers
from oneshot.machine.transfer import as_like
from oneshot.planning import smaller_tables, vocabulary_ranges
from oneshot.tensors import Tensors

COSTS = "costs of the rows of the {}"
MARK_PRECISION = 2**-10  # of a row's length: half a step of bfloat16

# Tokens move for ranks that leave this share of the table. Later rounds gain little, and so do ranges of other
# sizes (benchmarks/records/experiments.md).
ORDER_SHARE, ORDER_ROUNDS = 7 / 10, 3

MODULES: dict[Table, str] = {"embedding": "model.embed_tokens", "output_head": "lm_head"}


@dataclass(frozen=True)
class TokenRows:
    """The rows of a table of the vocabulary, and what their changes cost.

    Attributes:
        weight: `(N, D)` on the host. gram: `H (D, D)`. probabilities: `(N,)` of the tokens, on the device of `gram`.
        marks: tokens whose rows stay as they are. table: which one it is.
    """

    weight: torch.Tensor
    gram: torch.Tensor
    probabilities: torch.Tensor
    marks: Collection[int] = ()
    table: Table = "embedding"

    @cached_property
    def root(self) -> torch.Tensor:
        """Return `L (D, D)` float64 with `L Lᵀ = H`."""
        return damped_root(self.gram, COSTS.format(self.table.replace("_", " ")))

    @cached_property
    def weights(self) -> torch.Tensor:
        """Return the tokens' weights `(N,)` float64; half of each is the mean of tokens that are about as frequent."""
        smooth = self.probabilities.double()
        ranges = [smooth[part] for part in vocabulary_ranges(len(smooth))]
        return torch.cat([((one + one.mean()) / 2).sqrt() for one in ranges])

    def directions(self, tokens: torch.Tensor) -> Tensors:
        """Return the directions of these tokens' rows and what each number of them loses.

        `directions (D, D)` float64, orthonormal columns: first the `kept` ones that hold the rows of marks in `E_g L`,
        then the principal ones of `diag(w)^½ E_g L` orthogonal to them, the strongest first. `errors (D + 1,)` on the
        host: the squared error of the first r; infinite for ranks that cannot hold the marks.
        """
        chosen, on_device = self.weight[tokens], tokens.to(self.root.device)
        own = self.weight[sorted(set(self.marks) & set(tokens.tolist()))]
        marked = functional.normalize(as_like(own, self.root) @ self.root)
        _, strengths, basis = torch.linalg.svd(marked)
        num_kept = int((strengths > MARK_PRECISION * len(own) ** 0.5).sum())
        kept, others = basis.T.tensor_split([num_kept], dim=1)
        gram = self.root.T @ _gram(chosen, self.weights[on_device]) @ self.root
        energies = energies_along(gram, kept)
        if num_kept < len(gram):
            inside, remaining = principal_components(others.T @ gram @ others)
            kept, energies = torch.cat((kept, others @ inside), dim=1), torch.cat((energies, remaining))
        errors = suffix_sums(energies.cpu())
        errors[1:num_kept] = torch.inf
        return {"directions": kept, "errors": errors}

    def losses(self, part: slice, lost: list[torch.Tensor]) -> torch.Tensor:
        """Return what the tokens of a slice lose without each of these directions `(D, left out)`.

        `(tokens, ranges)` float64 on the host, computed in float32.
        """
        root, found = self.root.float(), []
        for rows, weights in zip(
            self.weight[part].split(PANEL_ROWS), self.weights[part].split(PANEL_ROWS), strict=True
        ):
            inside = as_like(rows, root) @ root
            squares = torch.stack([(inside @ one).square().sum(1) for one in lost], dim=1)
            found.append((squares.double() * weights.unsqueeze(1)).cpu())
        return torch.cat(found)


def order_of_tokens(rows: TokenRows, *, workers: Workers = ALONE) -> torch.Tensor:
    """Return the tokens in an order whose ranges lose little at low ranks, `(N,)` int64 on the host.

    Each round takes the directions of the ranges at the ranks that leave `ORDER_SHARE` of the embedding, and gives
    every token to the range that loses least of it; ranges keep their sizes. Marks go into the first one, which has the
    highest rank. `workers` share the ranges; all receive the same.
    """
    size = len(rows.weight)
    ranges, order, before = vocabulary_ranges(size), torch.arange(size), np.inf
    room = [part.stop - part.start for part in ranges]
    fixed = sorted(rows.marks) if len(rows.marks) <= room[0] else []
    free = torch.ones(size, dtype=torch.bool)
    free[fixed] = False
    room[0] -= len(fixed)
    for _ in range(ORDER_ROUNDS):
        found = [*workers.share_all([partial(rows.directions, order[part]) for part in ranges], [1.0] * len(ranges))]
        tables = smaller_tables(relative_errors(found), size, ORDER_SHARE)
        left_out = [one["directions"][:, table.rank :].float() for one, table in zip(found, tables, strict=True)]
        del found
        jobs = [partial(rows.losses, part, left_out) for part in ranges]
        losses = torch.cat([*workers.share_all(jobs, [1.0] * len(ranges))])
        range_of = torch.zeros(size, dtype=torch.int64)
        range_of[free] = torch.from_numpy(balanced_assignment(losses[free].numpy(), room))
        total = float(losses[free].gather(1, range_of[free].unsqueeze(1)).sum())
        if not total < before:
            break
        order, before = range_of.argsort(stable=True), total
    return order


def relative_errors(found: Iterable[Tensors]) -> torch.Tensor:
    """Return the `errors` of all ranges, `(ranges, D + 1)`, as shares of what rank 0 loses in all of them."""
    errors = torch.stack([one["errors"] for one in found])
    return errors / errors[:, 0].sum().clamp_min(torch.finfo(errors.dtype).tiny)  # the rows may all be zero


def range_errors(rows: TokenRows, order: torch.Tensor, *, workers: Workers = ALONE) -> torch.Tensor:
    """Return what every rank of every range loses of the logits, `(ranges, D + 1)` on the host; rank 0 sums to one.

    Ranks that cannot hold the marks have an infinite error. `order`: the tokens, as they are cut into ranges. `workers`
    share the ranges; all receive all.
    """

    def errors_of(part: slice) -> Tensors:
        return {"errors": rows.directions(order[part])["errors"]}

    jobs = [partial(errors_of, part) for part in vocabulary_ranges(len(order))]
    return relative_errors(workers.share_all(jobs, [1.0] * len(jobs)))


def reduce_embedding(
    rows: TokenRows, order: torch.Tensor, tables: tuple[TableShape, ...], *, workers: Workers = ALONE
) -> Tensors:
    """Return the tables and maps of a plan's ranges, as the per-layer form names them under `MODULES`.

    `places (N,)` int64: where in all tables each token is. `tables.g.weight (rows, rank)`, and below the full rank
    `maps.g.weight (D − rank, rank)` in the weight's dtype and `maps.g.columns (D,)` int64. With the principal
    directions `P` of `diag(w)^½ E_g L`, `L Lᵀ = H`, the best approximation is `E_g L P Pᵀ L⁻¹` (Eckart and Young 1936).
    The table has its columns at the pivots of `V = Pᵀ L⁻¹`, and the map the transposed coefficients of the others.
    Arguments as in `range_errors`.
    """
    root, weight, module = rows.root, rows.weight, MODULES[rows.table]

    def reduce_range(index: int, part: slice, rank: int) -> Tensors:
        directions, reduced = rows.directions(order[part])["directions"][:, :rank], dict[str, torch.Tensor]()
        factor = torch.linalg.solve_triangular(root.T, directions, upper=True).T
        read, others, coefficients = spanning_columns(factor)
        reduced[_map(module, index)] = as_like(coefficients.T, weight).contiguous()
        reduced[_columns(module, index)] = torch.cat((read, others)).cpu()
        table = times(weight[order[part]], root @ directions @ factor[:, read])
        return reduced | {_table(module, index): table.contiguous()}

    shapes = list(enumerate(zip(vocabulary_ranges(len(weight)), tables, strict=True)))
    smaller = [(index, part, table.rank) for index, (part, table) in shapes if table.rank < weight.shape[1]]
    jobs = [partial(reduce_range, *each) for each in smaller]
    found = dict(zip((index for index, *_ in smaller), workers.share_all(jobs, [1.0] * len(jobs)), strict=True))
    reduced: Tensors = {_places(module): order.argsort()}
    for index, (part, _) in shapes:
        reduced |= found.get(index) or {_table(module, index): weight[order[part]]}
    return reduced


def expanded(
    reduced: Tensors, width: int, device: torch.device | str = "cpu", table: Table = "embedding"
) -> torch.Tensor:
    """Return the whole weight `(N, width)` that a table's ranges and maps stand for; `device` multiplies them."""
    module = MODULES[table]
    count = sum(name.startswith(f"{module}.tables.") for name in reduced)
    tables = [reduced[_table(module, index)] for index in range(count)]
    whole = tables[0].new_empty(len(reduced[_places(module)]), width)
    tokens = reduced[_places(module)].argsort().split([len(rows) for rows in tables])
    for index, (rows, own) in enumerate(zip(tables, tokens, strict=True)):
        every = rows
        if _map(module, index) in reduced:
            read, others = reduced[_columns(module, index)].tensor_split([rows.shape[1]])
            every = rows.new_empty(len(rows), width)
            every[:, read] = rows
            every[:, others] = times(rows, reduced[_map(module, index)].to(device).double().T)
        whole[own] = every
    return whole


def _places(module: str) -> str:
    return f"{module}.places"


def _table(module: str, index: int) -> str:
    return f"{module}.tables.{index}.weight"


def _map(module: str, index: int) -> str:
    return f"{module}.maps.{index}.weight"


def _columns(module: str, index: int) -> str:
    return f"{module}.maps.{index}.columns"


def _gram(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `Eᵀ diag(w) E (D, D)` float64 on the device of the weights, by panels of rows and of columns."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=weights.device)
    for panel, weight in zip(rows.split(PANEL_ROWS), weights.split(PANEL_ROWS), strict=True):
        on_device = as_like(panel, total)
        weighted = on_device * weight.unsqueeze(1)
        for start, stop in panels(total):  # what is below the diagonal is equal
            total[start:stop, start:].addmm_(on_device[:, start:stop].T, weighted[:, start:])
    return total.triu_() + total.triu(1).T
