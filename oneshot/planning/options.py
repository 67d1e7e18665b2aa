"""The sizes that one layer can have: heads, sizes inside them, ranks of linears, experts."""

from itertools import product
from typing import Any

from oneshot.architecture import ExpertSizes, ModelShape, RankedKind
from oneshot.planning.budget import default_round_to
from oneshot.planning.grid import Grid

Fields = dict[str, Any]  # of a `LayerPlan`

LARGEST_STEP = 8  # so that experts can be shared among devices
STEPS = 16  # of a model's experts, at least


def head_sizes(shape: ModelShape, head_unit: str) -> list[Fields]:
    """Return the heads for every number of kept units, from one to all."""
    groups, per_group = shape.num_key_value_heads, shape.heads_per_group
    if head_unit == "kv-group":
        kept = [(units * per_group, units) for units in range(1, groups + 1)]
    else:
        kept = [(units * groups, groups) for units in range(1, per_group + 1)]
    return [{"num_attention_heads": heads, "num_key_value_heads": left} for heads, left in kept]


def inner_sizes(grid: Grid) -> list[Fields]:
    """Return every pair of a query/key size and a value size, from half of the head size up; None is the full size.

    A profile measures sensitivities at three quarters, and they were not checked below half. Rotary pairs stay
    whole, and so do the queries and keys of a family that cannot have smaller ones.
    """
    size = grid.shape.head_dim
    step = default_round_to(size)
    pair = 2 if grid.family.stack.rotary else 1
    scores = range(pair * -(-size // (2 * pair)), size, max(pair, step))
    if grid.family.reason_against("queries and keys") is not None:
        scores = range(0)
    pairs = product([None, *scores], [None, *range(-(-size // 2), size, step)])
    return [{"query_key_size": score, "value_size": value} for score, value in pairs]


def rank_options(shape: ModelShape, kind: RankedKind, round_to: int | None) -> list[int]:
    """Return the ranks of a linear below the whole, in steps of about a sixteenth from a quarter of the hidden size.

    A profile measures what half of it costs. Ranks are multiples of `round_to`; None: of what suits the hidden size.
    """
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    rows = {
        "query_key": (heads + shape.num_key_value_heads) * shape.head_dim,
        "output": heads * shape.head_dim,
        "gate": shape.intermediate_size,
        "up": shape.intermediate_size,
    }
    step = round_to or default_round_to(hidden)
    step *= max(1, hidden // (16 * step))
    return list(range(step * -(-hidden // (4 * step)), min(hidden, rows[kind]), step))


def expert_counts(experts: ExpertSizes, tp: int = 1) -> list[int]:
    """Return the numbers of experts that a layer may keep, rising to all of them.

    `tp`: GPUs that may have whole experts; they share every number equally if they can share all experts so.
    """
    step = min(LARGEST_STEP, max(1, experts.count // STEPS))
    counts = range(experts.count, experts.per_token - 1, -step)
    return [count for count in counts if experts.count % tp or count % tp == 0][::-1]
