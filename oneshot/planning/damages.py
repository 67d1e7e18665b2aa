"""The predicted cost of sizes, from a profile."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from oneshot.architecture import RANKED_KINDS, TABLES, Table, TableShape
from oneshot.errors import CheckpointError
from oneshot.method import Allocation
from oneshot.planning.curves import Profile
from oneshot.planning.grid import Grid
from oneshot.planning.options import head_sizes
from oneshot.planning.plan import Plan, RemovedUnit
from oneshot.planning.vocabulary import vocabulary_ranges

# No later layer corrects what a smaller embedding or head loses (benchmarks/records/experiments.md).
TABLE_CAUTION = 1.4
# Of what removed experts cost, this share stays when the others are corrected (benchmarks/records/experiments.md).
CORRECTED_SHARE = 0.45
TINY = torch.finfo(torch.float64).tiny
STATED_SIZES = ("query_key_size", "value_size", "num_experts")  # that may be the same in all layers without a profile

Damages = dict[str, torch.Tensor]
"""The predicted loss of every size, in nats per token, as only sensitivities are; what is unknown has no entry.

`ffn (layers, n + 1)`: of keeping k neurons. `heads (layers, units + 1)`: of k head units. `layers (layers,)`: of
leaving out a whole layer. The others are named by their field of a `LayerPlan`: `query_key_size`,
`value_size (layers, h + 1)`, `num_experts (layers, E + 1)`, and the ranks of linears, `query_key_rank`, …
`(layers, D + 1)`.

`embedding`, `output_head (prices, ranges, D + 1)`: of rank r of a range of the vocabulary. A table costs the largest of
the sums at all prices, because a large cut costs more for each error than a small one.
"""


def profiled_damages(profile: Profile, allocation: Allocation, grid: Grid) -> Damages:
    """Return the predicted cost of every size of every sublayer, by an entry of `ALLOCATIONS`.

    Raises `CheckpointError` if a cost is not a number.
    """
    damages = ALLOCATIONS[allocation](profile, grid)
    for kind, costs in damages.items():
        if kind not in TABLES and costs.isnan().any():
            raise CheckpointError(
                f"In layer {int(costs.isnan().nonzero()[0, 0])} the profile of {kind} is not a number, because weights "
                "are too large for its sums; check the weights of this layer and those before it."
            )
    return damages


def even_damages(grid: Grid, head_unit: RemovedUnit) -> Damages:
    """Return damages that grow evenly with what is removed, for a plan before anything is measured."""
    shape, layers = grid.shape, grid.shape.num_hidden_layers
    of_layers = [shape.of(layer) for layer in range(layers)]

    def even(size: int) -> torch.Tensor:
        return torch.linspace(1, 0, size + 1, dtype=torch.float64)

    def of_own(sizes: list[int]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([even(size) for size in sizes], batch_first=True)

    damages = {
        "ffn": of_own([one.intermediate_size for one in of_layers]),
        "heads": of_own([len(head_sizes(one, head_unit)) for one in of_layers]),
        "layers": torch.ones(layers, dtype=torch.float64),
    }
    for table in grid.ranked_tables:
        damages[table] = even(shape.hidden_size).expand(1, len(vocabulary_ranges(shape.vocab_size)), -1)
    if shape.experts is not None:
        damages["num_experts"] = even(shape.experts.count).expand(layers, -1)
    return damages | {f"{kind}_rank": even(shape.hidden_size).expand(layers, -1) for kind in RANKED_KINDS}


def sensitivity_damages(profile: Profile, _: Grid) -> Damages:
    """Return squared errors times the measured divergence of the model's output, in nats per token.

    Tables of the vocabulary count `TABLE_CAUTION` times, and a sublayer that is left out its own measured divergence.
    """
    damages = _weighted_errors(profile, profile.ffn_sensitivity, profile.head_sensitivity)
    damages["ffn"][:, 0], damages["heads"][:, 0] = profile.ffn_divergence, profile.head_divergence
    for table in TABLES:
        errors, probes = profile.of_table(table, "errors"), profile.of_table(table, "probes")
        if len(errors):
            damages[table] = TABLE_CAUTION * table_damages(probes, errors)
    ranks = profile.stream_sensitivity.view(-1, 1, 1) * profile.rank_errors
    return damages | {
        "query_key_size": profile.query_key_sensitivity.unsqueeze(1) * profile.query_key_errors,
        "value_size": profile.value_sensitivity.unsqueeze(1) * profile.value_errors,
        "num_experts": CORRECTED_SHARE * profile.expert_sensitivity.unsqueeze(1) * profile.expert_errors,
        **{f"{kind}_rank": ranks[:, index] for index, kind in enumerate(RANKED_KINDS)},
    }


def table_damages(probes: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """Return what ranks of ranges cost by the slopes between measured probes, `(probes, ranges, D + 1)`, in nats.

    The divergence as a function of the whole table's error is taken as a convex polyline through zero and the
    probes: the largest of straight lines, whose offsets the ranges share equally.

    Args:
        probes: `(probes, 2)`: error and divergence of each. errors: `(ranges, D + 1)` (`range_errors`).
    """
    lines, slope, before = list[torch.Tensor](), TINY, (0.0, 0.0)
    for error, divergence in probes.sort(dim=0).values.tolist():
        slope = max(slope, (divergence - before[1]) / max(error - before[0], TINY))
        lines.append(slope * errors + (before[1] - slope * before[0]) / len(errors))
        before = error, before[1] + slope * (error - before[0])
    return torch.stack(lines)


def damage_of_tables(tables: Mapping[Table, Sequence[TableShape]], damages: Damages) -> float:
    """Return what tables cost whose ranges of the vocabulary have these ranks."""
    total = 0.0
    for name, ranges in tables.items():
        total += float(sums_of_ranges(damages[name], ranges).max())
    return total


def sums_of_ranges(damages: torch.Tensor, ranges: Sequence[TableShape]) -> torch.Tensor:
    """Return what a table loses at every price, `(prices,)`; `damages`: of ranges, `(prices, ranges, D + 1)`."""
    return damages[:, range(len(ranges)), [one.rank for one in ranges]].sum(1)


def error_damages(profile: Profile, _: Grid) -> Damages:
    """Return the relative squared errors of the sublayers' outputs."""
    ones = torch.ones(len(profile.block_influence), dtype=torch.float64)
    return _weighted_errors(profile, ones, ones)


def influence_damages(profile: Profile, _: Grid) -> Damages:
    """Return squared errors times the layer's block influence (ShortGPT)."""
    return _weighted_errors(profile, profile.block_influence, profile.block_influence)


def flap_damages(profile: Profile, _: Grid) -> Damages:
    """Return the fluctuations of removed neurons, standardised in every layer (`removed_fluctuation`)."""
    ffn = removed_fluctuation(profile.ffn_fluctuation)
    return {"ffn": ffn, "heads": torch.zeros_like(profile.head_errors), "layers": profile.layer_divergence}


def _weighted_errors(profile: Profile, ffn: torch.Tensor, heads: torch.Tensor) -> Damages:
    """Return the errors times weights of layers, `(layers,)` each."""
    return {
        "ffn": ffn.unsqueeze(1) * profile.ffn_errors,
        "heads": heads.unsqueeze(1) * profile.head_errors,
        "layers": profile.layer_divergence,
    }


def stat_damages(profile: Profile, grid: Grid, *, is_reversed: bool = False) -> Damages:
    """Return STAT's expected errors `F · w(l) · e` of every size of every FFN and of every attention.

    F is the kind's share of a layer's operations (STAT section 3.3). `e` is `‖R22‖_F` of the weighted activations, and
    `w` a weight of the layer, `l = 1 … N` (STAT A.4): `l + 50` for models with norms before their sublayers, where `e`
    is relative to `‖R‖_F`, and `√(l + 1) + 1` for models with norms after them. `is_reversed`: `1 / w` instead of `w`.
    """
    number = torch.arange(1, len(profile.ffn_tails) + 1, dtype=torch.float64).unsqueeze(1)
    absolute = grid.family.stack.norms_after
    weights = (number + 1).sqrt() + 1 if absolute else number + 50
    if is_reversed:
        weights = 1 / weights
    layers = [grid.shape.layer(layer) for layer in range(len(profile.ffn_tails))]
    of_mixers = [replace(one, intermediate_size=0).linear_parameters() / one.linear_parameters() for one in layers]
    attention_share = torch.tensor(of_mixers, dtype=torch.float64).unsqueeze(1)

    def expected(tails: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        errors = tails if absolute else tails / tails[:, :1].clamp_min(TINY)
        return share * weights * errors

    ffn, heads = expected(profile.ffn_tails, 1 - attention_share), expected(profile.head_tails, attention_share)
    return {"ffn": ffn, "heads": heads, "layers": profile.layer_divergence}


def removed_fluctuation(fluctuation: torch.Tensor) -> torch.Tensor:
    """Return the fluctuation that is removed if k neurons stay, `(layers, n + 1)`; the least fluctuating go first.

    Fluctuations are standardised in every layer and shifted to be positive, so that the least sum is one threshold for
    all layers (FLAP, An et al. 2023, arXiv 2312.11983: adaptive structure search).

    Args:
        fluctuation: `(layers, n)` float64.
    """
    deviation = fluctuation.std(dim=1, keepdim=True, correction=0)
    standardised = (fluctuation - fluctuation.mean(dim=1, keepdim=True)) / deviation.clamp_min(TINY)
    sums = (standardised - standardised.min()).sort(dim=1).values.cumsum(dim=1)
    return torch.cat((torch.zeros_like(sums[:, :1]), sums), dim=1).flip(1)


ALLOCATIONS: dict[str, Callable[[Profile, Grid], Damages]] = {
    "error": error_damages,
    "stat": stat_damages,
    "stat-reversed": partial(stat_damages, is_reversed=True),
    "block-influence": influence_damages,
    "flap": flap_damages,
    "sensitivity": sensitivity_damages,
}
"""The predicted losses by which layers share a target, by name in `method.Allocation`."""


def is_priced(plan: Plan, damages: Damages) -> bool:
    """Return whether all sizes of a plan have damages: stated sizes and other forms' ranks may not be measured."""
    if plan.hidden is not None:
        return False
    for name in (*STATED_SIZES, *(f"{kind}_rank" for kind in RANKED_KINDS)):
        full = damages[name].shape[1] - 1
        if any((getattr(kept, name) or full) < full for kept in plan.layers) and not damages[name].any():
            return False
    return True


def predicted_damage(plan: Plan, damages: Damages) -> float:
    """Return the sum of the damages of a plan's sizes."""
    total = damage_of_tables(plan.tables, damages)
    for layer, kept in enumerate(plan.layers):
        if kept.is_left_out:
            total += float(damages["layers"][layer])
            continue
        units = kept.num_key_value_heads
        if plan.head_unit != "kv-group" and units:
            units = kept.num_attention_heads // units
        total += float(damages["ffn"][layer, kept.intermediate_size] + damages["heads"][layer, units])
        for name in STATED_SIZES:
            size = getattr(kept, name)
            if size is not None and name in damages:
                total += float(damages[name][layer, size])
        ranks = ((f"{kind}_rank", rank) for kind, rank in kept.ranks.items())
        total += sum(float(damages[name][layer, rank]) for name, rank in ranks if name in damages)
    return total
