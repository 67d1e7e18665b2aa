"""How the linears of a result's layers are quantised, through compressed-tensors' own functions.

Their weights become integers or FP8 numbers, each times a scale that a group of an output's inputs shares, or all of
them. `compressed_tensors` reads such weights.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from oneshot.checkpoint.compressed_tensors import SCALE
from oneshot.config import QuantiseName
from oneshot.errors import OutputError, PlanError
from oneshot.tensors import Tensors

PRESETS: dict[QuantiseName, str] = {"w4a16": "W4A16", "w8a8": "W8A8", "fp8": "FP8_DYNAMIC"}  # of compressed-tensors
SHRUNK = tuple(1 - step / 20 for step in range(10))  # extremes of a group that are tried as the end of its range


@dataclass(frozen=True)
class Quantisation:
    """A scheme of compressed-tensors for all linears of the layers.

    `group`: inputs whose weights share a scale; 0: all inputs of an output do. `dtype`: of scales, and of what stays.
    """

    name: QuantiseName
    group: int
    dtype: torch.dtype

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

    def scales(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scales `(m, n / group)` or `(m, 1)` of a weight `(m, n)`, float64 of the values that are stored.

        Of scales for smaller and smaller extremes, each group takes the one with the least weighed squares of errors.
        `importance (n,)`: the weights of columns, the mean squares of the inputs; None for equal ones.
        """
        from compressed_tensors.quantization.utils import calculate_qparams

        groups = weight.double().unflatten(1, (-1, self.group or weight.shape[1]))
        weights = 1.0 if importance is None else importance.double().view(groups.shape[1:])
        low, high = groups.aminmax(dim=-1)
        best = least = None
        limits = torch.finfo(self.dtype)  # rows of small weights have scales below float16's normal numbers
        smallest = limits.tiny * limits.eps if self.dtype == torch.float16 else limits.tiny
        for share in SHRUNK:
            scales, _ = calculate_qparams(low * share, high * share, self.scheme.weights)
            scales = scales.to(self.dtype).clamp_min(smallest).double()  # also of zeros
            errors = (weights * (self.nearest(groups, scales.unsqueeze(-1)) - groups).square()).sum(-1)
            if best is None or least is None:
                best, least = scales, errors
            else:
                best, least = torch.where(errors < least, scales, best), torch.minimum(errors, least)
        assert best is not None
        return best

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
        exact = {"weight": weight.float(), SCALE: scales.float()}
        stored = compressor.compress(exact, self.scheme)
        if not weight.is_meta:
            read = compressor.decompress(stored, self.scheme)["weight"]
            if not torch.equal(read.to(weight.dtype), weight):
                raise OutputError(
                    f"{module}.weight is not what compressed-tensors reads of its stored numbers; please report this "
                    "with the input's config.json."
                )
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
            "quant_method": "compressed-tensors",
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
