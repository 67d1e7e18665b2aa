"""The method of a compression: which parts of a model are reduced, and how."""

import math
from dataclasses import dataclass
from typing import Final, Literal

from oneshot.errors import ConfigError
from oneshot.fields import check_minimum, check_values, display

SelectorName = Literal["id", "obs", "activation-norm", "wanda", "flap", "tcsp-score", "magnitude", "random", "none"]
Experts = Literal["effects", "frequency", "reap", "man", "energy", "random", "none"]
Hidden = Literal["pca", "none"]
Embedding = Literal["auto", "low-rank", "none"]
HeadUnit = Literal["auto", "query-head", "kv-group"]
Correction = Literal["none", "bias", "same-layer", "two-stream"]
Pivoting = Literal["cholesky", "qr", "grouped", "tournament"]
Sketch = Literal["none", "count", "sparse-sign"]
Allocation = Literal["auto", "uniform", "error", "stat", "stat-reversed", "block-influence", "flap", "sensitivity"]
Depth = Literal["sensitivity", "sublayers", "none"]
InnerSizes = Literal["sensitivity", "none"]
Ranks = Literal["auto", "sensitivity", "none"]
OutputCurvature = Literal["auto", "fisher", "none"]
ExpertCounts = Literal["auto", "equal", "sensitivity"]
TokenWeighting = Literal["unit", "raw"]
ResidualTarget = Literal["stream", "sublayer"]
HeadsCorrection = Literal["own", "two-stream"]
ValueFeatures = Literal["heads", "values"]
ValueWeights = Literal["output", "none"]

AUTO: Final = "auto"
DAMPING = 3e-2
EXPERT_DAMPING = 1e-2
TOKENS_PER_NEURON = 4  # with fewer tokens the correction fits the text and not the model


@dataclass(frozen=True)
class Method:
    """The choices by which FFN neurons, heads and the hidden size shrink, and by which linears are corrected.

    Attributes:
        ffn: selector of neurons: `id` (output-weighted pivots), `obs` (backward elimination), a score, or none.
        heads: selector of heads, the same choices (`id`: STAT section 3.2).
        experts: selector of whole experts of a mixture: the set with the least joint `effects` on the output, a score,
            or none.
        head_unit: what is removed together: a whole KV group, or a query head of every group.
        hidden: `pca` projects the residual stream (TCSP section 4; SP3 appendix F.1).
        group_size: sublayers that share a projection, 0 for one projection in the whole model.
        shared_weight: weight of all other sublayers' statistics in a group's projection.
        token_weighting: in that projection tokens count equally (`unit`) or by their energy (`raw`).
        embedding: `low-rank` gives ranges of the vocabulary their own ranks, in the embedding and in an output head of
            its own; `auto`: if the form can hold it.
        correction: `bias` adds the mean of removed columns (FLAP); `same-layer` and `two-stream`: least squares.
        residual_target: target of a two-stream correction: the dense `stream` after the sublayer, or the sum that the
            dense `sublayer` adds to its own input (STAT section 3.1).
        residual_weight: share of the residual towards that target, beyond the layer's own output.
        heads_correction: what corrects the output linear of attention: its `own` layer's dense output, or as if heads
            were neurons, the dense stream (`two-stream`, STAT section 3.2, step 2b).
        damping: ridge in units of the Gram's mean diagonal, or `auto`: least error on a held-out ninth of the text.
        expert_damping: `damping` of the experts of a mixture (docs/results.md).
        expert_residual_weight: `residual_weight` of the experts of a mixture.
        up_steps: steps of conjugate gradients that also correct `up_proj`.
        pivoting: how `id` orders neurons: `cholesky` of the Gram, `qr` of the sketch, `grouped` or `tournament`.
        pivot_group_size: columns in a group of `grouped` or `tournament` pivots.
        sketch: the sketch that replaces the exact Gram for neuron pivots.
        sketch_size: rows of the sketch, 0 for twice the FFN width.
        value_features: the features of smaller values: the outputs of `heads`, which the softmax weighs (DA-WID), or
            the `values` themselves (SP3, TCSP).
        value_weights: whether the `output` linear weighs these features (TCSP equation 27; DA-WID equation 9), or not
            (SP3 equation 10; DA-WID equation 21).
        allocation: how layers share the target: `uniform`, or by a profile (`planning.damages`). Of groups of
            subspaces: `uniform`, or the least lost energy (`error`, SP3 section 3.2).
        layer_allocation: what `allocation=auto` means if layers may have different sizes.
        depth: `sensitivity` also leaves out whole layers if a profile says that it costs less; `sublayers`: attention
            or the FFN of a layer by itself (SP3 section 3.2).
        inner_sizes: `sensitivity` also gives every layer its own sizes of queries and keys, and of values, if a profile
            says that it costs less.
        ranks: `sensitivity` also gives linears of every layer their own ranks if a profile says that it costs less: of
            queries and keys, of attention's output, of gate and up; `auto`: if the form can hold them and the method
            corrects what they lose.
        curvature: `fisher` measures by one backward pass what a change of each sublayer's output costs the model's
            output; neurons, ranks and sizes are then chosen by it (`compression.curvature`). `auto`: if ranks are
            planned and neurons are chosen by pivots of the exact Gram.
        expert_counts: `equal` keeps as many experts in every layer of a mixture; with `sensitivity` a profile says how
            many each keeps. `auto`: if experts go by `effects`, the form can hold it and no number is stated.
    """

    ffn: SelectorName
    heads: SelectorName
    correction: Correction
    experts: Experts = "none"
    head_unit: HeadUnit = "auto"
    hidden: Hidden = "none"
    group_size: int = 0
    shared_weight: float = 0.0
    token_weighting: TokenWeighting = "unit"
    embedding: Embedding = "none"
    residual_target: ResidualTarget = "stream"
    residual_weight: float = 0.25
    heads_correction: HeadsCorrection = "own"
    damping: float | Literal["auto"] = DAMPING
    expert_damping: float = EXPERT_DAMPING
    expert_residual_weight: float = 1.0
    up_steps: int = 0
    pivoting: Pivoting = "cholesky"
    pivot_group_size: int = 512
    sketch: Sketch = "none"
    sketch_size: int = 0
    value_features: ValueFeatures = "heads"
    value_weights: ValueWeights = "output"
    allocation: Allocation = "auto"
    layer_allocation: Allocation = "sensitivity"
    depth: Depth = "none"
    inner_sizes: InnerSizes = "none"
    ranks: Ranks = "none"
    curvature: OutputCurvature = "none"
    expert_counts: ExpertCounts = "equal"

    def __post_init__(self) -> None:
        check_values(self)
        check_minimum(self, group_size=0, up_steps=0, pivot_group_size=1, sketch_size=0)
        for name, value in (
            ("damping", self.fixed_damping),
            ("residual_weight", self.residual_weight),
            ("expert_damping", self.expert_damping),
            ("expert_residual_weight", self.expert_residual_weight),
            ("shared_weight", self.shared_weight),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{display(name, value)} is out of range: give 0 or more.")
        if self.pivoting == "qr" and self.sketch == "none":
            raise ConfigError("--set pivoting=qr needs a sketch (--set sketch=count or sparse-sign); leave it out.")
        if self.depth != "none" and self.hidden != "none":
            raise ConfigError("--set depth= leaves out layers of a model with its full hidden size; set hidden=none.")
        if self.depth != "none" and self.allocation not in ("auto", "sensitivity"):
            raise ConfigError(f"--set depth={self.depth} needs allocation=sensitivity, not {self.allocation}.")
        if self.plans_inner_sizes and (self.hidden != "none" or self.allocation not in ("auto", "sensitivity")):
            raise ConfigError(
                "--set inner_sizes=sensitivity needs hidden=none and allocation=sensitivity; leave it out."
            )
        if self.plans_ranks and not self.may_plan_ranks:
            raise ConfigError(
                "--set ranks=sensitivity needs a selector for ffn, allocation=sensitivity, whole heads (heads, hidden "
                "and inner_sizes none), and no depth=sublayers; leave it out."
            )
        if self.plans_experts and not self.may_plan_experts:
            raise ConfigError(
                "--set expert_counts=sensitivity needs experts=effects, hidden=none and allocation=sensitivity; "
                "leave it out."
            )
        if self.up_steps and (not self.reduces_ffn or not self.solves or self.hidden != "none"):
            raise ConfigError(
                "--up-steps needs a selector for ffn, least squares as correction, and hidden=none; leave it out."
            )
        if self.up_steps and self.residual_target != "stream":
            raise ConfigError("--up-steps follows the dense stream; set residual_target=stream, or leave it out.")
        if self.heads_correction == "two-stream" and not self.follows_dense:
            raise ConfigError("--set heads_correction=two-stream needs correction=two-stream; leave it out.")
        if self.embedding == "low-rank" and (self.hidden != "none" or self.allocation not in ("auto", "sensitivity")):
            raise ConfigError("--set embedding=low-rank needs hidden=none and allocation=sensitivity; leave it out.")
        if self.weighs_output and not self.may_weigh_output:
            raise ConfigError(
                f"--set curvature={self.curvature} chooses neurons by pivots of the exact Gram (ffn=id, "
                "sketch=none, hidden=none); leave it out."
            )
        if self.only_slices and self.allocation not in ("auto", "uniform", "error"):
            raise ConfigError(
                f"--set allocation={self.allocation} is for neurons and heads; a hidden size has uniform or error."
            )
        if self.allocation == "flap" and self.reduces_heads:
            raise ConfigError("--set allocation=flap is for FFN neurons alone; set heads=none, or choose another.")

    @property
    def reduces_ffn(self) -> bool:
        """Return whether FFN neurons are removed."""
        return self.ffn != "none"

    @property
    def reduces_heads(self) -> bool:
        """Return whether heads are removed."""
        return self.heads != "none"

    @property
    def reduces_experts(self) -> bool:
        """Return whether whole experts are removed."""
        return self.experts != "none"

    @property
    def may_plan_experts(self) -> bool:
        """Return whether a profile can say what fewer experts cost."""
        return self.experts == "effects" and not self.slices and self.allocation in (AUTO, "sensitivity")

    @property
    def plans_experts(self) -> bool:
        """Return whether a profile decides how many experts every layer keeps; `expert_counts` must be settled."""
        return self.expert_counts == "sensitivity"

    @property
    def reduces_sublayers(self) -> bool:
        """Return whether neurons or heads are removed."""
        return self.reduces_ffn or self.reduces_heads

    @property
    def slices(self) -> bool:
        """Return whether the hidden size shrinks."""
        return self.hidden != "none"

    @property
    def leaves_out_layers(self) -> bool:
        """Return whether whole layers may be removed."""
        return self.depth != "none"

    @property
    def leaves_out_sublayers(self) -> bool:
        """Return whether attention or the FFN of a layer may be removed by itself."""
        return self.depth == "sublayers"

    @property
    def plans_inner_sizes(self) -> bool:
        """Return whether a profile decides the sizes of queries, keys and values of every layer."""
        return self.inner_sizes != "none"

    @property
    def may_plan_ranks(self) -> bool:
        """Return whether nothing else speaks against ranks of linears: they are planned beside FFN widths alone."""
        others = self.reduces_heads or self.slices or self.plans_inner_sizes or self.leaves_out_sublayers
        return self.reduces_ffn and not others and self.allocation in (AUTO, "sensitivity")

    @property
    def plans_ranks(self) -> bool:
        """Return whether a profile decides ranks of linears; `ranks` must be settled."""
        return self.ranks == "sensitivity"

    @property
    def takes_pivots(self) -> bool:
        """Return whether neurons are chosen by pivots."""
        return self.ffn == "id"

    @property
    def may_weigh_output(self) -> bool:
        """Return whether output curvature can weigh what is chosen: neurons by pivots of the exact Gram."""
        return self.takes_pivots and self.sketch == "none" and not self.slices

    @property
    def weighs_output(self) -> bool:
        """Return whether output curvature is measured; `curvature` must be settled."""
        return self.curvature == "fisher"

    @property
    def solves(self) -> bool:
        """Return whether the correction is by least squares."""
        return self.correction in ("same-layer", "two-stream")

    @property
    def follows_dense(self) -> bool:
        """Return whether the correction's target comes from the dense stream."""
        return self.correction == "two-stream"

    @property
    def only_slices(self) -> bool:
        """Return whether the hidden size is all that shrinks."""
        return self.slices and not self.reduces_sublayers

    @property
    def allocates_by_form(self) -> bool:
        """Return whether the form of the result decides how layers share the target."""
        return self.allocation == AUTO

    @property
    def reads_profile(self) -> bool:
        """Return whether sizes come from a profile; `allocation` must be settled."""
        by_profile = self.allocation != "uniform" and self.reduces_sublayers
        return by_profile or self.leaves_out_layers or self.plans_experts

    @property
    def fixed_damping(self) -> float:
        """Return the damping of solves without held-out text."""
        return DAMPING if isinstance(self.damping, str) else self.damping

    @property
    def holds_out(self) -> bool:
        """Return whether held-out text chooses the damping of every correction."""
        return isinstance(self.damping, str) and self.solves

    def rows_of_sketch(self, width: int) -> int:
        """Return the rows of the sketch for an FFN of this width."""
        return self.sketch_size or 2 * width
