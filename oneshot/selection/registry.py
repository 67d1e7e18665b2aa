"""The selectors by name, and their use for neurons and heads.

To add one: a file with a class that has the methods of `Selector`, or a function of a score; an entry of `SELECTORS`;
and its name in `method.SelectorName`, which the command line offers.
"""

import torch

from oneshot.method import SelectorName
from oneshot.selection import scores
from oneshot.selection.elimination import Elimination
from oneshot.selection.evidence import Evidence
from oneshot.selection.pivots import Pivots
from oneshot.selection.scores import ByScore
from oneshot.selection.selector import Blocks, Need, Selector

SELECTORS: dict[str, Selector] = {
    "id": Pivots(),
    "obs": Elimination(),
    "activation-norm": ByScore(scores.activation_norm),
    "wanda": ByScore(scores.wanda),
    "flap": ByScore(scores.flap, frozenset({"moments"})),
    "tcsp-score": ByScore(scores.tcsp_score, frozenset({"moments"})),
    "magnitude": ByScore(scores.magnitude, frozenset({"producers"})),
    "random": ByScore(scores.random, frozenset()),
}


def find_selector(name: SelectorName) -> Selector | None:
    """Return the selector of a name; None for `none`."""
    return None if name == "none" else SELECTORS[name]


def needs_of(name: SelectorName) -> frozenset[Need]:
    """Return the evidence that a selector needs."""
    selector = find_selector(name)
    return frozenset() if selector is None else selector.needs


def reads_activations(name: SelectorName) -> bool:
    """Return whether a selector needs the calibration text. Raises as `find_selector`."""
    return not needs_of(name) <= {"producers"}


def select_heads(
    name: SelectorName,
    evidence: Evidence,
    *,
    num_groups: int,
    heads_per_group: int,
    kept_groups: int,
    kept_heads_per_group: int,
) -> torch.Tensor:
    """Return the query heads to keep, ascending int64: whole KV groups, or equally many heads in every group.

    Either keeps the result a stock model.
    """
    num_heads = num_groups * heads_per_group
    if kept_groups == num_groups:
        return SELECTORS[name].blocks(evidence, Blocks(num_heads, num_groups, kept_heads_per_group))
    groups = SELECTORS[name].blocks(evidence, Blocks(num_groups, 1, kept_groups))
    heads = torch.arange(num_heads, device=groups.device)
    return heads.view(num_groups, heads_per_group)[groups].flatten()
