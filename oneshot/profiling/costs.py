"""What is computed from a layer's statistics in a profile, and its cost, by which processes share it out."""

from collections.abc import Collection

from oneshot.architecture import Carried, RankedKind, Stack
from oneshot.compression.correction import cost_of_columns
from oneshot.compression.ranks import cost_of_rank
from oneshot.tensors import Tensors

Task = tuple[int, RankedKind | None]
"""The index of a sublayer, and the kind of its linears that may have low rank; None: its heads or neurons."""


def layer_costs(stack: Stack, tensors: Tensors, probed: Collection[str], *, with_ranks: bool) -> dict[Task, float]:
    """Return the cost of every task of a layer, in operations of float32 products on a CPU; 0 where nothing is done.

    Experts count nothing, because all processes share them.

    Args:
        stack, tensors: the layer's. probed: the measured kinds of `PROBED_KINDS`. with_ranks: whether linears of low
            rank are.
    """
    mixer, ffn = stack.mixer_index, stack.index_of("ffn")
    costs: dict[Task, float] = {(mixer, None): 0.0, (ffn, None): 0.0}
    if not isinstance(stack.token_mixer, Carried) and not {"heads", "inner"}.isdisjoint(probed):
        costs[mixer, None] = cost_of_columns(*tensors[f"{stack.token_mixer.out}.weight"].shape)
    if stack.experts is None:
        costs[ffn, None] = cost_of_columns(*tensors[f"{stack.ffn.down}.weight"].shape)
    for index in (mixer, ffn) if with_ranks else ():
        for kind, linears in stack.sublayers[index].mixer.ranked.items():
            shapes = [tensors[f"{linear}.weight"].shape for linear in linears]
            costs[index, kind] = cost_of_rank(sum(outputs for outputs, _ in shapes), shapes[0][1])
    return costs
