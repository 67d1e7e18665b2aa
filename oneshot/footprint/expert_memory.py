"""Bytes that the experts of a mixture hold, beside what every layer holds."""

from oneshot.footprint import terms
from oneshot.footprint.terms import DOUBLE, FLOAT, Term
from oneshot.footprint.work import Work


def sums(work: Work, size: int, *, residual: bool) -> tuple[Term, ...]:
    """Return what the statistics of all experts are summed in, and the larger of what they are finished into."""
    _, grams, residuals = _numbers(work, size, residual=residual)
    while_grams = DOUBLE * (grams + residuals) + FLOAT * grams
    while_residuals = FLOAT * grams + (DOUBLE + FLOAT) * residuals
    panel = (FLOAT + DOUBLE) * size * max(size, residual * work.shape.hidden_size)
    return Term(max(while_grams, while_residuals), computed=True), Term(panel, computed=True)


def gram(work: Work, size: int, *, residual: bool) -> Term:
    """Return the finished statistics of all experts."""
    _, grams, residuals = _numbers(work, size, residual=residual)
    return Term(FLOAT * (grams + residuals), computed=True)


def solve(work: Work, size: int, kept: int, *, residual: bool) -> Term:
    """Return the larger of what neurons are chosen in and what one expert is corrected in, and all new downs."""
    count, grams, _ = _numbers(work, size, residual=residual)
    by_text = work.schedule.streams > 0
    choice = (FLOAT + DOUBLE) * grams * by_text + terms.pivoting(work, size, kept, work.method.ffn).bytes
    downs = work.stored_itemsize * count * kept * work.shape.hidden_size
    return Term(max(choice, terms.correction(work, size, kept, residual=residual).bytes) + downs, computed=True)


def _numbers(work: Work, size: int, *, residual: bool) -> tuple[int, int, int]:
    """Return the experts, and the numbers in all their Grams and residuals."""
    assert work.shape.experts is not None
    count = work.shape.experts.count
    return count, count * size * size, count * size * work.shape.hidden_size * residual
