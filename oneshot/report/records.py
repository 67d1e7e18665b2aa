"""Records of what a run took and what came out."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from oneshot.json_text import numbers
from oneshot.linalg.psd import GramNote
from oneshot.machine import Store
from oneshot.report.side_by_side import Comparison
from oneshot.report.words import OPENED, duration, far_kind, gibibytes


@dataclass(frozen=True)
class SublayerReport:
    """The report of one sublayer (`ffn` or `heads`) of one layer.

    Errors are relative Frobenius norms of the sublayer's output on the calibration text. `predicted_error` comes from
    the statistics (None if `up_proj` was also corrected), `measured_error` from the activations (None without text).
    """

    kind: str
    dense_size: int
    kept_size: int
    predicted_error: float | None = None
    measured_error: float | None = None
    condition_number: float | None = None
    max_interpolation: float | None = None
    eigenvalue_fallback: bool = False
    damping: float | None = None


@dataclass(frozen=True)
class LayerReport:
    """One layer: its sublayers, the time it took, the process's peak memory when it was done, and warnings.

    `gram_notes`: one for each kind of Gram that rounding left singular, of all processes. `rounding_errors`: relative
    Frobenius norms of what quantising takes from the outputs of linears on the calibration text, by linear.
    """

    layer: int
    sublayers: tuple[SublayerReport, ...]
    seconds: float
    peak_bytes: int
    peak_device_bytes: int
    warnings: tuple[str, ...] = ()
    gram_notes: tuple[GramNote, ...] = ()
    rounding_errors: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "LayerReport":
        """Return the inverse of `dataclasses.asdict`, also after JSON."""
        sublayers = tuple(SublayerReport(**sublayer) for sublayer in values["sublayers"])
        notes = tuple(GramNote(**note) for note in values.get("gram_notes", ()))
        warnings = tuple(values["warnings"])
        return LayerReport(**{**values, "sublayers": sublayers, "warnings": warnings, "gram_notes": notes})


@dataclass(frozen=True)
class Footprint:
    """The predicted cost of a run. Memory is an upper bound; seconds may be wrong by a factor of two.

    Attributes:
        host_bytes: peak resident memory of the process.
        host_stage: the stage of that peak.
        device_bytes: peak that torch takes on a CUDA device, 0 without one.
        device_stage: as above.
        store: where activations are kept: `device`, `host` or `disk`.
        experts_together: experts of a layer whose statistics are held at the same time; None if they are all.
        expert_groups: groups of so many experts, each with a pass over the text.
        result_bytes: bytes of the result's weights.
        disk_bytes: the peak at the place of the result, with what the journal keeps until the end.
        scratch_bytes: bytes of files in the off-load folder, activations included.
        stored_parameters: parameters of the model before (`dense`) and after (`compressed`).
        seconds: seconds by stage, and `total`.
        exact: whether the sizes of layers are known; otherwise a profile will decide them.
        check_bytes: peak in the check at the end of a command, as `host_bytes`; 0 without one.
        check_device_bytes: as `device_bytes`.
        check_fits: whether both are allowed; the check is left out otherwise.
        check_seconds: seconds of the check; they are not in `total`.
        text_seconds: the part of `prepare` in which the model writes text.
        dtype: the dtype of the forward passes and why it was taken; empty if the user named it.
        form: the form of the result; None of a profile alone.
        groups: the groups of weights of quantisers that divide the inputs of all linears, in words.
        served: where the result is to open, in words; empty if that was not said.
        text: the tokens and the sources of the calibration text, in words; empty if none is read.
    """

    host_bytes: int
    host_stage: str
    device_bytes: int
    device_stage: str
    store: Store
    result_bytes: int
    scratch_bytes: int
    stored_parameters: dict[str, int]
    seconds: dict[str, float]
    exact: bool = True
    disk_bytes: int = 0
    experts_together: int | None = None
    expert_groups: int = 1
    check_bytes: int = 0
    check_device_bytes: int = 0
    check_fits: bool = False
    check_seconds: float = 0.0
    text_seconds: float = 0.0
    dtype: str = ""
    form: str | None = None
    groups: str = ""
    served: str = ""
    text: str = ""

    def __str__(self) -> str:
        dense, compressed = self.stored_parameters["dense"], self.stored_parameters["compressed"]
        memory = f"{gibibytes(self.host_bytes)} of the host ({self.host_stage})"
        if self.device_bytes:
            memory += f", {gibibytes(self.device_bytes)} of the device ({self.device_stage})"
        if self.experts_together is not None:
            memory += f", with {grouped_experts(self)}"
        own_text = f", of which {duration(self.text_seconds)} to write the text" if self.text_seconds else ""
        lines = {
            **({} if self.form is None else {"form": f"{self.form}, opened by {OPENED[self.form]}"}),
            **({"served": self.served} if self.served else {}),
            "parameters": f"{dense:,} → {'' if self.exact else 'about '}{compressed:,} (−{1 - compressed / dense:.1%})",
            "memory": f"at most {memory}",
            "disk": f"{gibibytes(self.disk_bytes)} at the output, {gibibytes(self.scratch_bytes)} off-loaded",
            "groups": f"{self.groups} (of quantisers)",
            **({"text": self.text} if self.text else {}),
            **({"dtype": self.dtype} if self.dtype else {}),
            "time": f"about {duration(self.seconds['total'])}{own_text}; it may be wrong by a factor of two",
        }
        return "\n".join(["Prediction of oneshot", *(f"  {name + ':':12}{text}" for name, text in lines.items())])


def grouped_experts(footprint: Footprint) -> str:
    """Return how the experts of a layer are taken if memory does not hold the statistics of all."""
    together, groups = footprint.experts_together, footprint.expert_groups
    return f"the experts of a layer in {groups} groups of at most {together}, each with a pass over the text"


@dataclass(frozen=True)
class Check:
    """A quick measurement after a run, beside the original (`dense` and `compressed`).

    Attributes:
        source: source of the held-out text.
        tokens: scored tokens.
        perplexity: None without such a text.
        question: what both were asked.
        answers: what they wrote, greedily; `…` ends one that was cut.
        skipped: the sentence that says why there is no check, or no answers; empty if there are.
        seconds, peak_bytes, peak_device_bytes: of the check, as measured; a report counts them in its own.
        kinds: as `perplexity`, by kind of the texts of `text.kinds`, and of passages in other languages.
    """

    source: str = ""
    tokens: int = 0
    perplexity: dict[str, float] | None = None
    question: str = ""
    answers: dict[str, str] = field(default_factory=dict)
    skipped: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    peak_device_bytes: int = 0
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def lost_nats(self) -> float | None:
        """Return the mean log-loss of the kinds over the original's; None without them."""
        ratios = self.ratios.values()
        return sum(map(math.log, ratios)) / len(ratios) if ratios else None

    @property
    def ratios(self) -> dict[str, float]:
        """The result's perplexity ÷ the original's, by kind of text, the worst last."""
        ratios = {kind: found["compressed"] / found["dense"] for kind, found in self.kinds.items()}
        return dict(sorted(ratios.items(), key=lambda item: item[1]))


@dataclass(frozen=True)
class Report:
    """Everything worth knowing about a run; written as `oneshot_report.json` beside the weights.

    `config` has all options, `method` the method after `auto` was settled. `dense_shape` and `plan` are a `ModelShape`
    and a `Plan`. `hidden_error` is the relative Frobenius norm of what a smaller hidden size leaves out of the residual
    stream. `predicted_divergence`: see `planning.predicted_divergences`; None without a profile. `footprint` was
    predicted; `peak_bytes` and `seconds` were measured. `fingerprint` decides whether an interrupted run may continue.
    `warnings`: of no single layer. `check`: None if it was left out. `predicted_curve`: what the same profile predicts
    for other removed shares of the parameters, which are its names; None without a profile.
    `weights_hash`: of the input's tensors. `timings`: the seconds of calls that a plan by latency was made by.
    `evaluations`: what `oneshot evaluate` added later, the newest last. `further_parameters`: of layers that predict
    tokens after the next one, which no other number counts; None if the result has none. `stored_parameters`: of the
    input (`dense`), of the result (`compressed`), and of the model that an input of ours came from (`original`).
    `mixture`: the verdict of a profile that measured narrower and fewer experts (`report.mixture`). `file_bytes`: sizes
    of the result's weight files and their index, by name.
    """

    config: dict[str, Any]
    method: dict[str, Any]
    versions: dict[str, str]
    dense_shape: dict[str, Any]
    plan: dict[str, Any]
    stored_parameters: dict[str, int]
    layer_parameters: dict[str, int]
    flops_per_token: dict[str, int]
    kv_bytes_per_token: dict[str, int]
    sparsity: dict[str, float | None]
    calibration: dict[str, Any] | None
    layers: tuple[LayerReport, ...]
    seconds: dict[str, float]
    peak_bytes: int
    peak_device_bytes: int
    hidden_error: float | None = None
    predicted_divergence: dict[str, float] | None = None
    predicted_curve: dict[str, float] | None = None
    footprint: Footprint | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    weights_hash: str = ""
    timings: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    check: Check | None = None
    evaluations: tuple[Comparison, ...] = ()
    further_parameters: dict[str, int] | None = None
    mixture: dict[str, Any] | None = None
    file_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def all_warnings(self) -> list[str]:
        """Return the warnings of the run, of its layers and of its check, each once."""
        of_layers = (one for layer in self.layers for one in layer.warnings)
        return list(dict.fromkeys([*self.warnings, *of_layers, *self.check_warnings]))

    @property
    def check_warnings(self) -> list[str]:
        """Return the warnings of the check: a kind of text that loses far more than others, and a limit not met."""
        far = None if self.check is None or not self.check.kinds else far_kind(self.check.ratios)
        return [one for one in (far, self.unmet_limit) if one is not None]

    @property
    def unmet_limit(self) -> str | None:
        """Return the sentence on a `--max-loss` that the check could not judge, or found exceeded; None otherwise."""
        allowed = self.config["target"].get("max_loss")
        if allowed is None or self.check is None:
            return None
        lost = self.check.lost_nats
        if lost is None:
            return f"--max-loss could not be judged, so the size is the predicted one. {self.check.skipped}".strip()
        if lost <= math.log1p(allowed):
            return None
        return (
            f"The perplexity changed by {100 * math.expm1(lost):+.1f} % where {100 * allowed:.3g} % was allowed; ask "
            "for a smaller --max-loss."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return asdict(self)

    @staticmethod
    def read(path: Path) -> "Report":
        """Return the report of a file; raises what reading it, JSON and `from_dict` do."""
        return Report.from_dict(json.loads(path.read_bytes()))

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Report":
        """Return the inverse of `to_dict`, also after JSON."""
        layers = tuple(LayerReport.from_dict(layer) for layer in values["layers"])
        footprint = None if values["footprint"] is None else Footprint(**values["footprint"])
        warnings = tuple(values["warnings"])
        check = None if values.get("check") is None else Check(**values["check"])
        if check is not None and check.perplexity is not None:
            check = replace(check, perplexity=numbers(check.perplexity))
        divergence = values.get("predicted_divergence")
        read: dict[str, Any] = {"layers": layers, "footprint": footprint, "warnings": warnings, "check": check}
        read["evaluations"] = tuple(map(Comparison.from_dict, values.get("evaluations", ())))
        read["predicted_divergence"] = None if divergence is None else numbers(divergence)
        return Report(**{**values, **read})
