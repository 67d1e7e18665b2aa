"""All kinds of sizes for one target, within what the tier can hold."""

import contextlib
from dataclasses import replace

from oneshot.config import TIERS, CompressionConfig
from oneshot.errors import ConfigError, PlanError
from oneshot.plan.blocks import make_plan
from oneshot.plan.budget import Budget, wanted_parameters
from oneshot.plan.damages import Damages, predicted_damage, profiled_damages
from oneshot.plan.depth import with_fewer_layers
from oneshot.plan.hidden_size import plan_hidden
from oneshot.recipes import Recipe
from oneshot.records import LayerPlan, ModelShape, Plan, Profile


def plan_sizes(
    config: CompressionConfig,
    recipe: Recipe,
    shape: ModelShape,
    damages: Damages | None = None,
    budget: Budget | None = None,
) -> Plan:
    """The kept sizes of every kind whose whole model comes nearest to the target.

    What the user says is kept as said (`hidden_size`, `value_size`, `query_key_size`). FFN and heads, where the recipe
    reduces them, take what is left; the hidden size does where nothing else is reduced. Where groups of blocks have
    subspaces of their own and no width was said, all widths are equal here, and `spread_hidden_sizes` shares the
    parameters out once the spectra are known.

    With damages, FFN and heads take the sizes of which the least is predicted.

    Raises `ConfigError` for sizes that do not go together, `PlanError` where a size or the target is out of reach, or
    the tier cannot hold it.
    """
    blocks = recipe.ffn != "none" or recipe.heads != "none"
    if budget is None:
        budget = Budget(wanted_parameters(config, shape.stack().stored_parameters()))
    dense = budget.measure(shape.stack())
    if budget.target > dense:
        raise PlanError(f"The target of {budget.show(budget.target)} is above the dense model's {budget.show(dense)}.")
    if budget.target == dense:  # nothing was asked for, or nothing beyond the sizes said
        blocks = False
    if recipe.hidden != "none" and config.budget != "parameters":
        raise ConfigError(f"--budget {config.budget} goes with FFN neurons and heads; leave --hidden none.")
    _check_inner_sizes(config, shape)
    if config.embedding == "low-rank" and not shape.reads_embedding_out:
        raise PlanError("--embedding low-rank needs an output head that is the embedding; leave it out.")
    if config.up_steps and not shape.gated:
        raise PlanError("--up-steps needs FFNs with a gate, which this family has not; leave it out.")
    whole = LayerPlan(shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads)
    plan = Plan(
        (whole,) * shape.num_hidden_layers,
        head_unit(config, shape),
        query_key_size=config.query_key_size,
        value_size=config.value_size,
        tier=recipe.tier,
    )
    if recipe.hidden == "none" and config.hidden_size is not None:
        raise ConfigError("--hidden-size needs a method for the hidden size; add --hidden pca.")
    if recipe.hidden != "none" and (budget.target < dense or config.hidden_size is not None):
        plan = plan_hidden(config, recipe, shape, plan, blocks=blocks, target_parameters=round(budget.target))
    refuse_if_not_held(plan, shape)
    if blocks or (budget.target < dense and recipe.hidden == "none"):
        start = budget.measure(plan.stack(shape))
        if start < budget.target:
            raise PlanError(
                f"The sizes given leave {budget.show(start)}, fewer than the {budget.show(budget.target)} asked for; "
                "give larger ones."
            )

        def meet_budget(plan: Plan) -> Plan:
            return make_plan(
                shape,
                plan,
                budget,
                reduce_ffn=recipe.ffn != "none",
                reduce_heads=recipe.heads != "none",
                round_to=config.round_to,
                damages=damages,
                reduce_embedding=recipe.embedding != "none",
            )

        if recipe.depth == "none":
            return meet_budget(plan)
        return with_fewer_layers(shape, plan, budget, damages, meet_budget if blocks else None)
    return plan


def head_unit(config: CompressionConfig, shape: ModelShape) -> str:
    """What a removed head is: as asked for, or by default what is smaller."""
    if config.head_unit != "auto":
        return config.head_unit
    return "query-head" if shape.heads_per_group > 1 else "kv-group"


def refuse_if_not_held(plan: Plan, shape: ModelShape) -> None:
    """Raise `PlanError`, naming the size, where the plan's tier cannot hold it."""
    if plan.tier != "stock":
        return
    assert plan.is_uniform()
    for flag, size in (("value-size", plan.value_size), ("query-key-size", plan.query_key_size)):
        if size is not None:
            raise PlanError(f"--{flag} {size} has no place in a stock config; add --tier per-layer.")
    if plan.hidden is not None and plan.hidden.num_groups > 1:
        raise PlanError(
            f"{plan.hidden.num_groups} groups with subspaces of their own need shortcut matrices, which no stock "
            "config holds; add --tier per-layer, or --group-size 0."
        )
    if plan.hidden is not None and shape.norm_bias:
        raise PlanError(
            f"Hidden size {plan.hidden.sizes[0]} turns LayerNorms into RMSNorms, which this family's stock config does "
            "not hold; add --tier per-layer."
        )


def _check_inner_sizes(config: CompressionConfig, shape: ModelShape) -> None:
    for flag, size in (("value-size", config.value_size), ("query-key-size", config.query_key_size)):
        if size is not None and size >= shape.head_dim:
            raise PlanError(f"--{flag} {size} is not below the model's {shape.head_dim}; give a smaller one.")
    if config.query_key_size is None:
        return
    if shape.query_key_norms:
        raise PlanError("--query-key-size is not possible where queries and keys are normed (Qwen3); leave it out.")
    if config.query_key_size % 2 and shape.num_positions == 0:
        raise PlanError(f"--query-key-size {config.query_key_size} is odd; rotary pairs need an even one.")


def predicted_divergences(
    config: CompressionConfig, recipe: Recipe, shape: ModelShape, plan: Plan, profile: Profile, budget: Budget
) -> dict[str, float]:
    """KL divergence of the output from the dense model's, in nats per token, as the profile predicts it.

    Of the `plan`, and of the best plans of each tier for the same target: what a stock form costs. Small numbers can be
    trusted more than large ones, because damages are taken to add up.
    """
    damages = profiled_damages(profile, "sensitivity")
    predicted = {"plan": predicted_damage(plan, shape, damages)}
    for tier in TIERS:
        with contextlib.suppress(PlanError):
            best = plan_sizes(config, replace(recipe, tier=tier), shape, damages, budget)
            predicted[tier] = predicted_damage(best, shape, damages)
    return predicted
