"""Sums over batches that do not depend on which process has which batch.

Each batch gives a float32 number for every entry, and float64 adds them up. Such a number has 24 significant bits, and
float64 has 53. So a sum of N of them is exact, in any order, if all non-zero ones are within a factor of
2^(28 − log2 N) of each other: four million for 64 batches. Other entries are right to the last bit of float64, and
`as_float32` rounds nearly all of them alike: one differs with a probability of about N · 2^−29.
"""

import torch
from oneshot_kernels import cross_gram_, sketch_

from oneshot.linalg.products import linear, mkl_is_narrow

PANEL_WIDTH = 256  # columns of a Gram whose products are made at once
DEVICE_PANEL_WIDTH = 1024  # enough tiles for every multiprocessor
TOKENS_TRANSPOSED = 1024  # at once, where oneDNN multiplies


def add_gram_(total: torch.Tensor, rows: torch.Tensor) -> None:
    """Add a batch's `rowsᵀ rows` to what is on and above the diagonal of `total (n, n)` float64.

    What is below the diagonal is undefined; `finished_gram` completes the sum.

    Args:
        rows: `(m, n)`, any float dtype. Products are float32.

    Cost: about m n² / 2 multiply-adds, and one pass over `total`; memory for a panel of `n` numbers of float32 times
    `PANEL_WIDTH`. Where oneDNN multiplies: for columns of `TOKENS_TRANSPOSED` rows, and for a square of the width.
    """
    _add_panels_(total, rows, None)


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a batch's `leftᵀ right` to `total (n, p)` float64; otherwise as `add_gram_`.

    Args:
        left: `(m, n)`. right: `(m, p)`.
    """
    if left.dtype != right.dtype:
        left, right = left.float(), right.float()
    _add_panels_(total, left, right)


def add_grams_(totals: torch.Tensor, rows: torch.Tensor) -> None:
    """Add to each of `totals (k, n, n)` what `add_gram_` adds for its rows `(k, m, n)`; a device does all at once."""
    if not totals.is_cuda:
        for total, own in zip(totals, rows, strict=True):
            add_gram_(total, own)
        return
    rows = _as_factors(rows)
    for start, stop in panels(totals[0]):
        totals[:, start:stop, start:].add_(_float32_products(rows[..., start:stop], rows[..., start:]))


def add_products_(totals: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add to several totals `(k, n, p)` what `add_product_` adds to one; otherwise as `add_grams_`."""
    if not totals.is_cuda:
        for total, *factors in zip(totals, left, right, strict=True):
            add_product_(total, *factors)
        return
    if left.dtype != right.dtype:
        left, right = left.float(), right.float()
    left, right = _as_factors(left), _as_factors(right)
    for start, stop in panels(totals[0]):
        totals[:, start:stop].add_(_float32_products(left[..., start:stop], right))


def add_sketch_(total: torch.Tensor, rows: torch.Tensor, *, row_offset: int, seed: int, nonzeros: int) -> None:
    """Add a batch's `S rows` to `total (s, n)` float64, by panels of columns; arguments as in `sketch_`."""
    for start, stop in panels(total.mT):
        part = torch.zeros(len(total), stop - start, device=total.device)
        total[:, start:stop] += sketch_(part, rows[:, start:stop], row_offset=row_offset, seed=seed, nonzeros=nonzeros)


def as_float32(total: torch.Tensor) -> torch.Tensor:
    """Return a sum rounded to float32: also where the order of batches changed its last bit, nearly always the same."""
    return total.float()


def finished_gram(total: torch.Tensor) -> torch.Tensor:
    """Return a sum of `add_gram_` rounded to float32, both triangles `(n, n)`."""
    gram = as_float32(total)
    for start, stop in panels(gram):
        gram[stop:, start:stop] = gram[start:stop, stop:].mT
    return gram


def panels(total: torch.Tensor) -> list[tuple[int, int]]:
    """Return the (first, last + 1) rows of `total` whose products are made at once."""
    width = DEVICE_PANEL_WIDTH if total.is_cuda else PANEL_WIDTH
    return [(start, min(start + width, len(total))) for start in range(0, len(total), width)]


def _as_factors(rows: torch.Tensor) -> torch.Tensor:
    """Return rows in float32; a device multiplies bfloat16 and float16 as they are, with float32 sums."""
    return rows if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16) else rows.float()


def _float32_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `leftᵀ right` in float32 for each of several factors on a device."""
    if left.dtype == torch.float32:
        return left.mT @ right
    return torch.bmm(left.mT, right, out_dtype=torch.float32)


def _add_panels_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor | None) -> None:
    """Add `leftᵀ right` by panels; without `right`, `leftᵀ left` on and above the diagonal."""
    places = [(start, stop, start if right is None else 0) for start, stop in panels(total)]
    if left.device.type == "cpu" and mkl_is_narrow():
        for at in range(0, len(left), TOKENS_TRANSPOSED):
            columns = _columns(left[at : at + TOKENS_TRANSPOSED])
            others = columns if right is None else _columns(right[at : at + TOKENS_TRANSPOSED])
            for start, stop, first in places:
                _add_tiles_(total[start:stop, first:], columns[start:stop], others[first:])
        return
    left = _as_factors(left)
    factors = left if right is None else _as_factors(right)
    for start, stop, first in places:
        panel = total[start:stop, first:]
        panel += cross_gram_(torch.zeros(panel.shape, device=panel.device), left[:, start:stop], factors[:, first:])


def _columns(rows: torch.Tensor) -> torch.Tensor:
    """Return rows `(m, n)` as columns `(n, m)` in float32, one after the other in memory."""
    return rows.mT.contiguous().float()


def _add_tiles_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left (n, m) @ rightᵀ (m, p)` to `total`, by tiles of few shapes: oneDNN keeps a product for every shape."""
    for start, stop in panels(right):
        total[:, start:stop] += linear(left, right[start:stop])
