"""A run in Python computes the same whatever settings its caller gave torch, and leaves them as they were."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint
from torch.nn.attention import SDPBackend, sdpa_kernel

import oneshot


@contextmanager
def of_the_process(set_: Callable[[Any], None], get: Callable[[], Any], value: Any) -> Any:
    """Let the process have a setting; it must still have it at the end."""
    before = get()
    set_(value)
    try:
        yield
        assert get() == value
    finally:
        set_(before)


def dtype() -> AbstractContextManager[None]:
    return of_the_process(torch.set_default_dtype, torch.get_default_dtype, torch.float64)


def precision() -> AbstractContextManager[None]:
    return of_the_process(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium")


def deterministic() -> AbstractContextManager[None]:
    get = torch.are_deterministic_algorithms_enabled
    return of_the_process(torch.use_deterministic_algorithms, get, True)


def attention() -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH)


SETTINGS: dict[str, list[Callable[[], AbstractContextManager[Any]]]] = {
    "dtype": [dtype],
    "device": [lambda: torch.device("meta")],
    "autocast": [lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    "attention and gradients": [attention, torch.no_grad],
    "products, and no gradients ever": [precision, deterministic, torch.inference_mode],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Callable[[Path], bytes]:
    """`results(checkpoint)`: the bytes of a result in the stock form."""

    def run(checkpoint: Path) -> bytes:
        output = tmp_path_factory.mktemp("results") / "out"
        options: dict[str, Any] = {"num_sequences": 8, "sequence_length": 16, "device": "cpu", "dtype": "float32"}
        oneshot.compress(checkpoint, output, sparsity=0.2, calibration=text_file, progress=False, **options)
        return (output / "model.safetensors").read_bytes()

    return run


@pytest.fixture(scope="module")
def usual(results: Callable[[Path], bytes], make_checkpoint: MakeCheckpoint) -> bytes:
    return results(make_checkpoint())


@pytest.mark.parametrize("name", SETTINGS)
def test_the_callers_settings_do_not_reach_a_run(
    name: str, usual: bytes, results: Callable[[Path], bytes], make_checkpoint: MakeCheckpoint
) -> None:
    with ExitStack() as stack:
        for setting in SETTINGS[name]:
            stack.enter_context(setting())
        seed, modes = torch.initial_seed(), (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
        math = torch.backends.cuda.flash_sdp_enabled(), torch.get_default_device()
        assert results(make_checkpoint()) == usual
        assert (torch.initial_seed(), modes) == (seed, (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        assert math == (torch.backends.cuda.flash_sdp_enabled(), torch.get_default_device())
