"""Which version runs, and that a failure is an error with its reason."""

import pytest
import torch
from matrices import seeded
from oneshot_kernels import KernelError, backend, gram_, pivoted_cholesky, pivoted_qr, sketch_
from oneshot_kernels.pivoted_qr.panels import eliminate_

CUDA = type("FakeCuda", (), {"is_cuda": True, "device": "cuda:0"})()


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.choose_backend(torch.zeros(1)) == backend.choose_backend(CUDA) == "torch"
    assert backend.choose_backend(CUDA, default="triton") == "triton"
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    monkeypatch.setattr(backend, "triton_installed", lambda: True)
    assert backend.choose_backend(CUDA) == "triton"


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("out", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float32])
def test_the_default_of_sketches(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, installed: bool, out: torch.dtype, rows: torch.dtype
) -> None:
    """Triton where it was measured to be faster: on a GPU, summed in fp32; torch's is a word away."""
    monkeypatch.setattr(backend, "runs_on_gpu", lambda _: on_gpu)
    monkeypatch.setattr(backend, "triton_installed", lambda: installed)
    loaded: list[str] = []

    def load(operation: str, name: str) -> object:
        loaded.append(name)
        return type("Version", (), {"sketch_": staticmethod(lambda *_: None)})

    monkeypatch.setattr(backend, "load_implementation", load)
    sketch_(torch.zeros(2, 2, dtype=out), torch.zeros(3, 2, dtype=rows), row_offset=0, seed=0)
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "torch")
    sketch_(torch.zeros(2, 2, dtype=out), torch.zeros(3, 2, dtype=rows), row_offset=0, seed=0)
    assert loaded == ["triton" if on_gpu and installed and out == torch.float32 else "torch", "torch"]


@pytest.mark.parametrize("forced", ["reference", "torch"])
def test_forced(monkeypatch: pytest.MonkeyPatch, forced: str) -> None:
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, forced)
    assert backend.choose_backend(CUDA) == forced


def test_forced_reference_is_used_by_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "reference")
    matrix = torch.randn(9, 4, dtype=torch.float64, generator=seeded(0))
    called: list[str] = []
    for module, name in [("gram", "gram_"), ("gram", "mirror_"), ("count_sketch", "sketch_")]:
        monkeypatch.setattr(
            backend.load_implementation(module, "reference"), name, lambda *_, name=name: called.append(name)
        )
    from oneshot_kernels.pivoted_qr import reference

    for name in ("pivoted_cholesky", "pivoted_qr"):
        monkeypatch.setattr(reference, name, lambda *_, name=name: called.append(name))
    gram_(torch.zeros(4, 4), matrix)
    sketch_(torch.zeros(3, 4), matrix, row_offset=0, seed=0)
    pivoted_cholesky(matrix.mT @ matrix)
    pivoted_qr(matrix)
    assert called == ["gram_", "mirror_", "sketch_", "pivoted_cholesky", "pivoted_qr"]


def test_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "cuda")
    with pytest.raises(KernelError, match="expected reference, torch or triton"):
        gram_(torch.zeros(2, 2), torch.zeros(3, 2))


def test_triton_forced_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    monkeypatch.setattr(backend, "triton_installed", lambda: False)
    with pytest.raises(KernelError, match="not installed"):
        sketch_(torch.zeros(2, 2), torch.zeros(3, 2), row_offset=0, seed=0)


@pytest.mark.cpu_only
def test_triton_forced_on_the_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    monkeypatch.setattr(backend, "triton_installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelError, match="CUDA"):
        gram_(torch.zeros(2, 2), torch.zeros(3, 2))


def test_module_that_cannot_be_imported() -> None:
    with pytest.raises(KernelError, match=r"no_such_operation.*cannot be imported"):
        backend.load_implementation("no_such_operation", "torch")


def test_failing_triton_kernel_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from oneshot_kernels.count_sketch import kernel

    def fails(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    monkeypatch.setattr(kernel, "sketch_", fails)
    with pytest.raises(KernelError, match=r"count_sketch.sketch_.*\(3, 2\).*shared memory"):
        sketch_(torch.zeros(2, 2), torch.zeros(3, 2), row_offset=0, seed=0)


def test_failing_pivots_are_an_error_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_panel = pytest.importorskip("oneshot_kernels.pivoted_qr.triton_panel", reason="triton is not installed")

    def fails(*_: object) -> None:
        raise RuntimeError("out of resource: registers")

    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    monkeypatch.setattr(triton_panel, "take_pivots_", fails)
    with pytest.raises(KernelError, match=r"pivoted_qr.take_pivots_.*\(1, 3, 3\).*registers"):
        eliminate_(torch.eye(3), 2)


def test_a_full_device_stays_the_error_that_callers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from oneshot_kernels.count_sketch import kernel

    def fails(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    monkeypatch.setattr(kernel, "sketch_", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate"):
        sketch_(torch.zeros(2, 2), torch.zeros(3, 2), row_offset=0, seed=0)


def test_failing_torch_version_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError) as caught:
        gram_(torch.zeros(2, 2, device="meta"), torch.zeros(3, 2))
    assert not isinstance(caught.value, KernelError)
