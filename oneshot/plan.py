"""Budget -> Plan: the kept sizes, one of each kind for the whole model, that reach a number of stored parameters."""

from dataclasses import replace

from oneshot.config import CompressionConfig
from oneshot.errors import ConfigError, PlanError
from oneshot.recipes import Recipe
from oneshot.records import ModelShape, Plan

MAX_ROUND_TO = 64


def default_round_to(size: int) -> int:
    """The largest power of two up to 64 that is at most 1/16 of the width (GPUs and quantisers like multiples)."""
    step = MAX_ROUND_TO
    while step > 1 and step * 16 > size:
        step //= 2
    return step


def plan_sizes(
    config: CompressionConfig,
    recipe: Recipe,
    shape: ModelShape,
    *,
    dense_parameters: int,
    target_parameters: int,
) -> tuple[ModelShape, Plan]:
    """The shape after the hidden size has shrunk, and the plan for FFN and heads from there on.

    Alone, the hidden size follows from the target; beside FFN or heads the user says it, and they take what is left.

    Raises `ConfigError` where `hidden_size` is missing or has nothing to say, `PlanError` where a size is out of reach.
    """
    blocks = recipe.ffn != "none" or recipe.heads != "none"
    narrow, parameters = shape, dense_parameters
    if recipe.hidden == "none" and config.hidden_size is not None:
        raise ConfigError("--hidden-size needs a method for the hidden size; add --hidden pca.")
    if recipe.hidden != "none" and target_parameters < dense_parameters:
        if blocks == (config.hidden_size is None):
            raise ConfigError(
                "Give --hidden-size exactly where FFN or heads shrink, too: alone it follows from the target."
            )
        size = config.hidden_size or plan_hidden_size(
            shape, target_parameters=target_parameters, round_to=config.round_to
        )
        if size >= shape.hidden_size:
            raise PlanError(f"--hidden-size {size} is not below the model's {shape.hidden_size}; give a smaller one.")
        narrow = replace(shape, hidden_size=size)
        parameters = untied_parameters(narrow)
        if blocks and target_parameters > parameters:
            raise PlanError(
                f"--hidden-size {size} leaves {parameters:,} parameters, fewer than the {target_parameters:,} asked "
                "for; give a larger one."
            )
    plan = make_plan(
        narrow,
        dense_parameters=parameters,
        target_parameters=target_parameters if blocks or narrow == shape else parameters,
        reduce_ffn=recipe.ffn != "none",
        reduce_heads=recipe.heads != "none",
        head_unit=config.head_unit,
        round_to=config.round_to,
    )
    return narrow, plan


def make_plan(
    shape: ModelShape,
    *,
    dense_parameters: int,
    target_parameters: int,
    reduce_ffn: bool,
    reduce_heads: bool,
    head_unit: str,
    round_to: int | None,
) -> Plan:
    """The plan whose stored parameters come nearest to the target.

    With both kinds reduced, heads take the fraction nearest to the one that all blocks have to give, never more than
    one head per group below it; FFN width takes what is left, to a multiple of `round_to`.

    Args:
        dense_parameters: stored parameters of the whole input; target_parameters: those wanted.
        head_unit: `query-head`, `kv-group`, or `auto`: query heads where groups have several, else groups.

    Raises `PlanError` when nothing may be reduced or the target is out of reach.
    """
    if head_unit == "auto":
        head_unit = "query-head" if shape.heads_per_group > 1 else "kv-group"
    surplus = dense_parameters - target_parameters
    if surplus < 0:
        raise PlanError(
            f"The target of {target_parameters:,} parameters is above the dense model's {dense_parameters:,}."
        )
    plan = Plan(shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads, head_unit)
    if surplus == 0:
        return plan
    if not reduce_ffn and not reduce_heads:
        raise PlanError("Nothing may be reduced (--ffn none --heads none); allow one, or ask for --sparsity 0.")
    if reduce_heads:
        fraction = surplus / (shape.num_hidden_layers * shape.layer_parameters()) if reduce_ffn else None
        plan = _plan_heads(shape, plan, surplus, fraction)
    if reduce_ffn:
        plan = _plan_width(shape, plan, surplus, round_to or default_round_to(shape.intermediate_size))
    return plan


def untied_parameters(shape: ModelShape) -> int:
    """Stored parameters of a whole model with an output head of its own."""
    return shape.num_hidden_layers * shape.layer_parameters() + (2 * shape.vocab_size + 1) * shape.hidden_size


def plan_hidden_size(shape: ModelShape, *, target_parameters: int, round_to: int | None) -> int:
    """The hidden size, a multiple of `round_to`, whose untied model comes nearest to the target.

    Raises `PlanError` where no smaller hidden size reaches it (untying tied embeddings costs parameters first).
    """
    step = round_to or default_round_to(shape.hidden_size)
    sizes = range(step, shape.hidden_size, step)
    if not sizes:
        raise PlanError(f"--round-to {step} is above the hidden size of {shape.hidden_size}; give a smaller one.")
    parameters = {size: untied_parameters(replace(shape, hidden_size=size)) for size in sizes}
    best = min(sizes, key=lambda size: abs(parameters[size] - target_parameters))
    largest = untied_parameters(shape)
    if not parameters[sizes[0]] <= target_parameters <= largest:
        raise PlanError(
            f"The hidden size alone cannot reach {target_parameters:,} parameters: {sizes[0]} gives "
            f"{parameters[sizes[0]]:,}, all of it {largest:,}; ask for less, or shrink the FFN instead (--ffn id)."
        )
    return best


def removed_parameters(shape: ModelShape, plan: Plan) -> int:
    """Stored parameters that the plan removes from all layers."""
    return shape.num_hidden_layers * (shape.layer_parameters() - plan.apply(shape).layer_parameters())


def _plan_heads(shape: ModelShape, plan: Plan, surplus: int, fraction: float | None) -> Plan:
    """Remove heads: the given fraction of them, or (None) as many as come nearest to the surplus."""
    units = shape.num_key_value_heads if plan.head_unit == "kv-group" else shape.heads_per_group
    options = [_keep_units(shape, plan, kept) for kept in range(1, units + 1)]
    if fraction is not None:
        kept = max(1, units - round(fraction * units))
        # where attention outweighs the FFN one head may be more than is asked for; all of them remove nothing
        return next(option for option in options[kept - 1 :] if removed_parameters(shape, option) <= surplus)
    best = min(options, key=lambda option: abs(removed_parameters(shape, option) - surplus))
    most = removed_parameters(shape, options[0])
    if surplus > most:
        raise PlanError(
            f"Heads alone can give up {most:,} parameters of the {surplus:,} asked for; ask for less or allow --ffn id."
        )
    return best


def _keep_units(shape: ModelShape, plan: Plan, kept: int) -> Plan:
    if plan.head_unit == "kv-group":
        return Plan(plan.kept_intermediate_size, kept * shape.heads_per_group, kept, plan.head_unit)
    groups = shape.num_key_value_heads
    return Plan(plan.kept_intermediate_size, kept * groups, groups, plan.head_unit)


def _plan_width(shape: ModelShape, plan: Plan, surplus: int, round_to: int) -> Plan:
    """The FFN width, a multiple of `round_to`, that comes nearest to removing the surplus that is left."""
    rest = surplus - removed_parameters(shape, plan)
    per_neuron = shape.num_hidden_layers * (3 * shape.hidden_size + 2 * shape.mlp_bias)
    if round_to > shape.intermediate_size:
        raise PlanError(
            f"--round-to {round_to} is above the FFN width of {shape.intermediate_size}; give a smaller one."
        )
    exact = shape.intermediate_size - rest / per_neuron
    width = min(round(exact / round_to) * round_to, shape.intermediate_size)
    if width < round_to:
        most = removed_parameters(shape, plan) + per_neuron * (shape.intermediate_size - round_to)
        raise PlanError(
            f"The target removes {surplus:,} parameters, but this recipe can give up {most:,} at most; "
            "ask for a smaller --sparsity, or allow --heads id as well."
        )
    return Plan(width, plan.kept_num_attention_heads, plan.kept_num_key_value_heads, plan.head_unit)
