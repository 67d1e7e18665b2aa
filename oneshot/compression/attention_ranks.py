"""Low rank of attention's linears: of queries and keys together, and of the output linear.

`W (m, n)` becomes the matrix of rank r with the least error of its outputs, `min ‖diag(w)^½ (W − W_r) H^½‖_F`. `H` is
the Gram of what the linear reads. A query's weight is the energy of the keys that it meets in the scores, and a key's
that of the queries; rotation mixes the two coordinates of a pair, which share theirs. The output linear's weights are
equal. W_r (Eckart and Young 1936) is stored as r of its rows, from which a matrix makes the others: `r (m + n − r)`
numbers.
"""

from dataclasses import dataclass

import torch
from oneshot_kernels import suffix_sums

from oneshot.compression.statistics import GramAccumulator, HeadGramAccumulator
from oneshot.families import Attention, ModelShape
from oneshot.linalg.interpolative import spanning_columns
from oneshot.linalg.low_rank import damped_root
from oneshot.linalg.pca import energies_along, principal_directions
from oneshot.machine import Workers
from oneshot.machine.transfer import as_like
from oneshot.stream import Layer

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LowRank:
    """A matrix `(m, n)` of rank r as its `read (r, n)` rows and `others (m − r, r)`, which make the rest from them.

    `order`: int64 `(m,)`, the numbers of the read rows, then those of the others.
    """

    read: torch.Tensor
    others: torch.Tensor
    order: torch.Tensor

    def whole(self) -> torch.Tensor:
        """Return the matrix in the dtype of its parts."""
        rows = torch.cat((self.read, (self.others.double() @ self.read.double()).to(self.read)))
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


@dataclass(frozen=True)
class Ranks:
    """Attention's linears of low rank; None where a linear is whole."""

    queries_keys: LowRank | None = None
    output: LowRank | None = None


NO_RANKS = Ranks()


@dataclass(frozen=True)
class AttentionGrams:
    """Sums over the text: of what attention reads `(D, D)`, of what its output linear reads `(H·h, H·h)`, and of every
    head's queries `(H, h, h)` and keys `(G, h, h)` before rotation.
    """

    inputs: torch.Tensor
    heads: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor


class AttentionAccumulator:
    """Sum what ranks of attention's linears are computed from."""

    def __init__(self, shape: ModelShape, index: int, device: torch.device) -> None:
        self._index = index
        self._inputs = GramAccumulator(shape.hidden_size, output_size=None, device=device)
        self._heads = GramAccumulator(shape.num_attention_heads * shape.head_dim, output_size=None, device=device)
        self._queries, self._keys = (
            HeadGramAccumulator(count, shape.head_dim, device=device)
            for count in (shape.num_attention_heads, shape.num_key_value_heads)
        )

    def update_(self, layer: Layer, x: torch.Tensor, heads: torch.Tensor | None = None) -> None:
        """Add a batch of the stream before attention; `heads`: what the output linear reads of it, if known."""
        self._inputs.update_(layer.normed(self._index, x).flatten(0, -2))
        self._heads.update_(layer.inner(self._index, x) if heads is None else heads)
        queries, keys = layer.queries_keys(self._index, x)
        self._queries.update_(queries)
        self._keys.update_(keys)

    def finish(self, workers: Workers) -> AttentionGrams:
        """Return the sums of all workers."""
        inputs, heads = (part.finish(workers).gram for part in (self._inputs, self._heads))
        return AttentionGrams(inputs, heads, self._queries.finish(workers), self._keys.finish(workers))


def query_key_weights(grams: AttentionGrams) -> torch.Tensor:
    """Return the weights of the rows of queries and keys together, float64 `((H + G)·h,)`."""
    queries, keys = (_pair_energies(part) for part in (grams.queries, grams.keys))
    per_group = len(queries) // len(keys)
    of_keys = queries.unflatten(0, (-1, per_group)).sum(1)
    return torch.cat((keys.repeat_interleave(per_group, 0), of_keys)).flatten()


def rank_errors(weight: torch.Tensor, gram: torch.Tensor, row_weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the share of the outputs' weighted energy that every rank loses, float64 `(min(m, n) + 1,)` on the host.

    Args:
        weight: `(m, n)`. gram: `H (n, n)` of its inputs. row_weights: `w (m,)`; None for equal ones.
    """
    _, energies, _ = _decompose(weight, gram, row_weights)
    lost = suffix_sums(energies[: min(weight.shape)].cpu())
    return lost / lost[0].clamp_min(torch.finfo(lost.dtype).tiny)


def of_rank(weight: torch.Tensor, gram: torch.Tensor, rank: int, row_weights: torch.Tensor | None = None) -> LowRank:
    """Return the nearest matrix of a rank, in the dtype of `weight`; arguments as in `rank_errors`.

    With the principal directions `P` of `diag(w)^½ W L`, `L Lᵀ = H`, it is `W L P Pᵀ L⁻¹`.
    """
    directions, _, root = _decompose(weight, gram, row_weights)
    directions = directions[:, :rank]
    outputs = weight.double() @ root @ directions
    inputs = torch.linalg.solve_triangular(root.T, directions, upper=True).T
    read, others, coefficients = spanning_columns(outputs.T)
    return LowRank(as_like(outputs[read] @ inputs, weight), as_like(coefficients.T, weight), torch.cat((read, others)))


def find_ranks(
    tensors: Tensors, attention: Attention, grams: AttentionGrams, query_key_rank: int | None, output_rank: int | None
) -> Ranks:
    """Return the linears of these ranks; None for whole ones."""
    queries_keys = output = None
    if query_key_rank is not None:
        together = torch.cat([tensors[f"{linear}.weight"] for linear in (attention.q, attention.k)])
        queries_keys = of_rank(together, grams.inputs, query_key_rank, query_key_weights(grams))
    if output_rank is not None:
        output = of_rank(tensors[f"{attention.out}.weight"], grams.heads, output_rank)
    return Ranks(queries_keys, output)


def with_ranks(tensors: Tensors, attention: Attention, ranks: Ranks) -> Tensors:
    """Return the layer whose whole linears have the smaller ranks."""
    changed = dict(tensors)
    if ranks.queries_keys is not None:
        names = [f"{linear}.weight" for linear in (attention.q, attention.k)]
        parts = ranks.queries_keys.whole().split([len(tensors[name]) for name in names])
        changed |= dict(zip(names, parts, strict=True))
    if ranks.output is not None:
        changed[f"{attention.out}.weight"] = ranks.output.whole()
    return changed


def fold_ranks(tensors: Tensors, attention: Attention, ranks: Ranks) -> Tensors:
    """Return the layer with linears of low rank in place of whole ones, as the per-layer form names them."""
    folded = dict(tensors)
    if ranks.queries_keys is not None:
        for linear in (attention.q, attention.k):
            del folded[f"{linear}.weight"]
        biases = [folded.pop(f"{linear}.bias") for linear in (attention.q, attention.k) if f"{linear}.bias" in folded]
        if biases:
            folded[f"{attention.queries_keys}.bias"] = torch.cat(biases)
        folded |= _stored(attention.queries_keys, ranks.queries_keys)
    if ranks.output is not None:
        del folded[f"{attention.out}.weight"]
        folded |= _stored(attention.out, ranks.output)
    return folded


def _stored(linear: str, low_rank: LowRank) -> Tensors:
    return {
        f"{linear}.read.weight": low_rank.read,
        f"{linear}.map.weight": low_rank.others,
        f"{linear}.map.columns": low_rank.order,
    }


def _pair_energies(grams: torch.Tensor) -> torch.Tensor:
    """Return the energy of every coordinate's rotary pair, halved, float64 `(heads, h)`; p and p + h/2 are a pair."""
    energies = grams.double().diagonal(dim1=1, dim2=2).unflatten(1, (2, -1)).sum(1) / 2
    return energies.repeat(1, 2)


def _decompose(
    weight: torch.Tensor, gram: torch.Tensor, row_weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the principal directions of `diag(w)^½ W L` and their energies, float64, and the root `L` of the Gram."""
    root, dense = damped_root(gram), weight.double()
    weighted = dense if row_weights is None else row_weights.unsqueeze(1) * dense
    inside = root.T @ (dense.T @ weighted) @ root
    directions = principal_directions(inside)
    return directions, energies_along(inside, directions), root
