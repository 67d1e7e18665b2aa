"""The one tolerance table: ‖got - want‖_F <= TOLERANCE[dtype of the arithmetic] · scale."""

import torch

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
EPS = torch.finfo(torch.float64).eps
EXACT_RANK = EPS**0.75  # residual of an exact rank-k matrix, relative (RandLAPACK's bound), from the data
GRAM_FLOOR = 4 * EPS**0.5  # what a Gram can resolve: its condition number is squared


def assert_close(got: torch.Tensor, want: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
    """Norm-wise agreement; `scale` is the norm of the sum of absolute values that `want` was summed from."""
    error = float(torch.linalg.vector_norm(got.double() - want.double()))
    assert error <= TOLERANCE[dtype] * scale, f"error {error:.3e} > {TOLERANCE[dtype]:.0e} · {scale:.3e}"
