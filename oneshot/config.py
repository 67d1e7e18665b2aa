"""What a user asks for: one frozen, validated record of every option of a run."""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from oneshot.errors import ConfigError

SELECTORS = (
    "id",
    "obs",
    "leverage",
    "activation-norm",
    "wanda",
    "flap",
    "tcsp-score",
    "magnitude",
    "random",
    "none",
)
HIDDEN_METHODS = ("pca", "none")
EMBEDDING_METHODS = ("low-rank", "none")
HEAD_UNITS = ("auto", "query-head", "kv-group")
CORRECTIONS = ("none", "bias", "same-layer", "two-stream")
PIVOTINGS = ("cholesky", "qr", "grouped", "tournament")
BUDGETS = ("parameters", "bytes", "flops", "latency")
DEPTHS = ("sensitivity", "none")
ALLOCATIONS = ("auto", "uniform", "error", "stat", "block-influence", "flap", "sensitivity")
TIERS = ("stock", "per-layer")
TOKEN_WEIGHTINGS = ("unit", "raw")
SKETCHES = ("none", "count", "sparse-sign")
DTYPES = ("auto", "float32", "bfloat16")
AUTO = "auto"
DAMPING = 3e-2
TOKENS_PER_NEURON = 4  # fewer than that say little about a layer
SAVE_DTYPES = ("keep", "float32", "bfloat16", "float16")

# Options whose command-line names are not those of their fields.
_FLAGS = {
    "max_memory_bytes": "max-memory",
    "max_device_memory_bytes": "max-device-memory",
    "fixed_damping": "damping",
}

_COUNT_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_SIZE_SUFFIXES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_count(text: str) -> int:
    """`"5.5B"` -> 5_500_000_000 (a number of parameters). Raises `ConfigError` on anything else."""
    return _parse(text, _COUNT_SUFFIXES, "a number of parameters such as 900M or 5.5B")


def parse_size(text: str) -> int:
    """`"8GiB"` -> 8_589_934_592 (bytes). Raises `ConfigError` on anything else."""
    return _parse(text, _SIZE_SUFFIXES, "a size in bytes such as 500MB or 8GiB")


def _flag(field: str) -> str:
    return _FLAGS.get(field) or field.replace("_", "-")


def _parse(text: str, suffixes: dict[str, int], expected: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in suffixes:
        raise ConfigError(f"{text!r} is not {expected}.")
    return int(float(match[1]) * suffixes[match[2].upper()])


@dataclass(frozen=True)
class CompressionConfig:
    """Every choice of one compression run; the same record goes into the report.

    Exactly one of `sparsity` (fraction of the stored parameters to remove, in [0, 1)) and `params` (stored
    parameters to keep) is given; neither where sizes are given that say everything. Parts of the recipe (`ffn`,
    `heads`, `hidden`, `embedding`, `up_steps`, `group_size`, `correction`, `pivoting`, `sketch`, `tier`, `allocation`,
    `depth`) override it where they are not None. `budget` is what `sparsity` is a share of: stored parameters, bytes of
    the weight files, FLOPs per token, or the measured seconds of the decoder layers for one sequence.
    `hidden_size`, `value_size` and `query_key_size` (per head) are the kept sizes (None: what the target asks for, and
    all); `group_size` blocks share a projection of the residual stream, in which the statistics of all other blocks
    count `shared_weight` times, and tokens alike (`unit` `token_weighting`) or by their energy (`raw`). `damping` is
    the ridge in units of the Gram's mean diagonal, or `auto`: for every block the one that errs least on a held-out
    eighth of the text; `sketch_size` is in rows (None: twice the FFN width).
    `residual_weight` is the share of the dense stream's residual in a two-stream target where text is plenty.
    `profile` is the folder of a profile to plan from (None: the run makes one where its allocation needs it).
    `max_memory_bytes` bounds the peak resident memory of the process, `max_device_memory_bytes` what torch takes on a
    CUDA device: activations go where both hold, and a run that cannot keep to them is refused. `offload_dir` is the
    folder for activations that do not fit and for scratch files (None: the system's temporary folder).
    `resume`: go on where an interrupted run of the same fingerprint stopped; `overwrite`: replace an output, and forget
    an interrupted run.
    """

    checkpoint: str
    output: str
    sparsity: float | None = None
    params: int | None = None
    budget: str = "parameters"
    recipe: str = "oneshot"
    ffn: str | None = None
    heads: str | None = None
    hidden: str | None = None
    embedding: str | None = None
    up_steps: int | None = None
    hidden_size: int | None = None
    group_size: int | None = None
    shared_weight: float = 0.0
    token_weighting: str = "unit"
    value_size: int | None = None
    query_key_size: int | None = None
    tier: str | None = None
    allocation: str | None = None
    depth: str | None = None
    profile: str | None = None
    head_unit: str = "auto"
    correction: str | None = None
    damping: float | str = DAMPING
    pivoting: str | None = None
    sketch: str | None = None
    sketch_size: int | None = None
    pivot_group_size: int = 512
    residual_weight: float = 0.25
    round_to: int | None = None
    calibration: str = "c4"
    num_sequences: int = 128
    sequence_length: int = 1024
    batch_size: int = 4
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    save_dtype: str = "keep"
    max_memory_bytes: int | None = None
    max_device_memory_bytes: int | None = None
    offload_dir: str | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        targets = (self.sparsity is not None) + (self.params is not None)
        sizes_given = any((self.hidden_size, self.value_size, self.query_key_size))
        if targets > 1 or (targets == 0 and not sizes_given):
            raise ConfigError("Give exactly one target: --sparsity (such as 0.2) or --params (such as 900M).")
        if self.sparsity is not None and not (math.isfinite(self.sparsity) and 0 <= self.sparsity < 1):
            raise ConfigError(f"--sparsity {self.sparsity} is out of range: give a fraction from 0 up to below 1.")
        if self.params is not None and self.budget != "parameters":
            raise ConfigError(f"--params counts parameters; give --sparsity beside --budget {self.budget}.")
        if self.params is not None and self.params <= 0:
            raise ConfigError(f"--params {self.params} is out of range: give a positive number of parameters.")
        for option, minimum in (
            ("num_sequences", 1),
            ("sequence_length", 2),
            ("batch_size", 1),
            ("round_to", 1),
            ("hidden_size", 1),
            ("sketch_size", 1),
            ("pivot_group_size", 1),
            ("group_size", 0),
            ("up_steps", 0),
            ("value_size", 1),
            ("query_key_size", 1),
            ("max_memory_bytes", 1),
            ("max_device_memory_bytes", 1),
        ):
            value = getattr(self, option)
            if value is not None and value < minimum:
                raise ConfigError(f"--{_flag(option)} {value} is out of range: give at least {minimum}.")
        if isinstance(self.damping, str) and self.damping != AUTO:
            raise ConfigError(f"--damping {self.damping} is neither a number nor {AUTO}.")
        for option in ("fixed_damping", "residual_weight", "shared_weight"):
            value = getattr(self, option)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"--{_flag(option)} {value} is out of range: give 0 or more.")
        for option, allowed in (
            ("ffn", SELECTORS),
            ("heads", SELECTORS),
            ("hidden", HIDDEN_METHODS),
            ("embedding", EMBEDDING_METHODS),
            ("tier", TIERS),
            ("budget", BUDGETS),
            ("allocation", ALLOCATIONS),
            ("depth", DEPTHS),
            ("token_weighting", TOKEN_WEIGHTINGS),
            ("head_unit", HEAD_UNITS),
            ("correction", CORRECTIONS),
            ("pivoting", PIVOTINGS),
            ("sketch", SKETCHES),
            ("dtype", DTYPES),
            ("save_dtype", SAVE_DTYPES),
        ):
            value = getattr(self, option)
            if value is not None and value not in allowed:
                raise ConfigError(f"--{_flag(option)} {value} is not one of {', '.join(allowed)}.")

    @property
    def fixed_damping(self) -> float:
        """The damping of whatever has no held-out text to choose it on."""
        return DAMPING if isinstance(self.damping, str) else self.damping

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)
