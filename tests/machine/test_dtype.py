"""The dtype of `--dtype auto`: by the rates of this machine, kept by a run that continues, and by its memory."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from interruptions import stop_before

from oneshot.config import MachineOptions
from oneshot.errors import MemoryLimitError
from oneshot.footprint import Bounds
from oneshot.machine import Machine, choose_dtype
from oneshot.machine.dtype import DtypeChoice, product_rates
from oneshot.pipeline import compress, predict
from oneshot.run.dtype import settled_dtype

CPU = torch.device("cpu")
SINGLE = {"float32": 2e10, "bfloat16": 1e10}
HALF = {"float32": 1e10, "bfloat16": 2e10}


def instructions(*names: str) -> Callable[[], dict[str, bool]]:
    return lambda: dict.fromkeys(names, True)


def not_measured(*_: object) -> Mapping[str, float]:
    raise AssertionError("nothing is to be measured")


@pytest.mark.parametrize(
    ("faster", "expected"), [(0.57, "float32"), (1.0, "float32"), (1.19, "float32"), (1.2, "bfloat16"), (8, "bfloat16")]
)
@pytest.mark.parametrize("units", ["avx512_bf16", "amx_bf16"])
def test_bfloat16_is_taken_where_it_is_clearly_faster(
    faster: float, expected: str, units: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def rates(*sizes: int) -> Mapping[str, float]:
        asked.append(sizes)
        return {"float32": 1e10, "bfloat16": faster * 1e10}

    monkeypatch.setattr(torch.cpu, "get_capabilities", instructions(units))
    choice = choose_dtype("auto", CPU, sizes=(576, 1536), rates=rates)
    assert (choice.name, choice.measured) == (expected, True)
    assert choice.reason == f"{expected}, because this CPU multiplies bfloat16 {faster:.2g} times as fast as float32"
    assert asked == [(576, 1536, 1)]


def test_nothing_is_measured_where_the_dtype_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named dtype is taken, also on a CPU that emulates it; a CPU without instructions takes float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", instructions("avx512_f"))
    assert choose_dtype("auto", CPU, rates=not_measured).dtype == torch.float32
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert choose_dtype(name, CPU, rates=not_measured) == DtypeChoice(dtype)


def test_both_dtypes_are_measured() -> None:
    rates = product_rates(32, 64, 1)
    assert set(rates) == {"float32", "bfloat16"}
    assert min(rates.values()) > 0


def test_the_main_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", instructions("avx512_bf16"))
    monkeypatch.setattr("oneshot.machine.dtype.product_rates", not_measured)
    told = DtypeChoice(torch.bfloat16, "told", measured=True)

    class Second:
        def share(self, task: int, compute: Callable[[], Any]) -> Any:
            assert task == 0
            return told

    machine = replace(Machine(CPU, torch.float32, tmp_path), workers=Second())  # type: ignore[arg-type]
    assert settled_dtype("auto", machine, (64, 64), ()) == told


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Rates of a CPU with instructions for bfloat16, to be filled."""
    found: dict[str, float] = {}
    monkeypatch.setattr(torch.cpu, "get_capabilities", instructions("avx512_bf16"))
    monkeypatch.setattr("oneshot.machine.dtype.product_rates", lambda *_: found)
    return found


def test_a_run_that_continues_keeps_its_dtype(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, rates: dict[str, float]
) -> None:
    """Interrupted or finished, and whatever is measured later; a new run measures."""
    config = make_config(make_checkpoint(), dtype="auto")
    output = Path(config.output)
    rates |= SINGLE
    stop_before(1, partial(compress, config))
    rates |= HALF
    report = compress(replace(config, resume=True))
    assert report.fingerprint["dtype"] == "torch.float32"
    assert report.footprint is not None
    assert report.footprint.dtype == "float32, as in the run that this one continues"
    weights = (output / "model.safetensors").stat().st_mtime_ns
    assert compress(replace(config, resume=True)).fingerprint == report.fingerprint
    assert (output / "model.safetensors").stat().st_mtime_ns == weights
    assert compress(replace(config, overwrite=True)).fingerprint["dtype"] == "torch.bfloat16"
    assert "2 times as fast" in json.loads((output / "oneshot_report.json").read_bytes())["footprint"]["dtype"]


def test_memory_that_does_not_hold_float32_takes_bfloat16(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, rates: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bounds(options: MachineOptions, _: torch.device) -> Bounds:
        limit = options.max_memory_bytes
        return Bounds(2**28, 0, limit or 2**40, limit is not None, 0, 0, 0, False, 2**40)

    monkeypatch.setattr("oneshot.run.prediction.current_bounds", bounds)
    rates |= SINGLE
    options: dict[str, Any] = {"num_sequences": 64, "sequence_length": 256, "batch_size": 64}
    checkpoint = make_checkpoint(hidden=128, width=512, dtype=torch.bfloat16)

    def predicted(dtype: str, **changes: Any) -> Any:
        return predict(make_config(checkpoint, dtype=dtype, **options | changes))

    def least(dtype: str) -> int:
        with pytest.raises(MemoryLimitError) as refused:
            predicted(dtype, max_memory_bytes=1)
        found = re.search(r"at least --max-memory (\d+)MiB", str(refused.value))
        assert found is not None
        return int(found[1]) * 2**20

    assert predicted("auto").dtype.startswith("float32, because")
    assert predicted("auto").host_bytes == predicted("float32").host_bytes
    enough = least("bfloat16")
    assert enough < least("float32")
    found = predicted("auto", max_memory_bytes=enough)
    assert found.dtype.startswith("bfloat16, because memory does not hold")
    assert found.host_bytes <= enough
    assert predicted("auto", max_memory_bytes=least("float32")).dtype.startswith("float32, because")
