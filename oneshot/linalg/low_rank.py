"""Low rank from Grams: for a linear, for the values of heads, and for queries and keys together."""

import torch

from oneshot.linalg.psd import ridged_cholesky

ROOT_DAMPING = 1e-4  # in units of the Gram's mean diagonal; no direction of the inputs may be free


def value_subspace(gram: torch.Tensor, output_gram: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `Q (h, size)` with orthonormal columns and `E (size, h)`: `z ≈ z Q E` as the output linear sees it.

    `Q E` is the matrix M of that rank with the smallest `‖Z (I − M) W‖_F` (SP3 equation 10; TCSP equation 27; DA-WID
    equation 9, whose features are weighted by the softmax as `Z` is): with the singular vectors `U` of
    `(ZᵀZ)^½ (W Wᵀ)^½`, `M = (ZᵀZ)^-½ U Uᵀ (ZᵀZ)^½`.

    Args:
        gram: `ZᵀZ (h, h)`. output_gram: `W Wᵀ (h, h)` of the part of `o_proj` that reads the head, `W (h, D)`.
    """
    root, inverse_root = roots(gram)
    output_root, _ = roots(output_gram)
    left = torch.linalg.svd(root @ output_root).U[:, :size]
    orthonormal, triangular = torch.linalg.qr(inverse_root @ left)
    return orthonormal, triangular @ left.T @ root


def product_energies(left_gram: torch.Tensor, right_gram: torch.Tensor) -> torch.Tensor:
    """Return the squared singular values of `A Bᵀ`, falling, float64 `(h,)`, from `AᵀA` and `BᵀB (h, h)`.

    What is beyond the first k is the squared error of `value_subspace` and `query_key_maps` at rank k (Eckart and
    Young 1936).
    """
    return torch.linalg.svdvals(roots(left_gram)[0] @ roots(right_gram)[0]).square()


def query_key_maps(query_gram: torch.Tensor, key_gram: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(M_q, M_k)`, each `(size, h)`: `(M_k k)ᵀ (M_q q)` best approximates `kᵀ q` at that rank.

    The smallest `‖K (I − M_kᵀ M_q) Qᵀ‖_F` over all queries and keys (DRONE; TCSP equation 26; SP3 equations 11, 12).
    Does not commute with rotary positions.

    Args:
        query_gram, key_gram: `QᵀQ` and `KᵀK (h, h)`.
    """
    query_root, query_inverse = roots(query_gram)
    key_root, key_inverse = roots(key_gram)
    left, values, right = torch.linalg.svd(key_root @ query_root)
    scale = values[:size].sqrt().unsqueeze(1)
    return scale * (right[:size] @ query_inverse), scale * (left[:, :size].T @ key_inverse)


def strongest_rotary_pairs(query_energy: torch.Tensor, key_energy: torch.Tensor, num_pairs: int) -> torch.Tensor:
    """Return the rotary pairs of one KV group with the largest part in its scores, ascending int64 `(num_pairs,)`.

    Args:
        query_energy, key_energy: as in `rotary_pair_energies`.
    """
    return rotary_pair_energies(query_energy, key_energy).topk(num_pairs).indices.sort().values


def rotary_pair_energies(query_energy: torch.Tensor, key_energy: torch.Tensor) -> torch.Tensor:
    """Return the part of every rotary pair in the squared scores of one KV group, `(h / 2,)`.

    Rotation keeps the energy of a pair, so a pair's score is the sum over the group's query heads of
    `E‖q_pair‖² E‖k_pair‖²`: what its removal takes from the squared scores where queries and keys are independent.

    Args:
        query_energy: `(heads, h)` mean squares, pair p at p and p + h/2. key_energy: `(h,)`.
    """
    halves = query_energy.shape[1] // 2
    queries = query_energy[:, :halves] + query_energy[:, halves:]
    keys = key_energy[:halves] + key_energy[halves:]
    return queries.sum(0) * keys


def damped_root(gram: torch.Tensor, of: str) -> torch.Tensor:
    """Return the lower Cholesky factor `L` of the damped Gram of a linear's inputs, `L Lᵀ ≈ H`, float64.

    Args:
        gram: `H (n, n)`. of: what the inputs are, in words.
    """
    floor = torch.finfo(torch.float32).tiny  # the inputs may all be zero
    found = ridged_cholesky(gram, ROOT_DAMPING, of=of, floor=floor)
    assert found is not None  # there is a ridge
    return found[0]


def roots(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `G^½` and its inverse in float64; directions below rounding count as rounding."""
    values, vectors = torch.linalg.eigh(gram.double())
    floor = values[-1].clamp_min(torch.finfo(values.dtype).tiny) * len(gram) * torch.finfo(torch.float32).eps
    roots = values.clamp_min(floor).sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T
