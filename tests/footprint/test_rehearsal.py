"""Predicted bytes of a layer of a 7B, beside what the real code holds that runs on tensors without values.

Runs that are small enough to be measured have most of their memory outside the tensors that grow with a model. Here is
nothing else: no heap, no files, no next layer that is read.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meter import Meter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_estimate import MIXTURES, Described, described_work

from oneshot.checkpoint import Model, identify
from oneshot.compression import LayerCompressor
from oneshot.footprint import terms
from oneshot.footprint.layer_memory import layer_stages
from oneshot.footprint.profile_memory import profile_stages
from oneshot.footprint.terms import Stage
from oneshot.footprint.work import Work
from oneshot.machine import Machine
from oneshot.profiling.curvature import measured_sizes
from oneshot.profiling.profiler import LayerProfiler
from oneshot.stream import States
from oneshot.stream.store import ActivationStore
from oneshot.stream.template import Template
from oneshot.text import Text

META, CPU = torch.device("meta"), torch.device("cpu")
ANSWERS = {
    **dict.fromkeys(("refuse_overflow", "ridged_cholesky", "cholesky_together"), True),
    **dict.fromkeys(("max_coefficient", "relative", "relative_error", "finish", "_add_ffn"), 1.0),
    "_warn_if_dead": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": 1024}
ROUTED = {"alone": 512, "finish": 4096}  # rows of every expert in a batch, and in all


class Weightless(Described):
    """A described checkpoint that is read as tensors without values."""

    has_values = False

    def read(self, names: Any, into: Any = None) -> dict[str, torch.Tensor]:
        return {name: torch.empty(self.shapes[name], dtype=torch.bfloat16, device=META) for name in names}


@dataclass(frozen=True)
class Curvature:
    """Matrices without values in place of measured ones."""

    sizes: dict[str, int]

    def of_layer(self, layer: int, device: torch.device) -> "Curvature":
        return self

    def __getattr__(self, name: str) -> torch.Tensor:
        return torch.empty(self.sizes[name], self.sizes[name], device=META)


@pytest.fixture(scope="module")
def model() -> Model:
    return identify(Weightless("7B"))


@pytest.fixture(scope="module")
def mixture() -> Iterator[Model]:
    """A model as wide as Qwen3-30B-A3B, with fewer experts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(MIXTURES, "8 experts", MIXTURES["Qwen3-30B-A3B"] | EXPERTS)
        yield identify(Weightless("8 experts"))


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    """Give the meter; what needs values, or is an implementation of the CPU, is one operation."""

    def pivots(gram: torch.Tensor, *, rank: int) -> torch.Tensor:
        return torch.empty(*gram.shape[:-2], rank, dtype=torch.int64, device=META)

    def others(columns: torch.Tensor, count: int) -> torch.Tensor:
        return torch.empty(count - len(columns), dtype=torch.int64, device=META)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.empty_like(query)

    def template(config: Any, model: Model, machine: Machine, length: int) -> Template:
        with _disable_current_modes():  # its modules are on the meta device in a real run, too
            made = Template(config, model, replace(machine, device=CPU), length)
            made.arguments = tree_map(
                lambda one: one.to(META) if isinstance(one, torch.Tensor) else one, made.arguments
            )
        for layers in made.layers.values():
            found.leave_out(*(one for layer in layers.values() for one in layer.parameters()))
        return made

    for module in ("linalg.pivoted_qr", "selection.pivots"):
        monkeypatch.setattr(f"oneshot.{module}.cholesky_pivots_", pivots)
    monkeypatch.setattr("oneshot.linalg.interpolative.columns_without", others)

    def in_order(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.argsort(chosen.flatten()), torch.empty(count, dtype=torch.int64, device=META)

    monkeypatch.setattr("oneshot.stream.placement._in_order", in_order)
    monkeypatch.setattr("oneshot.compression.layer_folder.to_host", lambda tensors: tensors)
    monkeypatch.setattr("oneshot.compression.expert_correction.solved_together", lambda *_: 1)  # as on a CPU
    monkeypatch.setattr("oneshot.stream.layers.Template", template)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    found = Meter(ANSWERS | ROUTED)
    return found


def stored() -> Iterator[torch.Tensor]:
    """Yield the stored states, which stages count apart."""
    return (one._tensor for one in gc.get_objects() if type(one) is ActivationStore and one._tensor is not None)


def predicted(work: Work, stages: Sequence[Stage]) -> float:
    """Return the bytes of the largest stage, without the layer that is read meanwhile."""
    ahead = sum(term.bytes for term in terms.layer(work)) - work.layer_bytes
    return max(sum(term.bytes for term in stage.terms) for stage in stages) - ahead


def prepared(model: Model, changes: dict[str, Any]) -> tuple[Work, Machine, Text, Curvature | None]:
    _, work = described_work(model, None, {"num_sequences": 2, "batch_size": 1, "form": "stock"} | changes)
    machine = Machine(META, work.dtype, Path(), store="device", batch_size=work.machine.batch_size)
    text = Text(torch.zeros(work.text.num_sequences, work.text.sequence_length, dtype=torch.int64), "zeros")
    sizes = measured_sizes(model.family, model.shape, model.family.stack)
    return work, machine, text, Curvature(sizes) if work.schedule.measures_curvature else None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_sequences": 8, "batch_size": 4},
        {"recipe": "flap"},
        {"damping": "auto"},
        {"residual_target": "sublayer"},  # the dense stream passes, however few its tokens are
        {"form": "per-layer"},
    ],
    ids=str,
)
def test_a_layer_holds_what_is_predicted(model: Model, meter: Meter, changes: dict[str, Any]) -> None:
    compare_layer(model, meter, changes)


def test_experts_hold_what_is_predicted(mixture: Model, meter: Meter) -> None:
    compare_layer(mixture, meter, {})


def compare_layer(model: Model, meter: Meter, changes: dict[str, Any]) -> None:
    work, machine, text, curvature = prepared(model, changes)
    assert work.plan is not None
    with torch.inference_mode():
        states = States(model, machine, text, dense_every=work.schedule.dense_every)
        compressor = LayerCompressor(
            model, work.method, work.plan, work.grid, machine, states=states, curvature=curvature
        )
        tensors = model.read_layer(0)
        meter.leave_out(*stored())
        with meter:
            meter.hold(*tensors.values())
            compressor.compress_layer(0, tensors)
    compare(meter, predicted(work, layer_stages(work)))


@pytest.mark.parametrize("changes", [{}, {"curvature": "none"}], ids=str)
@pytest.mark.parametrize("name", ["model", "mixture"])
def test_a_profiled_layer_holds_what_is_predicted(
    name: str, meter: Meter, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(name)
    work, machine, text, curvature = prepared(model, {"form": "per-layer"} | changes)
    probed = work.schedule.profiled_kinds
    with torch.inference_mode():
        profiler = LayerProfiler(
            model, machine, text, head_unit="query-head", damping=0.03, probed=probed, curvature=curvature
        )
        tensors = model.read_layer(0)
        meter.leave_out(*stored())
        with meter:
            meter.hold(*tensors.values())
            profiler.profile_layer(0, tensors)
    stages = [stage for stage in profile_stages(work) if stage.name.endswith(("statistics", "curves"))]
    compare(meter, predicted(work, stages))


def compare(meter: Meter, expected: float) -> None:
    print(f"{meter.peak_bytes / expected:.3f} of {expected / 2**30:.2f} GiB, {meter.operations}, {meter.peak_site}")
    assert 0.6 < meter.peak_bytes / expected <= 1, meter.peak_site
