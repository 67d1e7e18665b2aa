"""The form of a run's results: the grid of sizes that it can state, and the method as it is settled there."""

from dataclasses import replace
from pathlib import Path

from oneshot.checkpoint import Model
from oneshot.config import Config
from oneshot.errors import ConfigError, PlanError, together
from oneshot.export import Form, form_of
from oneshot.export.served import FORMS_OPENED, reason_against_form
from oneshot.method import AUTO, Method
from oneshot.planning import GROUPS_OF, Grid, errors_against, find_kept, reason_against_own_sizes
from oneshot.profiling import profile_origin
from oneshot.recipes import RECIPES


def settled_form(config: Config, model: Model) -> Form:
    """Return the form of the result; `auto` is the best one that holds it and that opens where it is to be served.

    Raises `PlanError` for a form that does not open there.
    """
    family, engine = model.family, config.target.serving.engine
    if config.form != AUTO:
        form = form_of(config.form, family)
    elif engine is None:
        form = _best_form(config, model)
    else:
        forms = [form_of(name, family) for name in FORMS_OPENED[engine]]
        opened = [one for one in forms if reason_against_form(engine, one, model) is None]
        form = next((one for one in opened if _suits(one, config, model)), form_of("stock", family))
    if (reason := reason_against_form(engine, form, model)) is not None:
        raise PlanError(reason)
    return form


def settled_method(config: Config, grid: Grid) -> Method:
    """Return the method with every `auto` settled; it has the curvature of a given profile if it can.

    Raises `ConfigError` and `PlanError` as `Grid.settle`.
    """
    method = config.method
    if config.profile is not None and method.curvature == AUTO:
        made = profile_origin(Path(config.profile).expanduser()).curvature
        may_weigh = grid.has_curvature and method.may_weigh_output
        method = replace(method, curvature="fisher" if made == "fisher" and may_weigh else "none")
    if grid.refusal is not None and config.gguf_options:  # the form that is advised has none of these
        of_gguf = [ConfigError(f"{option} is of GGUF files alone; leave it out.") for option in config.gguf_options]
        raise together([*errors_against(grid, method, config.target), *of_gguf])
    return grid.settle(method, config.target)


def grid_of(form: Form, model: Model, config: Config) -> Grid:
    """Return the grid of a form, which knows the form that its refusals advise: per-layer, or else stock."""
    grid, target = _grid_alone(form, model), config.target
    grid = replace(grid, kept=find_kept(target.keep, model.family, model.shape), serving=target.serving)
    if config.quantise in GROUPS_OF:
        grid = replace(grid, advised_groups=GROUPS_OF[config.quantise])
    others = [form_of(name, model.family) for name in ("per-layer", "stock")]
    grids = [_grid_alone(other, model) for other in others if other.name != form.name]
    return replace(grid, instead=next((one for one in grids if one.refusal is None), None))


def _grid_alone(form: Form, model: Model) -> Grid:
    """Return the grid of a form, which refuses an input whose layers differ already if the form cannot hold it."""
    grid = replace(form.grid(model), stored=model.stored if model.has_ranks else None)
    return replace(grid, refusal=grid.refusal or reason_against_own_sizes(grid))


def _suits(form: Form, config: Config, model: Model) -> bool:
    """Return whether a form that an engine opens holds what is asked for, and is per-layer only if it gains."""
    if form.name == "per-layer":
        return _best_form(config, model).name == "per-layer"
    return _method_in(form, config, model) is not None


def better_form(config: Config, model: Model, form: Form) -> Form | None:
    """Return the per-layer form if it gains and opens where the stock form's result is to be served; else None."""
    best = _best_form(config, model)
    gains = best.name == "per-layer" and form.name == "stock"
    return best if gains and reason_against_form(config.target.serving.engine, best, model) is None else None


def plans_by_profile(config: Config, model: Model, *, served: bool = True) -> bool:
    """Return whether a profile plans the run without its choice of a form and a method.

    `served`: whether the result has to open in the engine that is named.
    """
    target = config.target if served else replace(config.target, serve=None)
    plain = replace(config, form=AUTO, method=RECIPES["oneshot"], target=target)
    try:
        form = settled_form(plain, model)
    except PlanError:
        return False
    method = _method_in(form, plain, model)
    return method is not None and method.reads_profile


def _best_form(config: Config, model: Model) -> Form:
    """Return the per-layer form if ranks can be planned in it, or if no stock config can state what is asked for.

    Otherwise it is the stock form. Who leaves ranks out still gains by layers with sizes of their own. Who removes
    nothing gains nothing.
    """
    per_layer, stock = form_of("per-layer", model.family), form_of("stock", model.family)
    if not (config.target.asks_less or config.target.states_sizes) and (
        config.quantise is not None or _method_in(stock, config, model) is not None
    ):
        return stock
    with_ranks = _method_in(per_layer, replace(config, method=replace(config.method, ranks=AUTO)), model)
    if with_ranks is not None and with_ranks.plans_ranks:
        return per_layer
    holds_alone = _method_in(per_layer, config, model) is not None and _method_in(stock, config, model) is None
    return per_layer if holds_alone else stock


def _method_in(form: Form, config: Config, model: Model) -> Method | None:
    """Return the method as it is settled for a form; None if the form cannot hold what is asked for.

    A loss needs a profile, which forms of equal layers have no use for.
    """
    try:
        method = grid_of(form, model, config).settle(config.method, config.target)
    except (ConfigError, PlanError):
        return None
    return None if config.target.max_loss is not None and not method.reads_profile else method
