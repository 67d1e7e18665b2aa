"""The stages of a run: which of them it has, how many streams they move, and what a profile measures.

`make_schedule` decides this once. The pipeline executes the schedule and the footprint prices it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from oneshot.architecture import Table
from oneshot.compression import needs_statistics
from oneshot.compression.sublayer import trusted_share
from oneshot.method import Method
from oneshot.planning import Grid, Plan
from oneshot.profiling import PROBED_KINDS

# With much text the dense stream has only half of it: the residual is a small part of the target
# (benchmarks/records/experiments.md).
DENSE_EVERY = 2
DENSE_TOKENS_PER_NEURON = 32  # that it needs to have


@dataclass(frozen=True)
class Schedule:
    """The stages of a run.

    Attributes:
        plans_by_profile: whether a profile decides the sizes of layers.
        profiled_kinds: the kinds of sublayers that a profile of this run measures; empty if it makes none.
        profiled_tables: tables of the vocabulary that this or a given profile measures.
        weighs_output: whether errors count by output curvature.
        measures_curvature: whether a backward pass measures it, because no given profile has it.
        finds_subspaces: whether the hidden size shrinks.
        streams: how many streams of hidden states pass the layers; 0 if the layers do not read the text.
        dense_every: the dense stream has one of so many batches; 0 without a dense stream.
        finds_shared_heads: whether heads are chosen beforehand, for all layers of a stack.
        solves_heads: whether the output linear of attention changes in any layer.
        corrects_up: whether `up_proj` is corrected in any layer.
        removes_experts: whether whole experts go.
        measures_importance: whether an importance matrix is written. chooses_types: whether tensors of a GGUF file get
            quantised types of their own. prices_types: whether these are first priced on a file of the original,
            because what goes is chosen beside them.
    """

    plans_by_profile: bool = False
    profiled_kinds: tuple[str, ...] = ()
    profiled_tables: tuple[Table, ...] = ()
    weighs_output: bool = False
    measures_curvature: bool = False
    finds_subspaces: bool = False
    streams: int = 0
    dense_every: int = 0
    finds_shared_heads: bool = False
    solves_heads: bool = False
    corrects_up: bool = False
    removes_experts: bool = False
    measures_importance: bool = False
    chooses_types: bool = False
    prices_types: bool = False

    @property
    def makes_profile(self) -> bool:
        """Return whether the run makes a profile itself."""
        return bool(self.profiled_kinds)

    @property
    def reads_text(self) -> bool:
        """Return whether the run needs calibration text."""
        return self.fits_text or self.measures_importance

    @property
    def fits_text(self) -> bool:
        """Return whether sizes or weights depend on the text."""
        return self.plans_by_profile or self.makes_profile or self.finds_subspaces or self.streams > 0

    @property
    def two_streams(self) -> bool:
        """Return whether the dense stream passes beside the compressed one."""
        return self.streams == 2

    @property
    def dense_share(self) -> float:
        """Return the share of the text that the dense stream has."""
        return 1 / self.dense_every if self.two_streams else 0.0

    @property
    def may_rank_tables(self) -> bool:
        """Return whether a profile may give ranks to tables of the vocabulary."""
        return self.plans_by_profile and bool(self.profiled_tables)


def make_schedule(
    method: Method,
    plan: Plan,
    grid: Grid,
    *,
    num_tokens: int,
    has_profile: bool,
    has_curvature: bool = False,
    asks_less: bool = False,
    quantises: bool = False,
) -> Schedule:
    """Return the stages of a run with a plan, made for equal layers if a profile will decide their sizes.

    Args:
        method: settled for the grid. num_tokens: tokens that are asked for. has_profile: whether the profile is given,
            so that none is made. has_curvature: whether it also has the output curvature. asks_less: whether the
            budget is below the dense model's; the plan for equal layers may keep all of them, where only ranks or
            sizes of their own can meet it. quantises: whether linears are rounded by what they read.
    """
    shape = grid.shape
    by_profile = method.reads_profile and (asks_less or plan.reduces_sublayers(shape))
    slices = plan.hidden is not None
    plans_inner = by_profile and method.plans_inner_sizes
    reduces_values = plan.reduces_values or plans_inner
    sliced_correction = slices and method.follows_dense
    shrinks = plan.shrinks_layers(shape) or (by_profile and method.reduces_sublayers)
    ranks = plan.has_ranks or (by_profile and method.plans_ranks)
    reads = reduces_values or plan.reduces_queries_keys or ranks or sliced_correction
    reads = reads or ((shrinks or quantises) and needs_statistics(method))
    chosen = {
        "ffn": method.reduces_ffn,
        "heads": method.reduces_heads,
        "layer": method.leaves_out_layers,
        "sublayer": method.leaves_out_sublayers,
        "inner": method.plans_inner_sizes,
        "rank": method.plans_ranks,
        "experts": method.plans_experts,
    }
    follows_dense = reads and method.follows_dense and _residual_counts(method, grid, slices, num_tokens)
    needed = DENSE_EVERY * DENSE_TOKENS_PER_NEURON * shape.intermediate_size * shape.tokens_per_arrival
    share_suffices = num_tokens >= needed
    needs_all = slices or method.holds_out or method.residual_target != "stream"
    fewer_heads = any(
        plan.layers[layer].num_attention_heads < shape.of(layer).num_attention_heads for layer in plan.kept_layers
    )
    weighs = method.weighs_output and (ranks or (reads and shrinks))
    kinds = tuple(kind for kind in PROBED_KINDS if chosen[kind]) if by_profile and not has_profile else ()
    return Schedule(
        plans_by_profile=by_profile,
        profiled_kinds=kinds,
        profiled_tables=tuple(grid.priced_tables(method)) if by_profile and method.embedding != "none" else (),
        weighs_output=weighs,
        measures_curvature=weighs and not (by_profile and has_curvature),
        finds_subspaces=slices,
        streams=(2 if follows_dense else 1) if reads else 0,
        dense_every=(DENSE_EVERY if share_suffices and not needs_all else 1) if follows_dense else 0,
        finds_shared_heads=fewer_heads and grid.family.shares_heads,
        solves_heads=method.reduces_heads or reduces_values or sliced_correction,
        removes_experts=plan.removes_experts(shape) or (by_profile and method.plans_experts),
        corrects_up=method.up_steps > 0 and shrinks,  # `Method` and `Grid.settle` refuse it where it cannot be
    )


def _residual_counts(method: Method, grid: Grid, slices: bool, num_tokens: int) -> bool:
    """Return whether a target can have a share of the dense stream's residual, which few tokens do not give it.

    A text that is not packed may have other numbers of tokens than asked for, and experts have their own.
    """
    shape, family = grid.shape, grid.family
    takes_all = slices or method.holds_out or method.residual_target != "stream" or method.up_steps > 0
    if takes_all or shape.experts is not None or not family.stack.causal or family.decoder is not None:
        return True
    columns = [shape.intermediate_size + shape.mlp_bias] if method.reduces_ffn else []
    if method.heads_correction == "two-stream":
        columns.append(shape.num_attention_heads * shape.head_dim + shape.output_bias)
    return any(trusted_share(each, num_tokens) > 0 for each in columns)


def profile_schedule(grid: Grid, method: Method, kinds: Sequence[str] = PROBED_KINDS) -> Schedule:
    """Return the stages of a run that only makes a profile: of `kinds` without what no form can remove."""
    if not grid.family.like_llama and grid.family.reason_against("heads") is not None:
        kinds = [kind for kind in kinds if kind != "heads"]
    experts = grid.shape.experts
    if experts is None or experts.all_active or grid.family.reason_against("experts") is not None:
        kinds = [kind for kind in kinds if kind != "experts"]
    if grid.family.lenders:  # no layer that lends keys and values can be left out
        kinds = [kind for kind in kinds if kind not in ("layer", "sublayer")]
    return Schedule(
        profiled_kinds=tuple(kinds),
        profiled_tables=tuple(grid.priced_tables(method)),
        weighs_output=method.weighs_output,
        measures_curvature=method.weighs_output,
    )
