"""Bytes that the experts of a mixture hold, beside what every layer holds."""

import math
from dataclasses import replace

from oneshot.compression.expert_correction import solved_together
from oneshot.compression.expert_removal import TOKENS_TOGETHER
from oneshot.footprint import terms
from oneshot.footprint.terms import DOUBLE, FLOAT, Term, computed
from oneshot.footprint.work import Work
from oneshot.stream import EXPERTS_TOGETHER

COPIES_OF_DOWNS, COPIES_OF_GRAMS = 6, 4  # while experts are corrected together
COPIES_BEHIND_NORMS = 4  # of the effects of experts, which pass two norms
LOST = 3  # residuals of a batch: of the layer, towards the dense stream, and their sum


def measures(work: Work) -> bool:
    """Return whether experts that stay are measured: to choose their neurons, or to correct them."""
    method, loses = work.method, work.schedule.removes_experts
    return work.schedule.streams > 0 and (method.reduces_ffn or (loses and method.solves))


def profiles(work: Work) -> bool:
    """Return whether a profile measures the neurons of experts."""
    return work.shape.experts is not None and "ffn" in work.schedule.profiled_kinds


def as_profiled(work: Work) -> Work:
    """Return the work as a profile sees it: no expert is gone."""
    return replace(work, plan=None)


def group_sizes(work: Work) -> list[int | None]:
    """Return how many experts' statistics may be held together, the most first; None: all, or there are none.

    They are not more than `work.machine.experts_together`.
    """
    if work.shape.experts is None or not (measures(work) or profiles(work)):
        return [None]
    count, most = _count(as_profiled(work) if profiles(work) else work), work.machine.experts_together
    sizes = sorted({math.ceil(count / groups) for groups in range(1, count + 1)}, reverse=True)
    return [None if size == count else size for size in sizes if most is None or size <= most]


def num_groups(work: Work) -> int:
    """Return how many groups of experts are measured one after the other."""
    together = work.machine.experts_together
    return 1 if together is None else math.ceil(_count(work) / together)


def sums(work: Work, size: int, *, residual: bool) -> tuple[Term, ...]:
    """Return what a group's statistics are summed in, and the larger of what they are finished into."""
    grams, residuals = _numbers(work, size, residual=residual)
    while_grams = DOUBLE * (grams + residuals) + FLOAT * grams
    while_residuals = FLOAT * grams + (DOUBLE + FLOAT) * residuals
    products = size * max(size, residual * work.shape.hidden_size)
    at_once = min(EXPERTS_TOGETHER, work.machine.experts_together or _count(work))
    panel = (FLOAT * at_once if work.on_cuda else FLOAT + DOUBLE) * products
    of_shared = terms.sums(work, _shared(work, size), residual=residual)
    return computed(max(while_grams, while_residuals)), computed(panel), *of_shared


def effects(work: Work) -> Term:
    """Return what the effects of experts on the outputs of some tokens are summed from, and their sums."""
    experts, hidden = work.shape.experts, work.shape.hidden_size
    assert experts is not None
    tokens, chosen = min(work.batch_tokens, TOKENS_TOGETHER), experts.per_token + 1
    outputs = FLOAT * chosen * (4 * hidden + 3 * experts.count) + DOUBLE * (4 * chosen**2 + 4 * experts.count)
    outputs += FLOAT * _has_norms(work) * COPIES_BEHIND_NORMS * chosen * hidden
    neurons = work.dtype.itemsize * (4 * work.shape.intermediate_size + 2 * hidden)
    return computed(tokens * (outputs + neurons) + 2 * DOUBLE * experts.count**2)


def gram(work: Work, size: int, *, residual: bool) -> Term:
    """Return the finished statistics of a group of experts."""
    grams, residuals = _numbers(work, size, residual=residual)
    of_shared = terms.gram(work, _shared(work, size), residual=residual).bytes
    return computed(FLOAT * (grams + residuals) + of_shared)


def downs(work: Work, kept: int) -> Term:
    """Return the new downs of the experts."""
    return computed(work.stored_itemsize * _count(work) * kept * work.shape.hidden_size)


def solved(work: Work, kept: int) -> Term:
    """Return the new downs of the groups of experts that are solved, which are joined in the end."""
    return computed((num_groups(work) > 1) * downs(work, kept).bytes)


def solve(work: Work, size: int, kept: int, *, residual: bool) -> Term:
    """Return the larger of what neurons are chosen in and what experts are corrected in, and all new downs."""
    grams, _ = _numbers(work, size, residual=residual)
    by_text = work.schedule.streams > 0
    choice = (FLOAT + DOUBLE) * grams * by_text + terms.choice(work, size, kept, work.method.ffn).bytes
    shared, kept_shared = _shared(work, size), _shared(work, kept)
    corrected = (
        terms.correction(work, size, kept, residual=residual).bytes,
        terms.choice(work, shared, kept_shared, work.method.ffn).bytes,
        terms.correction(work, shared, kept_shared, residual=residual).bytes,
    )
    seen = _seen_downs(work, size)
    return computed(max(choice + seen, *corrected, _together(work, size)) + downs(work, kept).bytes)


def _together(work: Work, size: int) -> int:
    """Return the bytes in which several experts are corrected at once: copies of their downs, and of their Grams."""
    hidden = work.shape.hidden_size
    together = solved_together(size, hidden, work.device)
    return (together > 1) * together * DOUBLE * size * (COPIES_OF_DOWNS * hidden + COPIES_OF_GRAMS * size)


def curves(work: Work, size: int) -> Term:
    """Return what the error curves of all experts are made of: their weighted Grams, and the factor of one."""
    grams, _ = _numbers(work, size, residual=False)
    largest = max(size, _shared(work, size))
    factors = (FLOAT + DOUBLE) * 2 * largest**2 + 3 * DOUBLE * work.shape.hidden_size * largest
    seen = _seen_downs(work, size)
    return computed((FLOAT + DOUBLE) * grams + factors + seen + terms.neuron_gram(work, largest).bytes)


def share_outside(work: Work) -> float:
    """Return the share of a layer's parameters that is not in its FFN or its routed experts."""
    shape = work.shape
    in_experts = shape.ffns_per_layer * (2 + shape.gated) * shape.intermediate_size * shape.hidden_size
    return 1 - in_experts / shape.layer_parameters()


def _has_norms(work: Work) -> bool:
    """Return whether norms follow the experts."""
    mixture = work.grid.family.stack.experts
    return mixture is not None and mixture.branches is not None


def _seen_downs(work: Work, size: int) -> int:
    """Return the bytes of a group's downs behind norms that may follow the experts, which neurons are chosen by."""
    return FLOAT * _has_norms(work) * _numbers(work, size, residual=True)[1]


def _shared(work: Work, width: int) -> int:
    """Return the width of a shared expert that shrinks with the others, beside routed ones of this width."""
    assert work.shape.experts is not None
    return work.shape.experts.shared_count * width


def _numbers(work: Work, size: int, *, residual: bool) -> tuple[int, int]:
    """Return the numbers in the Grams and in the residuals of the experts of a group."""
    together = min(work.machine.experts_together or _count(work), _count(work))
    return together * size * size, together * size * work.shape.hidden_size * residual


def _count(work: Work) -> int:
    """Return the experts that stay."""
    experts = work.shape.experts
    assert experts is not None
    if work.plan is None or work.method.plans_experts:  # any layer may keep all
        return experts.count
    return max(experts.count if layer.num_experts is None else layer.num_experts for layer in work.plan.layers)
