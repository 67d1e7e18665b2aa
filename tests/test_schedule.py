"""The schedule: one function decides the stages, streams and profiled kinds of a run, and the run follows it."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from factories import MakeCheckpoint, MakeConfig

from oneshot import Config, Target
from oneshot.architecture import ModelShape
from oneshot.compression import find_subspaces
from oneshot.compression import layer as layer_module
from oneshot.errors import OneshotError, PlanError
from oneshot.export import FORMS
from oneshot.families import LLAMA
from oneshot.families.opt import OPT
from oneshot.method import Correction, SelectorName
from oneshot.pipeline import compress
from oneshot.planning import Grid, Plan, make_plan
from oneshot.profiling import PROBED_KINDS, LayerProfiler
from oneshot.recipes import find_recipe
from oneshot.schedule import Schedule, make_schedule, profile_schedule
from oneshot.stream import States
from oneshot.text import load_text

TIED = ModelShape(4, 64, 256, 8, 4, 8, vocab_size=100, tied=True)
UNTIED = ModelShape(4, 64, 256, 8, 4, 8, vocab_size=100)
OPT_SHAPE = ModelShape(
    4,
    64,
    256,
    8,
    8,
    8,
    True,
    True,
    True,
    vocab_size=100,
    tied=True,
    layer_norms=True,
    norm_bias=True,
    gated=False,
    num_positions=50,
)
FFN, HEADS, LAYER, SUBLAYER, INNER, RANK = "ffn", "heads", "layer", "sublayer", "inner", "rank"


def grid_of(form: str, shape: ModelShape = TIED) -> Grid:
    checkpoint = SimpleNamespace(config={"model_type": "llama", "hidden_size": shape.hidden_size, "rms_norm_eps": 1e-6})
    model: Any = SimpleNamespace(family=OPT if shape.layer_norms else LLAMA, shape=shape, checkpoint=checkpoint)
    return FORMS[form].grid(model)  # type: ignore[index]


def schedule_of(
    form: str, recipe: str, *, shape: ModelShape = TIED, has_profile: bool = False, **options: Any
) -> tuple[Schedule, Plan]:
    """Return the schedule of a run with these options, and the plan with equal layers that it is made for."""
    if not options.keys() & {"sparsity", "hidden_size", "value_size", "query_key_size"}:
        options["sparsity"] = 0.2
    config = Config.of("in", "out", recipe=recipe, form=form, **options)
    grid = grid_of(form, shape)
    method = grid.settle(config.method, config.target)
    plan = make_plan(grid, method, config.target)
    return make_schedule(method, plan, grid, num_tokens=config.text.num_tokens, has_profile=has_profile), plan


# (form, recipe, options) -> the attributes of the schedule that differ from an empty one
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # equal layers: no profile
    ("stock", "oneshot", {}, {"streams": 2, "dense_every": 2}),
    ("stock", "oneshot", {"sparsity": 0.0}, {}),
    ("stock", "oneshot", {"correction": "same-layer"}, {"streams": 1}),
    ("stock", "oneshot", {"correction": "none"}, {"streams": 1}),
    ("stock", "flap", {}, {"streams": 1}),
    ("stock", "random", {}, {}),
    ("stock", "magnitude", {}, {}),
    ("stock", "magnitude", {"correction": "bias"}, {"streams": 1}),
    ("stock", "magnitude", {"heads": "magnitude"}, {"streams": 1, "solves_heads": True}),
    ("stock", "stat", {}, {"streams": 2, "dense_every": 1, "solves_heads": True}),
    ("stock", "stat", {"sparsity": 0.0}, {"solves_heads": True}),
    # up_proj
    ("stock", "oneshot", {"up_steps": 2}, {"streams": 2, "dense_every": 2, "corrects_up": True}),
    ("stock", "oneshot", {"up_steps": 2, "correction": "same-layer"}, {"streams": 1, "corrects_up": True}),
    ("stock", "oneshot", {"up_steps": 2, "sparsity": 0.0}, {}),
    ("per-layer", "oneshot", {"up_steps": 2, "value_size": 4}, {"streams": 2, "dense_every": 2, "solves_heads": True}),
    # the hidden size
    ("stock", "tcsp", {}, {"finds_subspaces": True}),
    ("per-layer", "group-pca", {"group_size": 2}, {"finds_subspaces": True}),
    (
        "stock",
        "tcsp",
        {"correction": "two-stream"},
        {"finds_subspaces": True, "streams": 2, "dense_every": 1, "solves_heads": True},
    ),
    (
        "stock",
        "tcsp",
        {"hidden_size": 60, "ffn": "id", "sparsity": 0.3, "correction": "same-layer"},
        {"finds_subspaces": True, "streams": 1},
    ),
    # sizes inside heads
    ("per-layer", "oneshot", {"value_size": 4}, {"streams": 2, "dense_every": 2, "solves_heads": True}),
    ("per-layer", "oneshot", {"query_key_size": 4}, {"streams": 2, "dense_every": 2}),
    ("per-layer", "magnitude", {"query_key_size": 4}, {"streams": 1}),
    ("per-layer", "magnitude", {"value_size": 4}, {"streams": 1, "solves_heads": True}),
    # a profile decides
    (
        "per-layer",
        "oneshot",
        {},
        {
            "plans_by_profile": True,
            "profiled_kinds": (FFN, RANK),
            "profiled_tables": ("embedding",),
            "weighs_output": True,
            "measures_curvature": True,
            "streams": 2,
            "dense_every": 2,
        },
    ),
    (
        "per-layer",
        "oneshot",
        {"up_steps": 2, "embedding": "none", "curvature": "none"},
        {"plans_by_profile": True, "profiled_kinds": (FFN, RANK), "streams": 2, "dense_every": 2, "corrects_up": True},
    ),
    (
        "per-layer",
        "oneshot",
        {"curvature": "fisher", "embedding": "none"},
        {
            "plans_by_profile": True,
            "profiled_kinds": (FFN, RANK),
            "weighs_output": True,
            "measures_curvature": True,
            "streams": 2,
            "dense_every": 2,
        },
    ),
    (
        "per-layer",
        "oneshot",
        {"ranks": "none", "embedding": "none"},
        {"plans_by_profile": True, "profiled_kinds": (FFN,), "streams": 2, "dense_every": 2},
    ),
    ("per-layer", "oneshot", {"sparsity": 0.0}, {}),
    (
        "per-layer",
        "oneshot",
        {"heads": "id"},
        {
            "plans_by_profile": True,
            "profiled_kinds": (FFN, HEADS),
            "profiled_tables": ("embedding",),
            "streams": 2,
            "dense_every": 2,
            "solves_heads": True,
        },
    ),
    ("per-layer", "oneshot", {"sparsity": 0.0}, {}),
    ("per-layer", "oneshot", {"allocation": "uniform"}, {"streams": 2, "dense_every": 2}),
    (
        "per-layer",
        "oneshot",
        {"inner_sizes": "sensitivity", "embedding": "none"},
        {
            "plans_by_profile": True,
            "profiled_kinds": (FFN, INNER),
            "streams": 2,
            "dense_every": 2,
            "solves_heads": True,
        },
    ),
    (
        "per-layer",
        "magnitude",
        {"inner_sizes": "sensitivity"},
        {"plans_by_profile": True, "profiled_kinds": (FFN, INNER), "streams": 1, "solves_heads": True},
    ),
    ("per-layer", "flap", {}, {"plans_by_profile": True, "profiled_kinds": (FFN,), "streams": 1}),
    ("per-layer", "magnitude", {}, {"plans_by_profile": True, "profiled_kinds": (FFN,)}),
    (
        "stock",
        "stat",
        {"allocation": "sensitivity"},
        {
            "plans_by_profile": True,
            "profiled_kinds": (FFN, HEADS),
            "streams": 2,
            "dense_every": 1,
            "solves_heads": True,
        },
    ),
    # whole layers
    (
        "stock",
        "oneshot",
        {"depth": "sensitivity"},
        {"plans_by_profile": True, "profiled_kinds": (FFN, LAYER), "streams": 2, "dense_every": 2},
    ),
    ("stock", "oneshot", {"depth": "sensitivity", "sparsity": 0.0}, {}),
    (
        "per-layer",
        "oneshot",
        {"depth": "sublayers", "ffn": "none", "embedding": "none"},
        {"plans_by_profile": True, "profiled_kinds": (LAYER, SUBLAYER)},
    ),
    (
        "stock",
        "oneshot",
        {"depth": "sensitivity", "ffn": "none"},
        {"plans_by_profile": True, "profiled_kinds": (LAYER,)},
    ),
    (
        "stock",
        "oneshot",
        {"depth": "sensitivity", "ffn": "none", "heads": "id", "sparsity": 0.1},
        {"plans_by_profile": True, "profiled_kinds": (HEADS, LAYER), "streams": 1, "solves_heads": True},
    ),
]


@pytest.mark.parametrize(("form", "recipe", "options", "expected"), CASES, ids=str)
def test_the_schedule_of_a_run(form: str, recipe: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    schedule, _ = schedule_of(form, recipe, **options)
    assert schedule == Schedule(**expected)
    assert schedule.two_streams == (schedule.streams == 2)
    assert schedule.makes_profile == bool(schedule.profiled_kinds)
    reads = bool(expected.keys() & {"streams", "plans_by_profile", "finds_subspaces"})
    assert schedule.reads_text == reads


@pytest.mark.parametrize(("form", "recipe", "options", "expected"), CASES, ids=str)
def test_a_given_profile_only_removes_the_profiled_kinds(
    form: str, recipe: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    schedule, _ = schedule_of(form, recipe, has_profile=True, **options)
    assert schedule == Schedule(**expected | {"profiled_kinds": ()})
    assert not schedule.makes_profile
    assert schedule.may_rank_tables == ("profiled_tables" in expected)


@pytest.mark.parametrize(
    ("shape", "curvature"), itertools.product((TIED, UNTIED, OPT_SHAPE), ("fisher", "none")), ids=str
)
def test_an_embedding_beside_rms_norms_is_profiled_if_its_price_is_known(shape: ModelShape, curvature: str) -> None:
    """The price is of the output head that the embedding is, or else of output curvature."""
    ranked = not shape.layer_norms and (shape.tied or curvature == "fisher")
    given = {} if shape.layer_norms else {"curvature": curvature}
    schedule, _ = schedule_of("per-layer", "oneshot", shape=shape, sparsity=0.1, **given)
    tables = ("embedding",) if shape.tied else ("embedding", "output_head")
    assert schedule.profiled_tables == (tables if ranked else ())
    assert schedule.profiled_kinds == ((FFN, RANK) if shape.gated else (FFN,))
    alone = profile_schedule(grid_of("stock", shape), replace(find_recipe("oneshot"), curvature=curvature))
    weighs = curvature == "fisher"
    assert alone == Schedule(
        profiled_kinds=(FFN, HEADS, LAYER, SUBLAYER, INNER, RANK),
        profiled_tables=tables if ranked else (),
        weighs_output=weighs,
        measures_curvature=weighs,
    )
    assert alone.reads_text


def test_ranks_of_an_embedding_beside_a_head_need_output_curvature() -> None:
    asked: dict[str, Any] = {"shape": UNTIED, "sparsity": 0.1, "embedding": "low-rank"}
    assert schedule_of("per-layer", "oneshot", **asked)[0].profiled_tables == ("embedding", "output_head")
    for other in ({"curvature": "none"}, {"ranks": "none"}):
        with pytest.raises(PlanError, match="needs output curvature; add --set curvature=fisher, or leave it out"):
            schedule_of("per-layer", "oneshot", **asked, **other)


def test_combinations_of_selectors_and_corrections() -> None:
    """Check the rules for every pair of selectors, every correction and two forms, if the options are valid."""
    checked = 0
    for form, ffn, heads, correction in itertools.product(
        ("stock", "per-layer"), get_args(SelectorName), ("none", "id", "magnitude"), get_args(Correction)
    ):
        try:
            schedule, plan = schedule_of(
                form, "oneshot", ffn=ffn, heads=heads, correction=correction, sparsity=0.04, embedding="none"
            )
        except OneshotError:
            assert (ffn, heads) == ("none", "none")
            continue
        checked += 1
        by_weights = ffn in ("magnitude", "random", "none") and heads == "none" and correction == "none"
        assert plan.shrinks_layers(TIED)
        follows = correction == "two-stream" and ffn != "none"  # heads follow their own layer
        assert schedule.streams == (0 if by_weights else 2 if follows else 1)
        assert schedule.plans_by_profile == (form == "per-layer")
        probed = {FFN: ffn != "none", HEADS: heads != "none", LAYER: False, SUBLAYER: False, INNER: False}
        probed[RANK] = probed[FFN] and not probed[HEADS] and correction in ("same-layer", "two-stream")
        kinds = tuple(kind for kind in PROBED_KINDS if probed.get(kind))
        assert schedule.profiled_kinds == (kinds if form == "per-layer" else ())
        assert schedule.solves_heads == (heads != "none")
        assert not schedule.corrects_up
        assert not schedule.finds_subspaces
    assert checked == 2 * (9 * 3 - 1) * 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sparsity": 0.0},
        {"recipe": "magnitude"},
        {"recipe": "stat"},
        {"recipe": "tcsp"},
        {"recipe": "tcsp", "correction": "two-stream"},
        {"correction": "same-layer", "up_steps": 1},
        {"form": "per-layer", "heads": "id", "round_to": 1},
        {"form": "per-layer", "value_size": 4, "recipe": "magnitude"},
        {"depth": "sensitivity", "ffn": "none", "sparsity": 0.3},
    ],
    ids=str,
)
def test_the_run_follows_its_schedule(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record the schedule, and count the streams, profiles, corrections of `up_proj` and searches of subspaces."""
    seen: dict[str, list[Any]] = {"schedules": [], "streams": [], "kinds": [], "up": [], "subspaces": [], "texts": []}

    def recorded(name: str, original: Any, value: Any = lambda result, keywords: True) -> Any:
        def record(*arguments: Any, **keywords: Any) -> Any:
            result = original(*arguments, **keywords)
            seen[name].append(value(result, keywords))
            return result

        return record

    monkeypatch.setattr(
        "oneshot.job.job.make_schedule", recorded("schedules", make_schedule, lambda schedule, _: schedule)
    )
    monkeypatch.setattr(
        "oneshot.job.layers.States", recorded("streams", States, lambda states, _: 1 + states.has_dense)
    )
    monkeypatch.setattr("oneshot.job.sizes.find_subspaces", recorded("subspaces", find_subspaces))
    monkeypatch.setattr(layer_module, "correct_up", recorded("up", layer_module.correct_up))
    monkeypatch.setattr("oneshot.run.calibration.load_text", recorded("texts", load_text))
    monkeypatch.setattr(
        LayerProfiler,
        "__init__",
        recorded("kinds", LayerProfiler.__init__, lambda _, keywords: tuple(keywords["probed"])),
    )
    report = compress(make_config(make_checkpoint(layers=3), **options))
    (schedule,) = seen["schedules"]
    assert seen["streams"] == ([schedule.streams] if schedule.streams else [])
    assert seen["kinds"] == ([schedule.profiled_kinds] if schedule.makes_profile else [])
    assert bool(seen["up"]) == schedule.corrects_up
    assert bool(seen["subspaces"]) == schedule.finds_subspaces
    assert bool(seen["texts"]) == schedule.reads_text == (report.calibration is not None)


def test_the_plan_of_a_target_without_sparsity_is_scheduled() -> None:
    """Give sizes alone: the FFN keeps its width, so no profile is made although the form lets layers differ."""
    grid = grid_of("per-layer")
    method = grid.settle(find_recipe("oneshot"), Target(value_size=4))
    plan = make_plan(grid, method, Target(value_size=4))
    schedule = make_schedule(method, plan, grid, num_tokens=1025, has_profile=False)
    assert schedule == Schedule(streams=2, dense_every=1, solves_heads=True)


def test_no_dense_stream_passes_if_few_tokens_give_its_residual_no_weight() -> None:
    """Four tokens for each of 256 neurons: `SublayerTask.residual_weight` is 0 up to there."""
    grid = grid_of("stock")
    for options, few in (({}, 1), ({"residual_target": "sublayer"}, 2), ({"up_steps": 1}, 2)):
        method = grid.settle(find_recipe("oneshot", **options), Target(sparsity=0.2))
        plan = make_plan(grid, method, Target(sparsity=0.2))
        for num_tokens, streams in ((1024, few), (1025, 2)):
            found = make_schedule(method, plan, grid, num_tokens=num_tokens, has_profile=False)
            assert found.streams == streams, (options, num_tokens)
