"""Bytes that the experts of a mixture hold, beside what every layer holds."""

from oneshot.compression.expert_removal import TOKENS_TOGETHER
from oneshot.footprint import terms
from oneshot.footprint.terms import DOUBLE, FLOAT, Term
from oneshot.footprint.work import Work

LOST = 3  # residuals of a batch: of the layer, towards the dense stream, and their sum


def sums(work: Work, size: int, *, residual: bool) -> tuple[Term, ...]:
    """Return what the statistics of all experts are summed in, and the larger of what they are finished into."""
    _, grams, residuals = _numbers(work, size, residual=residual)
    while_grams = DOUBLE * (grams + residuals) + FLOAT * grams
    while_residuals = FLOAT * grams + (DOUBLE + FLOAT) * residuals
    panel = (FLOAT + DOUBLE) * size * max(size, residual * work.shape.hidden_size)
    of_shared = terms.sums(work, _shared(work, size), residual=residual)
    return Term(max(while_grams, while_residuals), computed=True), Term(panel, computed=True), *of_shared


def effects(work: Work) -> Term:
    """Return what the effects of experts on the outputs of some tokens are summed from, and their sums."""
    experts, hidden = work.shape.experts, work.shape.hidden_size
    assert experts is not None
    tokens, chosen = min(work.batch_tokens, TOKENS_TOGETHER), experts.per_token + 1
    outputs = FLOAT * chosen * (4 * hidden + 3 * experts.count) + DOUBLE * (4 * chosen**2 + 4 * experts.count)
    neurons = work.dtype.itemsize * (4 * work.shape.intermediate_size + 2 * hidden)
    return Term(tokens * (outputs + neurons) + 2 * DOUBLE * experts.count**2, computed=True)


def gram(work: Work, size: int, *, residual: bool) -> Term:
    """Return the finished statistics of all experts."""
    _, grams, residuals = _numbers(work, size, residual=residual)
    of_shared = terms.gram(work, _shared(work, size), residual=residual).bytes
    return Term(FLOAT * (grams + residuals) + of_shared, computed=True)


def solve(work: Work, size: int, kept: int, *, residual: bool) -> Term:
    """Return the larger of what neurons are chosen in and what one expert is corrected in, and all new downs."""
    count, grams, _ = _numbers(work, size, residual=residual)
    by_text = work.schedule.streams > 0
    choice = (FLOAT + DOUBLE) * grams * by_text + terms.choice(work, size, kept, work.method.ffn).bytes
    downs = work.stored_itemsize * count * kept * work.shape.hidden_size
    shared, kept_shared = _shared(work, size), _shared(work, kept)
    solved = (
        terms.correction(work, size, kept, residual=residual).bytes,
        terms.choice(work, shared, kept_shared, work.method.ffn).bytes,
        terms.correction(work, shared, kept_shared, residual=residual).bytes,
    )
    return Term(max(choice, *solved) + downs, computed=True)


def _shared(work: Work, width: int) -> int:
    """Return the width of a shared expert that shrinks with the others, beside routed ones of this width."""
    assert work.shape.experts is not None
    return work.shape.experts.shared_count * width


def _numbers(work: Work, size: int, *, residual: bool) -> tuple[int, int, int]:
    """Return the experts, and the numbers in all their Grams and residuals."""
    assert work.shape.experts is not None
    count = work.shape.experts.count
    return count, count * size * size, count * size * work.shape.hidden_size * residual
