"""The sizes that a form of the result can state: what a planner asks instead of the form's name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oneshot.architecture import Description, LayerShape, ModelShape, StackShape, Table
from oneshot.config import Target
from oneshot.errors import PlanError, together
from oneshot.method import AUTO, Allocation, Method
from oneshot.planning.kept import NOTHING, Kept
from oneshot.planning.plan import Plan
from oneshot.planning.serving import SMALLER_GROUPS, Half, MisfitError, less_demanding, misfit
from oneshot.planning.unsupported import errors_against, errors_against_profile
from oneshot.serving import ANY, Serving


@dataclass(frozen=True)
class Grid:
    """The sizes that a form can state for a model.

    Attributes:
        family, shape: the dense model's.
        remedy: an option that allows more, for error messages; None if this form allows everything.
        instead: the grid of the form that error messages advise where this one cannot hold the model or an option;
            None if no other can hold the model.
        refusal: a sentence why the form cannot hold this model at all; None if it can.
        layers_differ: whether every layer can have its own FFN width.
        heads_differ: whether every layer can also have its own heads. holds_heads: whether the form can state so many
            query heads and KV heads, if they do not differ.
        sublayers_optional: whether a layer can be without attention, or without an FFN.
        first_layer_attends: whether the first layer must have attention all the same; engines rely on it.
        inner_sizes: whether heads can have other sizes for queries, keys and values. equal_inner_sizes: whether these
            must be one size.
        ranks: whether linears of every layer can have their own ranks.
        subspaces_differ: whether the residual stream can change its subspace between sublayers.
        embedding_ranks: whether ranges of the vocabulary can have their own ranks.
        replaces_layer_norms: whether LayerNorms become RMSNorms, whose biases go into the linears.
        maps_tied_head: whether a tied head stays tied after a matrix if the hidden size shrinks.
        writes_vocabulary: whether the weight file also holds the tokenizer, which takes memory.
        kept: what stays as it is, because the run was asked to keep it. serving: what every result must open with.
        advised_groups: numbers of weights that are rounded together, of which advice names one; the largest first.
        stored: the sizes that the input stores, with its ranks; None for the sizes of the shape, which has none.
        known_costs: where `own_sizes` keeps what options of sublayers cost: plans for other targets ask the same.
    """

    family: Description
    shape: ModelShape
    remedy: str | None = None
    instead: "Grid | None" = None
    refusal: str | None = None
    layers_differ: bool = False
    heads_differ: bool = False
    sublayers_optional: bool = False
    first_layer_attends: bool = False
    inner_sizes: bool = False
    equal_inner_sizes: bool = False
    ranks: bool = False
    subspaces_differ: bool = False
    embedding_ranks: bool = False
    replaces_layer_norms: bool = False
    maps_tied_head: bool = False
    writes_vocabulary: bool = False
    kept: Kept = NOTHING
    serving: Serving = ANY
    advised_groups: tuple[int, ...] = SMALLER_GROUPS
    stored: StackShape | None = None
    holds_heads: Callable[[int, int], bool] = field(default=lambda heads, groups: True, compare=False)
    known_costs: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def dense(self) -> StackShape:
        """Return the sizes of the input, from which shares are counted."""
        return self.shape.stack() if self.stored is None else self.stored

    @property
    def folds_layer_norms(self) -> bool:
        """Return whether this model's LayerNorms become RMSNorms."""
        return self.replaces_layer_norms and self.shape.layer_norms and not self.shape.norms_after

    @property
    def inner_sizes_differ(self) -> bool:
        """Return whether every layer can have its own sizes inside heads."""
        return self.inner_sizes and self.heads_differ

    @property
    def ranks_embedding(self) -> bool:
        """Return whether this model's embedding can have ranks.

        Beside an output head of its own it needs output curvature (`prices_embedding`).
        """
        return self.embedding_ranks and self._can_price_embedding and (self.shape.tied or self.has_curvature)

    @property
    def _tables(self) -> list[Table]:
        has_own_head = self.family.head is not None and not self.shape.tied and not self.shape.head_bias
        return ["embedding", "output_head"] if has_own_head else ["embedding"]

    @property
    def ranked_tables(self) -> list[Table]:
        """Return the tables of the vocabulary that can have ranks: the embedding, and an output head of its own."""
        return self._tables if self.ranks_embedding else []

    def priced_tables(self, method: Method) -> list[Table]:
        """Return the tables of the vocabulary of which a profile knows what changes cost (`prices_embedding`)."""
        return self._tables if self.prices_embedding(method) else []

    @property
    def _can_price_embedding(self) -> bool:
        return self.family.reason_against("embedding ranks") is None and not self.shape.layer_norms

    def prices_embedding(self, method: Method) -> bool:
        """Return whether a profile knows what changes of the embedding's rows cost.

        It does from the output head that the embedding is, or else from output curvature, which must be settled.
        """
        return self._can_price_embedding and (self.shape.tied or method.weighs_output)

    @property
    def has_ranks(self) -> bool:
        """Return whether linears of this model can have low rank."""
        return self.ranks and self.family.may_have_ranks(self.shape)

    @property
    def has_curvature(self) -> bool:
        """Return whether output curvature can be measured and used: in this form of a decoder with its head."""
        predicts = self.family.stack.causal and self.family.decoder is None and self.family.head is not None
        return predicts and self.layers_differ and self.remedy is None

    def reason_against_heads(self) -> str | None:
        """Return a sentence why no head can be removed, with the remedy; None if heads can.

        A form whose layers state their own heads does not depend on what the family's stock class can hold.
        """
        return None if self.heads_differ else self.family.reason_against("heads")

    def stack(self, plan: Plan) -> StackShape:
        """Return the shape of the compressed model, layer by layer."""
        shape, stack = self.shape, self.shape.stack()
        if self.folds_layer_norms:
            # a tied embedding cannot lose its mean and its map in the head at once
            head = stack.head if plan.hidden is None else "own"
            stack = replace(stack, head=head, head_bias=True, num_positions=shape.num_positions)
        layers = tuple(self.layer(plan, layer) for layer in plan.kept_layers)
        if plan.hidden is not None:
            if stack.head == "tied":
                stack = replace(stack, head="mapped" if self.maps_tied_head else "own")
            if shape.norms_after:  # the norm of the embeddings is folded, and a linear leads back to full width
                further = shape.further_parameters - 2 * shape.hidden_size
                further += shape.tied * shape.vocab_size  # the means of the embedding's rows
                stack = replace(stack, further_parameters=further, output_size=shape.hidden_size)
        return replace(stack, layers=layers, embedding=plan.embedding, output_head=plan.output_head)

    def layer(self, plan: Plan, number: int) -> LayerShape:
        """Return the shape of a layer of the compressed model, by its number in the dense one."""
        shape, kept, hidden = self.shape, plan.layers[number], plan.hidden
        layer = plan.shape_of_layer(shape, number).layer(number)
        layer = replace(
            layer,
            query_key_size=kept.query_key_size or layer.query_key_size,
            value_size=kept.value_size or layer.value_size,
            query_key_rank=kept.query_key_rank or 0,
            output_rank=kept.output_rank or 0,
            gate_rank=kept.gate_rank or 0,
            up_rank=kept.up_rank or 0,
            rotary_selected=kept.query_key_size is not None and self.family.stack.rotary,
            norm_bias=shape.norm_bias and not self.replaces_layer_norms,
        )
        if hidden is None:
            return layer
        index = plan.kept_layers.index(number)
        stack = self.family.stack_of(index)
        end = stack.position(index, len(stack.sublayers))
        return replace(
            layer,
            hidden_size=hidden.sizes[stack.position(index)],
            middle_size=hidden.sizes[end - 1],
            output_size=hidden.sizes[end],
            attention_shortcut=shape.norms_after or hidden.changes_at(end - 1),
            ffn_shortcut=shape.norms_after or hidden.changes_at(end),
            norm_weights=not shape.norms_after,
            norm_bias=layer.norm_bias and not shape.norms_after,
        )

    def misfit(self, number: int, layer: LayerShape, half: Half, serving: Serving | None = None) -> str | None:
        """Return why half of a layer cannot be served as is asked for, or otherwise; None if it can (`serving.misfit`).

        vLLM gives several GPUs the same KV head, but not through its Transformers backend.
        """
        replicates = self.family.like_llama or not self.layers_differ
        asked = self.serving if serving is None else serving
        return misfit(asked, self.shape, number, layer, half, replicates=replicates)

    def misfit_of(self, plan: Plan, *halves: Half, serving: Serving | None = None) -> str | None:
        """Return why a plan cannot be served; None if it can. `halves`: of the layers, which count."""
        layers = [(number, self.layer(plan, number)) for number in plan.kept_layers]
        reasons = (self.misfit(*layer, half, serving) for half in halves for layer in layers)
        return next((reason for reason in reasons if reason is not None), None)

    def servable(self, options: Sequence[Plan], half: Half) -> list[Plan]:
        """Return the options of which this half of every layer can be served.

        Raises `MisfitError`, for the last one, if there are none.
        """
        if self.serving == ANY:
            return list(options)
        found = [option for option in options if self.misfit_of(option, half) is None]
        if not found:
            raise MisfitError(self.misfit_sentence(options[-1], half))
        return found

    def misfit_sentence(self, plan: Plan, *halves: Half) -> str:
        """Return a sentence why a plan cannot be served, with what can be asked for instead."""
        others = less_demanding(self.serving, self.advised_groups)
        fitting = next((other for other in others if self.misfit_of(plan, *halves, serving=other) is None), None)
        advice = "leave --serve out" if fitting in (None, ANY) else f"give --serve {fitting}"
        return f"{self.misfit_of(plan, *halves)}; {advice}."

    def refuse_step(self, step: int, name: str, size: int) -> None:
        """Raise `PlanError` for sizes that are multiples of more than the whole size."""
        if self.serving.tp * self.serving.group == 1:
            raise PlanError(f"--round-to {step} is above the {name} of {size}; give a smaller one.")
        raise MisfitError(
            f"--serve {self.serving} wants a {name} in multiples of {step}, which is above the {size} of this model; "
            "give fewer GPUs or a smaller group."
        )

    def refuse_misfits(self, plan: Plan) -> None:
        """Raise `MisfitError` for a plan that cannot be served as is asked for."""
        if self.serving != ANY and self.misfit_of(plan, "attention", "ffn") is not None:
            raise MisfitError(self.misfit_sentence(plan, "attention", "ffn"))
        self.refuse_stages(len(plan.kept_layers))

    def refuse_stages(self, layers: int) -> None:
        """Raise `PlanError` if so many layers are fewer than the stages of a pipeline."""
        if layers < self.serving.pp:
            raise PlanError(
                f"{layers} layers stay, which {self.serving.pp} stages of a pipeline cannot share; give --serve a "
                "smaller pp."
            )

    def refuse(self, plan: Plan) -> None:
        """Raise `PlanError`, with the size and the remedy, if the form cannot state the plan."""
        if self.refusal is not None:
            raise PlanError(self.refusal)
        if self.equal_inner_sizes and any(kept.query_key_size != kept.value_size for kept in plan.layers):
            raise PlanError(
                "This form has one size of heads; give --set query_key_size= and value_size= the same size."
            )
        if plan.hidden is not None and plan.hidden.num_groups > 1 and not self.subspaces_differ:
            can = self.remedy is not None and (self.instead is None or self.instead.subspaces_differ)
            other = f"add {self.remedy}, or " if can else "use "
            raise PlanError(
                f"{plan.hidden.num_groups} groups with their own subspaces need shortcut matrices, which this form "
                f"does not hold; {other}--set group_size=0."
            )
        projects = self.replaces_layer_norms or (self.shape.norms_after and self.subspaces_differ)
        if plan.hidden is not None and self.shape.layer_norms and not projects:
            advice = "; leave it out" if self.remedy is None else f"; add {self.remedy}"
            raise PlanError(
                f"Hidden size {plan.hidden.sizes[0]} turns LayerNorms into RMSNorms, which this form does not "
                f"hold{advice}."
            )

    def settle(self, method: Method, target: Target) -> Method:
        """Return the method with every `auto` that depends on the form or on stated sizes replaced by its choice.

        Raises `ConfigError` and `PlanError` for an explicit choice that the form or the family cannot have.
        """
        # 1. What is asked for must be possible.
        errors = errors_against(self, method, target)
        if errors:
            raise together(errors)
        # 2. How layers share the target
        if method.expert_counts == AUTO:
            plans = self.layers_differ and method.may_plan_experts and target.num_experts is None
            method = replace(method, expert_counts="sensitivity" if plans else "equal")
        if method.allocation == AUTO:
            # a share beside types is found by predicted losses, also where all layers are equal
            by_profile = method.leaves_out_layers or ((self.layers_differ or target.finds_share) and not method.slices)
            measures = method.leaves_out_layers or method.plans_inner_sizes
            own = "sensitivity" if measures or method.layer_allocation == AUTO else method.layer_allocation
            # where the stream passes all groups, the narrowest would be a bottleneck (benchmarks/records/claims.md)
            otherwise: Allocation = "error" if method.only_slices and self.family.stack.norms_after else "uniform"
            method = replace(method, allocation=own if by_profile else otherwise)
        errors = errors_against_profile(self, method)
        if errors:
            raise together(errors)
        # 3. What is planned or measured beside it
        by_sensitivity = method.allocation == "sensitivity" and not method.slices
        if method.ranks == AUTO:
            ranks = self.has_ranks and by_sensitivity and method.may_plan_ranks and method.solves
            method = replace(method, ranks="sensitivity" if ranks else "none")
        if method.curvature == AUTO:
            weighs = self.has_curvature and method.plans_ranks and method.may_weigh_output
            method = replace(method, curvature="fisher" if weighs else "none")
        if method.embedding == "low-rank" and not self.prices_embedding(method):
            raise PlanError(
                "--set embedding=low-rank beside an output head of its own needs output curvature; add "
                "--set curvature=fisher, or leave it out."
            )
        if method.embedding == AUTO:
            ranks = self.ranks_embedding and by_sensitivity and self.prices_embedding(method)
            method = replace(method, embedding="low-rank" if ranks else "none")
        return method
