"""Sets of experts whose removal together changes a mixture's output least: a quadratic form of 0 and 1."""

import torch

ROUNDING = 1e-12  # of the form's largest term, below which an exchange is no gain


def least_removal(effects: torch.Tensor, num_removed: int, *, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Return a set with the least `pᵀ R p` that was found, p being 1 for the experts of the set.

    There are two greedy starts: one adds experts to an empty set, one takes experts out of the set of all candidates.
    In each, an expert of the set is exchanged for one outside, always the pair with the largest gain, until no exchange
    is a gain. The better end is returned. This is exact for one removed expert, for one candidate that stays, and for
    a diagonal R. Otherwise the set is a local optimum.

    Args:
        effects: R `(E, E)`, symmetric and positive semidefinite: `R_ij = Σ ⟨r_i, r_j⟩` over tokens, `r_e` being
            the change of the output if expert e is removed alone.
        kept: bool `(E,)`, experts that are not candidates; or None.

    Returns:
        The experts of the set, int64 `(num_removed,)`, ascending.

    Raises:
        ValueError: if there are fewer candidates than `num_removed`, or R is not finite.

    Cost: about `num_removed (E − num_removed)` operations an exchange.
    """
    form = effects.double().cpu()
    candidates = torch.ones(len(form), dtype=torch.bool) if kept is None else ~kept.cpu()
    if not 0 <= num_removed <= int(candidates.sum()):
        raise ValueError(f"{num_removed} experts cannot be removed from {int(candidates.sum())} candidates")
    if not form.isfinite().all():
        raise ValueError("the effects of experts are not finite")
    form = (form + form.mT) / 2
    ends = [
        _exchanged(form, start, candidates)
        for start in (_added(form, candidates, num_removed), _left(form, candidates, num_removed))
    ]
    return min(ends, key=lambda inside: float(form[inside][:, inside].sum())).nonzero().flatten()


def removal_order(effects: torch.Tensor, *, kept: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all experts in the order in which they go, and what every set of the first ones changes.

    The next expert is always the one with the least increase of `pᵀ R p`, so sets contain each other, as those that a
    server cuts from a list. `least_removal` finds better ones for a single size.

    Args:
        effects, kept: as in `least_removal`; experts that are `kept` go last.

    Returns:
        The experts, int64 `(E,)`, and float64 `(E,)`: `pᵀ R p` of the set that ends with each.

    Raises:
        ValueError: if R is not finite.
    """
    form = effects.double().cpu()
    if not form.isfinite().all():
        raise ValueError("the effects of experts are not finite")
    form = (form + form.mT) / 2
    last = torch.zeros(len(form), dtype=torch.bool) if kept is None else kept.cpu()
    inside, order, changes = torch.zeros_like(last), list[int](), list[float]()
    while len(order) < len(form):
        candidates = ~inside & ~last
        increase = form.diagonal() + 2 * form[:, inside].sum(1)
        order.append(_least(increase, candidates if candidates.any() else ~inside))
        inside[order[-1]] = True
        changes.append(float(form[inside][:, inside].sum()))
    return torch.tensor(order), torch.tensor(changes, dtype=torch.float64)


def _added(form: torch.Tensor, candidates: torch.Tensor, size: int) -> torch.Tensor:
    """Return a set, bool `(E,)`, to which the expert with the least increase is added each time."""
    inside = torch.zeros_like(candidates)
    for _ in range(size):
        increase = form.diagonal() + 2 * form[:, inside].sum(1)
        inside[_least(increase, candidates & ~inside)] = True
    return inside


def _left(form: torch.Tensor, candidates: torch.Tensor, size: int) -> torch.Tensor:
    """Return a set, bool `(E,)`, from all candidates: the expert that adds most is taken out each time."""
    inside = candidates.clone()
    while int(inside.sum()) > size:
        added = 2 * form[:, inside].sum(1) - form.diagonal()
        inside[_least(-added, inside)] = False
    return inside


def _exchanged(form: torch.Tensor, inside: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Return the set after all exchanges that are gains."""
    least_gain = ROUNDING * float(form.abs().max())
    while (pair := _best_exchange(form, inside, candidates & ~inside, least_gain)) is not None:
        leaves, enters = pair
        inside = inside.clone()
        inside[leaves], inside[enters] = False, True
    return inside


def _best_exchange(
    form: torch.Tensor, inside: torch.Tensor, outside: torch.Tensor, least_gain: float
) -> tuple[int, int] | None:
    """Return who leaves and who enters the set in the exchange with the largest gain, or None if none is a gain."""
    leaving, entering = inside.nonzero().flatten(), outside.nonzero().flatten()
    if not len(leaving) or not len(entering):
        return None
    products, diagonal = form[:, inside].sum(1), form.diagonal()
    saved = 2 * products[leaving] - diagonal[leaving]
    added = 2 * products[entering] + diagonal[entering]
    gains = saved[:, None] - added + 2 * form[leaving][:, entering]
    best = int(gains.argmax())
    if float(gains.flatten()[best]) <= least_gain:
        return None
    return int(leaving[best // len(entering)]), int(entering[best % len(entering)])


def _least(values: torch.Tensor, among: torch.Tensor) -> int:
    return int(torch.where(among, values, torch.inf).argmin())
