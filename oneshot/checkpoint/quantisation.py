"""How the linears of a result's layers are quantised, through compressed-tensors' own functions.

Their weights become integers, FP8 or FP4 numbers, each times a scale that a group of an output's inputs shares, or all
of them. `compressed_tensors` reads such weights.
"""

import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from oneshot.checkpoint.compressed_tensors import KIND, SCALE
from oneshot.config import QuantiseName
from oneshot.errors import OutputError, PlanError
from oneshot.tensors import Tensors

PRESETS: dict[QuantiseName, str] = {  # of compressed-tensors
    "w4a16": "W4A16",
    "w8a8": "W8A8",
    "fp8": "FP8_DYNAMIC",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
}
GLOBAL = "weight_global_scale"
LARGEST_EXPONENT = 64  # of a global scale, so that weights of tiny numbers have scales that float32 holds
SHRUNK = tuple(1 - step / 20 for step in range(10))  # extremes of a group that are tried as the end of its range


@dataclass(frozen=True)
class Quantisation:
    """A scheme of compressed-tensors for all linears of the layers.

    `group`: inputs whose weights share a scale; 0: all inputs of an output do. `dtype`: of what stays, and of scales
    unless the scheme stores them in eight bits. `over`: the global scale of NVFP4, by which the stored scales are
    larger than the ones that weights are read with. A power of two changes no digit of the weights.
    """

    name: QuantiseName
    group: int
    dtype: torch.dtype
    over: float = 1.0

    @cached_property
    def scheme(self) -> Any:
        """Return the scheme as compressed-tensors states it."""
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization import preset_name_to_scheme

        scheme: Any = preset_name_to_scheme(PRESETS[self.name], ["Linear"])
        if self.group:
            scheme.weights = scheme.weights.model_copy(update={"group_size": self.group})
        scheme.format = infer_module_format(torch.nn.Linear, scheme)
        return scheme

    @property
    def has_global_scale(self) -> bool:
        """Return whether scales are stored as FP8 numbers, which have few exponents."""
        return bool(self.scheme.weights.scale_dtype == torch.float8_e4m3fn)

    def for_weights(self, weights: Iterable[torch.Tensor]) -> "Quantisation":
        """Return it with the global scale of weights that are rounded together.

        Linears that read the same share it: engines merge them (vLLM takes the largest global scale for all).
        """
        if not self.has_global_scale:
            return self
        from compressed_tensors.quantization.utils import calculate_range

        _, most = calculate_range(self.scheme.weights, "cpu")
        return self._over(max(float(weight.abs().max()) for weight in weights) / float(most))

    def for_scales(self, scales: Iterable[torch.Tensor]) -> "Quantisation":
        """Return it with the largest global scale by which these scales can be stored."""
        if not self.has_global_scale:
            return self
        return self._over(max(float(one.max()) for one in scales))

    def _over(self, largest: float) -> "Quantisation":
        """Return it with the largest power of two times which a scale is in FP8's range."""
        _, exponent = math.frexp(torch.finfo(torch.float8_e4m3fn).max / largest if largest else 1.0)
        return replace(self, over=math.ldexp(1.0, min(exponent - 1, LARGEST_EXPONENT)))

    def scales(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scales `(m, n / group)` or `(m, 1)` of a weight `(m, n)`, float64 of the values that are stored.

        Of scales for smaller and smaller extremes, each group takes the one with the least weighed squares of errors.
        Integers of four bits are −8 to 7, so scales may be negative: the other extreme then has the eighth step. With
        more bits that step is too small to matter.
        `importance (n,)`: the weights of columns, the mean squares of the inputs; None for equal ones.
        """
        groups = weight.double().unflatten(1, (-1, self.group or weight.shape[1]))
        weights = 1.0 if importance is None else importance.double().view(groups.shape[1:])
        low, high = groups.aminmax(dim=-1)
        best = least = None
        is_int4 = self.scheme.weights.type == "int" and self.scheme.weights.num_bits == 4
        for share, sign in product(SHRUNK, (1, -1) if is_int4 else (1,)):
            scales = sign * self._stored_scales(low * share, high * share)
            errors = (weights * (self.nearest(groups, scales.unsqueeze(-1)) - groups).square()).sum(-1)
            if best is None or least is None:
                best, least = scales, errors
            else:
                best, least = torch.where(errors < least, scales, best), torch.minimum(errors, least)
        assert best is not None
        return best

    def _stored_scales(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Return the scales of groups with these extremes as they are read, float64."""
        from compressed_tensors.quantization.utils import calculate_qparams

        over = torch.tensor(self.over, dtype=torch.float64) if self.has_global_scale else None
        scales, _ = calculate_qparams(low, high, self.scheme.weights, global_scale=over)
        if self.scheme.weights.scale_dtype is None:
            scales = scales.to(self.dtype)
        limits = torch.finfo(self.dtype)  # rows of small weights have scales below float16's normal numbers
        smallest = limits.tiny * limits.eps if self.dtype == torch.float16 else limits.tiny
        return (scales.double() / self.over).clamp_min(smallest)  # also of zeros

    def nearest(self, weight: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the nearest weights that can be stored; `steps` are scales, which are broadcast to the weights."""
        from compressed_tensors.quantization import fake_quantize

        rounded: torch.Tensor = fake_quantize(weight, steps, None, self._by_step)
        return rounded

    def steps(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the scale of every weight; one column if all inputs share it."""
        return scales.repeat_interleave(self.group, dim=1) if self.group else scales

    def packed(self, module: str, weight: torch.Tensor, scales: torch.Tensor) -> Tensors:
        """Return the tensors that are stored for a weight of such values, by name.

        Raises `OutputError` if compressed-tensors reads other weights.
        """
        from compressed_tensors.compressors import BaseCompressor

        compressor: Any = BaseCompressor.get_value_from_registry(self.scheme.format.value)
        exact = {"weight": weight.float(), SCALE: (scales * self.over).float()}
        if self.has_global_scale:
            exact[GLOBAL] = torch.tensor([self.over], device=weight.device)
        stored = compressor.compress(exact, self.scheme)
        if not weight.is_meta:
            read = compressor.decompress(stored, self.scheme)["weight"]
            if not torch.equal(read.to(weight.dtype), weight):
                raise OutputError(
                    f"{module}.weight is not what compressed-tensors reads of its stored numbers; please report this "
                    "with the input's config.json."
                )
        if self.scheme.weights.scale_dtype is None:
            stored[SCALE] = scales.to(self.dtype)
        return {f"{module}.{role}": tensor for role, tensor in stored.items()}

    def config(self, others: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config` of config.json as llm-compressor writes it; `others`: linears that stay."""
        import compressed_tensors
        from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

        stated = QuantizationConfig(
            config_groups={"group_0": self.scheme},
            ignore=list(others),
            format=self.scheme.format.value,
            quantization_status=QuantizationStatus.COMPRESSED,
        )
        return {
            "quant_method": KIND,
            "version": compressed_tensors.__version__,
            **stated.model_dump(mode="json", exclude={"quant_method"}),
        }

    def linear_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a stored linear without its bias."""
        weight = torch.empty(outputs, inputs, device="meta", dtype=torch.float32)
        return sum(tensor.nbytes for tensor in self.packed("linear", weight, self.empty_scales(weight)).values())

    def empty_scales(self, weight: torch.Tensor) -> torch.Tensor:
        """Return scales without values of a weight without values."""
        outputs, inputs = weight.shape
        return weight.new_empty(outputs, inputs // (self.group or inputs))

    @cached_property
    def _by_step(self) -> Any:
        from compressed_tensors.quantization import QuantizationStrategy

        changes = {"strategy": QuantizationStrategy.CHANNEL, "group_size": None}
        return self.scheme.weights.model_copy(update=changes)


def refuse_without_package() -> None:
    """Raise `PlanError` if nothing can be quantised."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise PlanError("--quantise needs the package compressed-tensors; run pip install 'oneshot-llm[compressed]'.")
