"""Smaller heads: fewer coordinates of queries and keys together, and of values.

Everything is computed with full heads that give the results of smaller ones; `fold_inner` writes the smaller ones.
"""

from dataclasses import dataclass

import torch
from oneshot_kernels import suffix_sums

from oneshot.architecture import Attention
from oneshot.linalg.low_rank import (
    product_energies,
    query_key_maps,
    rotary_pair_energies,
    strongest_rotary_pairs,
    value_subspace,
)
from oneshot.linalg.psd import RidgeFactor
from oneshot.tensors import Tensors

Maps = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class InnerMaps:
    """Maps from full to smaller queries, keys and values, head by head; None if they stay full.

    Attributes:
        queries, keys: `(H, k, h)` and `(G, k, h)`: `q' = M q` and `k' = M k`. Rows of the identity if whole rotary
            pairs are kept.
        values: `(G, h, v)` with orthonormal columns: `v' = v Q`.
        rotary_pairs: int64 `(G, k / 2)`: the pairs that each KV group keeps.
        heads: the query heads that these maps are of, in a layer that still has all; None if it has only these.
    """

    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    rotary_pairs: torch.Tensor | None = None
    heads: torch.Tensor | None = None


def keep_heads(maps: InnerMaps, heads: torch.Tensor, heads_per_group: int) -> InnerMaps:
    """Return the maps of the query heads `heads` (ascending) and of their KV groups."""
    groups = (heads // heads_per_group).unique()
    return InnerMaps(
        queries=None if maps.queries is None else maps.queries[heads],
        keys=None if maps.keys is None else maps.keys[groups],
        values=None if maps.values is None else maps.values[groups],
        rotary_pairs=None if maps.rotary_pairs is None else maps.rotary_pairs[groups],
    )


def fold_inner(tensors: Tensors, attention: Attention, maps: InnerMaps) -> Tensors:
    """Return the linears of smaller heads for a layer whose full heads compute the same (SP3 equations 13, 15, 16).

    The writer must ignore what is outside the values' subspaces. Its columns are rewritten for the inner coordinates.
    """
    folded = dict(tensors)
    for linear, maps_of_heads in ((attention.q, maps.queries), (attention.k, maps.keys)):
        if maps_of_heads is not None:
            _map_rows_(folded, linear, maps_of_heads)
    if maps.values is not None:
        _map_rows_(folded, attention.v, maps.values.mT)
        weight = tensors[f"{attention.out}.weight"]
        groups, head_dim, _ = maps.values.shape
        heads = weight.shape[1] // head_dim
        basis = maps.values.repeat_interleave(heads // groups, dim=0)
        per_head = weight.to(basis).view(len(weight), heads, head_dim)
        folded[f"{attention.out}.weight"] = torch.einsum("dhi,hij->dhj", per_head, basis).flatten(1).to(weight)
    if maps.rotary_pairs is not None:
        folded[attention.rotary_pairs] = maps.rotary_pairs
    return folded


def _map_rows_(tensors: Tensors, linear: str, maps: torch.Tensor) -> None:
    """Replace the rows of each head, `W_h <- M_h W_h`, for maps `(heads, k, h)`; also the bias."""
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in tensors:
            rows = tensors[name]
            per_head = rows.to(maps).view(maps.shape[0], maps.shape[2], -1)
            tensors[name] = (maps @ per_head).reshape(-1, *rows.shape[1:]).to(rows)


def with_smaller_scores(
    tensors: Tensors, attention: Attention, heads_per_group: int, maps: Maps
) -> tuple[Tensors, InnerMaps]:
    """Return a layer whose full queries and keys give the scores of the smaller ones, and the maps to those.

    Args:
        maps: the result of `query_key_subspaces`.
    """
    query_maps, key_maps, pairs = maps
    # Full queries M⁺ M q and keys Mᵀ N k have the scores (N k)ᵀ (M q); M and (M⁺)ᵀ take them to the smaller ones.
    inverses = torch.linalg.pinv(query_maps)
    group_of_head = slice(None, None, heads_per_group)
    full = InnerMaps(queries=inverses @ query_maps, keys=query_maps[group_of_head].mT @ key_maps)
    smaller = InnerMaps(query_maps, inverses[group_of_head].mT, rotary_pairs=pairs)
    return fold_inner(tensors, attention, full), smaller


def value_subspaces(
    weight: torch.Tensor,
    gram: torch.Tensor,
    *,
    num_groups: int,
    head_dim: int,
    size: int,
    correct: bool,
    damping: float,
    value_grams: torch.Tensor | None = None,
    weighted: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a subspace of `size` value coordinates for every KV group, and the writer restricted to it.

    A group's subspace is the best one for its pooled heads (`linalg.low_rank.value_subspace`): by default of their
    outputs as the writer sees them (DA-WID equation 9). `value_grams` replaces the outputs by the values (TCSP equation
    27), and without `weighted` the writer does not count (DA-WID equation 21; with both SP3 equation 10). Then least
    squares over all heads at once solve `min ‖Z Wᵀ − Z Q W'ᵀ‖² + λ‖W' − W Eᵀ‖²`, with λ as in `correction.correct`.

    Args:
        weight: the writer's weight `(D, H·h)`. gram: `ZᵀZ (H·h, H·h)` of its inputs. correct: solve, or keep `W Eᵀ`.
        value_grams: `VᵀV (G, h, h)` of the values of every group; None for the heads' outputs.

    Returns:
        `Q (G, h, size)` float64 with orthonormal columns, and `W' Qᵀ (D, H·h)` float64.
    """
    num_heads = weight.shape[1] // head_dim
    heads_per_group = num_heads // num_groups
    dense, full = weight.double(), gram.double()
    bases, embeddings = [], []
    for group in range(num_groups):
        columns = [
            slice(head * head_dim, (head + 1) * head_dim)
            for head in range(group * heads_per_group, (group + 1) * heads_per_group)
        ]
        pooled = torch.stack([full[part, part] for part in columns]).sum(0)
        output = torch.stack([dense[:, part].T @ dense[:, part] for part in columns]).sum(0)
        if value_grams is not None:
            pooled = value_grams[group].double()
        if not weighted:
            output = torch.eye(head_dim).to(output)
        basis, embedding = value_subspace(pooled, output, size)
        bases.append(basis)
        embeddings.append(embedding)
    inside = torch.block_diag(*(basis for basis in bases for _ in range(heads_per_group)))
    outside = torch.block_diag(*(embedding for embedding in embeddings for _ in range(heads_per_group)))
    inner = dense @ outside.T
    if correct:
        crossed = inside.T @ full
        factor = RidgeFactor(crossed @ inside, damping, "smaller values")
        inner = inner + factor.solve(crossed @ (dense.T - inside @ inner.T)).T
    return torch.stack(bases), inner @ inside.T


def query_key_subspaces(
    query_grams: torch.Tensor, key_grams: torch.Tensor, *, size: int, rotary: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return maps of queries and keys to `size` coordinates per head that give nearly the same scores.

    With rotary positions whole pairs are kept, the same in all query heads of a group, because nothing else commutes
    with the rotation. Without them the maps are arbitrary, for one query head per group.

    Args:
        query_grams: `(H, h, h)`, key_grams: `(G, h, h)`: sums over the tokens of `q qᵀ` and `k kᵀ`, before rotation.

    Returns:
        `M (H, size, h)` and `N (G, size, h)` float64 with scores `(N k)ᵀ (M q)`, and the kept pairs `(G, size / 2)`.
    """
    num_groups, head_dim = key_grams.shape[:2]
    heads_per_group = len(query_grams) // num_groups
    if rotary:
        identity = torch.eye(head_dim, dtype=torch.float64, device=query_grams.device)
        energies = query_grams.diagonal(dim1=1, dim2=2).double().view(num_groups, heads_per_group, head_dim)
        pairs = torch.stack(
            [
                strongest_rotary_pairs(energies[group], key_grams[group].diagonal().double(), size // 2)
                for group in range(num_groups)
            ]
        )
        rows = torch.cat((pairs, pairs + head_dim // 2), dim=1)
        return identity[rows].repeat_interleave(heads_per_group, dim=0), identity[rows], pairs
    maps = [query_key_maps(query, key, size) for query, key in zip(query_grams, key_grams, strict=True)]
    return torch.stack([query for query, _ in maps]), torch.stack([key for _, key in maps]), None


def value_errors(weight: torch.Tensor, gram: torch.Tensor, *, num_groups: int, head_dim: int) -> torch.Tensor:
    """Return the share of the output's energy that every size of values loses, falling, float64 `(h + 1,)`.

    It is the error of `value_subspaces` before least squares, summed over the KV groups as if these were independent.

    Args:
        weight: the writer's weight `(D, H·h)`. gram: `ZᵀZ (H·h, H·h)` of its inputs.
    """
    heads = torch.arange(gram.shape[0], device=gram.device).view(num_groups, -1, head_dim)
    pooled = [gram[columns.unsqueeze(2), columns.unsqueeze(1)].double().sum(0) for columns in heads]
    outputs = [torch.einsum("dai,daj->ij", part, part) for part in (weight.double()[:, columns] for columns in heads)]
    energies = [product_energies(gram_of, output) for gram_of, output in zip(pooled, outputs, strict=True)]
    return _left_over(torch.stack(energies).sum(0))


def query_key_errors(query_grams: torch.Tensor, key_grams: torch.Tensor, *, rotary: bool) -> torch.Tensor:
    """Return the share of the squared scores that every size of queries and keys loses, falling, float64 `(h + 1,)`.

    Without rotary positions it is the error of the best maps, with them the energy of the pairs that go; an odd size
    keeps the pairs of the even one below it.

    Args:
        query_grams, key_grams: as in `query_key_subspaces`.
    """
    num_groups = len(key_grams)
    if not rotary:
        pairs = zip(query_grams, key_grams, strict=True)
        return _left_over(torch.stack([product_energies(query, key) for query, key in pairs]).sum(0))
    queries = query_grams.diagonal(dim1=1, dim2=2).double().unflatten(0, (num_groups, -1))
    keys = key_grams.diagonal(dim1=1, dim2=2).double()
    energies = [rotary_pair_energies(query, key) for query, key in zip(queries, keys, strict=True)]
    errors = _left_over(torch.stack([energy.sort(descending=True).values for energy in energies]).sum(0))
    return errors.repeat_interleave(2)[:-1]


def _left_over(energies: torch.Tensor) -> torch.Tensor:
    """Return the share of the energies `(n,)` after the first k, for every k, float64 `(n + 1,)` on the host."""
    beyond = suffix_sums(energies.cpu())
    return beyond / beyond[0].clamp_min(torch.finfo(torch.float64).tiny)
