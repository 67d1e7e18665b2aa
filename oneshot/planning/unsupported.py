"""What a form or a family cannot have of what a run asks for: all of it at once, each with the remedy."""

from typing import TYPE_CHECKING

from oneshot.architecture import Feature
from oneshot.config import Config, Target
from oneshot.errors import ConfigError, OneshotError, PlanError, together
from oneshot.fields import display
from oneshot.method import AUTO, Method
from oneshot.selection import find_selector, needs_of

if TYPE_CHECKING:
    from oneshot.planning.grid import Grid


def errors_against(grid: "Grid", method: Method, target: Target) -> list[OneshotError]:
    """Return errors for everything that this form, or no form of the family, can have.

    If the form cannot hold the model, the others are about the form that is advised in its place.
    """
    if grid.refusal is not None:
        others = [] if grid.instead is None else errors_against(grid.instead, method, target)
        return [PlanError(grid.refusal), *others]
    found = _against_sizes(grid, method, target) + _against_kept(grid, method, target)
    features: dict[Feature, bool] = {
        "hidden size": method.slices,
        "up_proj": method.up_steps > 0,
        "experts": method.reduces_experts,
        "depth": method.leaves_out_layers,
        "sketch": method.reduces_ffn and method.sketch != "none",
        "moments": "moments" in needs_of(method.ffn),
        "held-out damping": method.holds_out,
        "latency": target.budget == "latency",
        "embedding ranks": method.embedding == "low-rank" and grid.embedding_ranks,
    }
    reasons = [grid.family.reason_against(feature) for feature, is_asked in features.items() if is_asked]
    found += [PlanError(reason) for reason in reasons if reason is not None]
    experts = grid.shape.experts
    if method.reduces_experts and experts is not None and experts.all_active:
        found.append(
            PlanError(f"Every token passes all {experts.count} experts of a layer, so none can go; set experts=none.")
        )
    _, heads = find_selector(method.ffn), find_selector(method.heads)
    if heads is not None and grid.family.shares_heads and not heads.shares_layers:
        found.append(
            PlanError(
                f"--set heads={method.heads} chooses heads for a single layer, but here all layers of a stack "
                "share theirs; use heads=id."
            )
        )
    if method.reduces_heads and target.asks_less and (reason := grid.reason_against_heads()) is not None:
        only_heads = not (method.reduces_ffn or method.slices or method.reduces_experts or method.leaves_out_layers)
        found.append(PlanError(reason.replace("heads=none", "heads=none and ffn=id") if only_heads else reason))
    has_depth = grid.family.reason_against("depth") is None
    needed: list[tuple[bool, str, str, str]] = [
        (method.leaves_out_sublayers and has_depth, "depth=sublayers", "sublayers_optional", "set depth=sensitivity"),
        (method.plans_inner_sizes, "inner_sizes=sensitivity", "inner_sizes_differ", "leave it out"),
        (method.plans_ranks, "ranks=sensitivity", "has_ranks", "leave it out"),
        (method.weighs_output, f"curvature={method.curvature}", "has_curvature", "leave it out"),
        (method.plans_experts, "expert_counts=sensitivity", "layers_differ", "leave it out"),
        (method.embedding == "low-rank", "embedding=low-rank", "embedding_ranks", "leave it out"),
    ]
    for is_asked, option, ability, otherwise in needed:
        if is_asked and not getattr(grid, ability):
            found.append(ConfigError(_needing(grid, option, ability, otherwise)))
    reason = grid.family.reason_against("embedding ranks")
    if method.embedding == "low-rank" and grid.embedding_ranks and not grid.ranks_embedding and reason is None:
        found.append(PlanError("--set embedding=low-rank needs RMSNorms and an output head; leave it out."))
    if not method.allocates_by_form:
        found += errors_against_profile(grid, method)
    return found


def errors_against_profile(grid: "Grid", method: Method) -> list[OneshotError]:
    """Return errors for a profile that the family cannot have, once its use is settled."""
    by_scores = method.reads_profile and method.allocation in ("flap", "stat", "stat-reversed")
    features: dict[Feature, bool] = {"profile": method.reads_profile, "neuron scores": by_scores}
    reasons = [grid.family.reason_against(feature) for feature, is_asked in features.items() if is_asked]
    found: list[OneshotError] = [PlanError(reason) for reason in reasons if reason is not None]
    if grid.shape.own_sizes and method.reads_profile and method.allocation == "flap":
        found.append(
            PlanError(
                "--set allocation=flap compares equally many neurons in every layer, but layers of this model have "
                "sizes of their own; set allocation=sensitivity."
            )
        )
    return found


def refuse_idle(grid: "Grid", method: Method, config: Config) -> None:
    """Raise `ConfigError` for settings that somebody has given and that cannot act beside the others.

    A recipe may state settings that cannot act, because it is for all models and sizes. `method`: settled.
    """
    target, given = config.target, config.given_settings
    is_mixture = grid.shape.experts is not None
    of_mixtures = f"is for mixtures of experts, which {grid.family.model_type} is not"
    smaller_values = bool(target.value_size or target.inner_rate) or method.plans_inner_sizes
    of_values = "needs smaller values in the heads (value_size, inner_rate or inner_sizes)"
    of_hidden = "needs a smaller hidden size (hidden)"
    of_dense = "needs correction=two-stream"
    of_pivots = "needs neurons chosen by pivots (ffn)"
    by_groups = method.takes_pivots and method.pivoting in ("grouped", "tournament")
    acting: dict[str, tuple[bool, str]] = {
        "sketch": (method.takes_pivots, of_pivots),
        "pivoting": (method.takes_pivots, of_pivots),
        "sketch_size": (method.takes_pivots and method.sketch != "none", "needs pivots of a sketch (sketch)"),
        "pivot_group_size": (by_groups, "needs pivots of groups (pivoting)"),
        "head_unit": (method.reduces_heads or config.profile is not None, "needs a selector of heads (heads)"),
        "layer_allocation": (
            method.layer_allocation in (AUTO, method.allocation),
            f"is for layers of different sizes, but the allocation here is {method.allocation}",
        ),
        "damping": (method.solves or method.reads_profile, "needs least squares (correction) or a profile"),
        "residual_weight": (method.follows_dense, of_dense),
        "residual_target": (method.follows_dense, of_dense),
        "group_size": (method.slices, of_hidden),
        "token_weighting": (method.slices, of_hidden),
        "shared_weight": (
            method.slices and method.group_size > 0,
            "needs hidden sizes of groups of sublayers (hidden and group_size)",
        ),
        "value_features": (smaller_values, of_values),
        "value_weights": (smaller_values, of_values),
        "expert_damping": (is_mixture, of_mixtures),
        "expert_residual_weight": (is_mixture, of_mixtures),
    }
    errors = [
        ConfigError(f"{display(name, given[name])} {reason}; leave it out.")
        for name, (acts, reason) in acting.items()
        if name in given and not acts
    ]
    if errors:
        raise together(errors)


def reason_against_own_sizes(grid: "Grid") -> str | None:
    """Return a sentence why a form cannot hold layers whose sizes differ already; None if it can."""
    heads = {(one.num_attention_heads, one.num_key_value_heads) for one in grid.shape.distinct}
    differ = (grid.shape.own_sizes and not grid.layers_differ) or (len(heads) > 1 and not grid.heads_differ)
    if differ:
        return "The layers of this model have sizes of their own, which this form lacks; use --form per-layer."
    return None


def _against_sizes(grid: "Grid", method: Method, target: Target) -> list[OneshotError]:
    """Return errors for sizes that are stated and that the family or the form cannot have."""
    found: list[OneshotError] = []
    otherwise = "leave it out" if target.states_share else "give --sparsity in its place"
    name = grid.family.model_type
    hidden = "hidden_size" if target.hidden_size is not None else "hidden_rate"
    if target.states_hidden_size and not method.slices:
        if grid.family.reason_against("hidden size") is not None:
            found.append(PlanError(f"--set {hidden}= is not possible for {name}; {otherwise}."))
        else:
            found.append(ConfigError(f"--set {hidden}= needs a method for the hidden size; add --set hidden=pca."))
    if target.num_experts is not None and not method.reduces_experts:
        if grid.family.reason_against("experts") is not None:
            found.append(PlanError(f"--set num_experts= is not possible for {name}; {otherwise}."))
        else:
            found.append(
                ConfigError(
                    f"--set num_experts={target.num_experts} needs a selector of experts; add --set experts=effects."
                )
            )
    if (target.intermediate_size is not None or target.inner_rate) and not method.reduces_ffn:
        width = (
            f"inner_rate={target.inner_rate}" if target.inner_rate else f"intermediate_size={target.intermediate_size}"
        )
        found.append(ConfigError(f"--set {width} needs a selector of neurons; add --set ffn=id."))
    inner = {"value_size": target.value_size, "query_key_size": target.query_key_size}
    stated = {size: f"{size}={value}" for size, value in inner.items() if value is not None}
    if target.inner_rate:
        stated = dict.fromkeys(inner, f"inner_rate={target.inner_rate}")
    reason = grid.family.reason_against("queries and keys") if "query_key_size" in stated else None
    if reason is not None and target.inner_rate:
        reason = f"--set inner_rate= is not possible for {name}, whose queries and keys stay; {otherwise}."
    if reason is not None:
        found.append(PlanError(reason.replace("leave it out", otherwise)))
    elif stated and not grid.inner_sizes:
        found += [
            PlanError(_needing(grid, option, "inner_sizes", otherwise)) for option in dict.fromkeys(stated.values())
        ]
    return found


def _against_kept(grid: "Grid", method: Method, target: Target) -> list[OneshotError]:
    """Return errors for what is to stay as it is where the form, or another option, changes it all the same."""
    kept = grid.kept
    if not target.keep:
        return []
    option = f"--keep {' '.join(target.keep)}"
    if grid.stored is not None:
        return [PlanError(f"{option} cannot keep matrices of low rank, which this model stores; leave it out.")]
    inner = target.value_size or target.query_key_size or target.inner_rate
    changes_all: dict[str, bool] = {
        "--set hidden=": method.slices,
        "--set depth=": method.leaves_out_layers,
        "--set intermediate_size=": target.intermediate_size is not None,
        "sizes inside heads": bool(inner) or method.plans_inner_sizes,
        "--set experts=": method.reduces_experts and bool(kept.ffn),
        "--up-steps": method.up_steps > 0,
    }
    found: list[OneshotError] = [
        ConfigError(f"{option} and {name} do not go together, because that changes every layer; leave one out.")
        for name, is_asked in changes_all.items()
        if is_asked
    ]
    needs = {"layers_differ": kept.ffn and method.reduces_ffn, "heads_differ": kept.attention and method.reduces_heads}
    lacking = [ability for ability, is_needed in needs.items() if is_needed and not getattr(grid, ability)]
    if lacking:
        other = grid.instead
        can = grid.remedy is not None and (other is None or all(getattr(other, ability) for ability in lacking))
        remedy = f"add {grid.remedy}, or leave it out" if can else "leave it out"
        found.append(ConfigError(f"{option} needs layers of different sizes, which this form lacks; {remedy}."))
    return found


def _needing(grid: "Grid", option: str, ability: str, otherwise: str) -> str:
    """Return a sentence about an option that this form cannot have, with what to do instead."""
    other = grid.instead
    if grid.remedy is None or (other is not None and not getattr(other, ability)):
        return f"--set {option} is not possible for this {grid.family.model_type}; {otherwise}."
    return f"--set {option} needs {grid.remedy}; add it, or {otherwise}."
