"""A tied embedding with fewer coordinates for rarer tokens: ranges of the vocabulary with their own ranks.

Tokenizers number their tokens roughly by frequency, so a range of numbers is a range of frequencies. The rows of a
range, `E_g (rows, D)`, become `U V` of rank r: block-wise low rank as in GroupReduce (Chen et al. 2018, arXiv
1806.06950), weighted by token and by direction: `min ‖diag(w)^½ (E_g − U V) H^½‖_F`. `H` is what a change of a row
costs: as a row of the output head the Gram of the states that it reads, and as the input of the first layer the output
curvature of the states there, if it is measured. The weights `w` are the roots of the tokens' probabilities, because
other texts predict other tokens. An interpolative decomposition of V then removes what the two factors store twice:
with r pivot columns of V, `V = V_r [I, T]`. So the range is stored as `U V_r`, which is the approximation at r of the
coordinates, and as `T`. That is r² numbers less, and nothing is lost.

The rows of marks (a chat's turns, a tool call) stay as they are, because text hardly shows what they are for: their
directions come first, and those of the other rows are principal in what is left.
"""

from collections.abc import Collection
from functools import partial

import torch
from oneshot_kernels import suffix_sums
from torch.nn import functional

from oneshot.architecture import TableShape
from oneshot.compression.fold import PANEL_ROWS, times
from oneshot.linalg.interpolative import spanning_columns
from oneshot.linalg.low_rank import damped_root
from oneshot.linalg.pca import energies_along, principal_components
from oneshot.linalg.sums import panels
from oneshot.machine import ALONE, Workers
from oneshot.machine.transfer import as_like
from oneshot.planning import vocabulary_ranges
from oneshot.tensors import Tensors

COSTS = "costs of the rows of the embedding"
MARK_PRECISION = 2**-10  # of a row's length: half a step of bfloat16

_TABLES = "model.embed_tokens.tables."


def range_errors(
    embedding: torch.Tensor,
    gram: torch.Tensor,
    probabilities: torch.Tensor,
    marks: Collection[int] = (),
    *,
    workers: Workers = ALONE,
) -> torch.Tensor:
    """Return what every rank of every range loses of the logits, `(ranges, D + 1)` on the host; rank 0 sums to one.

    Args:
        embedding: `(N, D)`. gram: `H (D, D)`. probabilities: `(N,)` of the tokens.
        marks: tokens whose rows stay as they are; ranks that cannot hold them have an infinite error.
        workers: who share the ranges; all receive all.
    """
    root = damped_root(gram, COSTS)

    def errors_of(part: slice) -> torch.Tensor:
        _, energies, num_kept = _directions(embedding, part, probabilities, marks, root)
        errors = suffix_sums(energies.cpu())
        errors[1:num_kept] = torch.inf
        return errors

    jobs = [partial(errors_of, part) for part in vocabulary_ranges(len(embedding))]
    errors = torch.stack([*workers.share_all(jobs, [1.0] * len(jobs))])
    return errors / errors[:, 0].sum().clamp_min(torch.finfo(errors.dtype).tiny)  # the rows may all be zero


def reduce_embedding(
    embedding: torch.Tensor,
    gram: torch.Tensor,
    probabilities: torch.Tensor,
    tables: tuple[TableShape, ...],
    marks: Collection[int] = (),
    *,
    workers: Workers = ALONE,
) -> Tensors:
    """Return the tables and maps of a plan's ranges, as the per-layer form names them.

    `embed_tokens.tables.g.weight (rows, rank)`, and below the full rank `embed_tokens.maps.g.weight (D − rank, rank)`
    in the embedding's dtype and `embed_tokens.maps.g.columns (D,)` int64. With the principal directions `P` of
    `diag(w)^½ E_g L`, `L Lᵀ = H`, the best approximation is `E_g L P Pᵀ L⁻¹` (Eckart and Young 1936). The table has its
    columns at the pivots of `V = Pᵀ L⁻¹`, and the map the transposed coefficients of the others. Arguments as in
    `range_errors`.
    """
    root = damped_root(gram, COSTS)

    def reduce_range(index: int, part: slice, rank: int) -> Tensors:
        rows, reduced = embedding[part], dict[str, torch.Tensor]()
        directions = _directions(embedding, part, probabilities, marks, root)[0][:, :rank]
        factor = torch.linalg.solve_triangular(root.T, directions, upper=True).T
        read, others, coefficients = spanning_columns(factor)
        rows = times(rows, root @ directions @ factor[:, read])
        reduced[_map(index)] = as_like(coefficients.T, embedding).contiguous()
        reduced[_columns(index)] = torch.cat((read, others)).cpu()
        return reduced | {_table(index): rows.contiguous()}

    shapes = list(enumerate(zip(vocabulary_ranges(len(embedding)), tables, strict=True)))
    smaller = [(index, part, table.rank) for index, (part, table) in shapes if table.rank < embedding.shape[1]]
    jobs = [partial(reduce_range, *each) for each in smaller]
    found = dict(zip((index for index, *_ in smaller), workers.share_all(jobs, [1.0] * len(jobs)), strict=True))
    reduced: Tensors = {}
    for index, (part, _) in shapes:
        reduced |= found.get(index) or {_table(index): embedding[part].contiguous()}
    return reduced


def expanded(reduced: Tensors, width: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the whole embedding `(N, width)` that the tables and maps stand for; `device` multiplies them."""
    tables = [reduced[_table(index)] for index in range(sum(name.startswith(_TABLES) for name in reduced))]
    sizes = [len(rows) for rows in tables]
    whole = tables[0].new_empty(sum(sizes), width)
    for index, (rows, place) in enumerate(zip(tables, whole.split(sizes), strict=True)):
        if _map(index) not in reduced:
            place.copy_(rows)
            continue
        read, others = reduced[_columns(index)].tensor_split([rows.shape[1]])
        place[:, read] = rows
        place[:, others] = times(rows, reduced[_map(index)].to(device).double().T)
    return whole


def _table(index: int) -> str:
    return f"{_TABLES}{index}.weight"


def _map(index: int) -> str:
    return f"model.embed_tokens.maps.{index}.weight"


def _columns(index: int) -> str:
    return f"model.embed_tokens.maps.{index}.columns"


def _directions(
    embedding: torch.Tensor, part: slice, probabilities: torch.Tensor, marks: Collection[int], root: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a range's directions, orthonormal columns `(D, D)` float64, their energies `(D,)`, and how many are kept.

    The kept ones come first: they hold the rows of the range's marks in `E_g L`. Then come the principal directions of
    `diag(w)^½ E_g L` orthogonal to them, the strongest first.
    """
    own = [mark for mark in marks if part.start <= mark < part.stop]
    marked = functional.normalize(as_like(embedding[own], root) @ root)
    _, strengths, basis = torch.linalg.svd(marked)
    num_kept = int((strengths > MARK_PRECISION * len(own) ** 0.5).sum())
    kept, others = basis.T.tensor_split([num_kept], dim=1)
    gram = root.T @ _gram(embedding[part], _weights(probabilities[part])) @ root
    energies = energies_along(gram, kept)
    if num_kept == len(gram):
        return kept, energies, num_kept
    inside, remaining = principal_components(others.T @ gram @ others)
    return torch.cat((kept, others @ inside), dim=1), torch.cat((energies, remaining)), num_kept


def _weights(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the weights of a range's tokens; half of each is the range's mean, for tokens that are never predicted."""
    smooth = probabilities.double()
    return ((smooth + smooth.mean()) / 2).sqrt()


def _gram(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `Eᵀ diag(w) E (D, D)` float64 on the device of the weights, by panels of rows and of columns."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=weights.device)
    for panel, weight in zip(rows.split(PANEL_ROWS), weights.split(PANEL_ROWS), strict=True):
        on_device = as_like(panel, total)
        weighted = on_device * weight.unsqueeze(1)
        for start, stop in panels(total):  # what is below the diagonal is equal
            total[start:stop, start:].addmm_(on_device[:, start:stop].T, weighted[:, start:])
    return total.triu_() + total.triu(1).T
