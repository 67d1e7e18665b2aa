"""The request of a user: a target, a method, a text, a machine, and the place of the result."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from oneshot.errors import ConfigError
from oneshot.fields import check_minimum, check_values, display, field_names
from oneshot.method import Method
from oneshot.parsing import did_you_mean, full_dtype, parse_count, parse_share, parse_size
from oneshot.recipes import RECIPE_FORMS, RECIPES, find_recipe
from oneshot.serving import ANY, Serving

BudgetUnit = Literal["parameters", "bytes", "flops", "latency"]
FormName = Literal["stock", "per-layer", "nemotron-nas", "gguf"]
FormChoice = Literal["auto", FormName]
Dtype = Literal["auto", "float32", "bfloat16"]
Kind = Literal["causal", "classification", "masked-lm", "embedding", "text-to-text", "question-answering"]
SaveDtype = Literal["keep", "float32", "bfloat16", "float16", "q8_0"]

QuantiseName = Literal["w4a16", "w8a8", "fp8", "nvfp4", "mxfp4"]

MOST_SEED = 2**53 - 1  # steps add to a seed, and torch takes 64 bits
MAX_FILE_BYTES = 5 * 10**9  # transformers' default of max_shard_size

# Fields that say where things are and what may be done, and do not change the result.
NOT_IN_FINGERPRINT = ("checkpoint", "revision", "output", "machine", "overwrite", "resume")

# Other spellings of options, and the fields that also take a text: the field, and how a text becomes its value.
SPELLINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "params": ("parameters", parse_count),
    "max_size": ("size_bytes", parse_size),
    "max_loss": ("max_loss", parse_share),
    "max_memory": ("max_memory_bytes", parse_size),
    "max_device_memory": ("max_device_memory_bytes", parse_size),
    "max_shard_size": ("max_file_bytes", parse_size),
    "max_file_size": ("gguf_bytes", parse_size),
    "dtype": ("dtype", full_dtype),
    "save_dtype": ("save_dtype", full_dtype),
}
SPELLINGS |= {field: (field, parse) for field, parse in SPELLINGS.values()}


@dataclass(frozen=True)
class Target:
    """The size of the result.

    Attributes:
        sparsity: fraction of the budget to remove, from 0 up to below 1.
        parameters: stored parameters to keep at most, instead of `sparsity`.
        size_bytes: bytes of the weight files at most, instead of `sparsity`.
        max_loss: rise of the perplexity that is allowed, as a fraction, instead of `sparsity`: the run finds the size.
        gguf_bytes: bytes of a GGUF file at most, whose tensors have quantised types of their own; without another size
            the run also finds how many parameters stay.
        loss_scale: nats lost for each that a profile predicts, as a check has measured them; None: as usual.
        budget: what `sparsity` is a fraction of; latency is measured on this machine, for one sequence.
        hidden_size: kept hidden size; None: the whole.
        intermediate_size: kept FFN width of all layers; None: what the target asks for.
        value_size: kept size of the values of a head; None: the whole.
        query_key_size: kept size of the queries and keys of a head; None: the whole.
        num_experts: kept experts of every layer of a mixture; None: what the target asks for, and all.
        hidden_rate: fraction of the hidden size to remove, instead of these sizes (a of TCSP{a %, b %}, section 5.2).
        inner_rate: fraction of the FFN width and of the sizes inside heads to remove, instead of these sizes (b there).
        round_to: sizes are multiples of this; None: 64, less for small models.
        serve: what opens the result, as `engine=vllm,tp=2,group=128` or a mapping (`Serving`); None: one GPU.
        keep: patterns on the names of modules that stay as they are: layers, their attention or FFN, the embedding.
    """

    sparsity: float | None = None
    parameters: int | None = None
    size_bytes: int | None = None
    max_loss: float | None = None
    gguf_bytes: int | None = None
    loss_scale: float | None = None
    budget: BudgetUnit = "parameters"
    hidden_size: int | None = None
    intermediate_size: int | None = None
    value_size: int | None = None
    query_key_size: int | None = None
    num_experts: int | None = None
    hidden_rate: float | None = None
    inner_rate: float | None = None
    round_to: int | None = None
    serve: str | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.keep, str | list):  # of Python's callers and of JSON
            object.__setattr__(self, "keep", (self.keep,) if isinstance(self.keep, str) else tuple(self.keep))
        if isinstance(self.serve, str | Mapping):  # in one spelling
            object.__setattr__(self, "serve", str(Serving.of(self.serve)))
        check_values(self)
        for pattern in self.keep:
            if not isinstance(pattern, str) or not pattern:
                raise ConfigError(f"--keep {pattern!r} is not a pattern; give one such as layers.0.*.")
        given = sum(one is not None for one in (self.sparsity, self.parameters, self.size_bytes, self.max_loss))
        rates = self.hidden_rate, self.inner_rate
        sizes = self.hidden_size, self.intermediate_size, self.value_size, self.query_key_size
        if given > 1 or (given == 0 and not self.states_sizes and self.gguf_bytes is None):
            raise ConfigError(
                "Give exactly one target: --sparsity (such as 0.2), --params (such as 900M), --max-size (2GB), "
                "--max-loss (5%), or of a GGUF file --max-file-size (90MB)."
            )
        if self.sparsity is not None and not (math.isfinite(self.sparsity) and 0 <= self.sparsity < 1):
            raise ConfigError(f"--sparsity {self.sparsity} is out of range: give a fraction from 0 up to below 1.")
        if self.max_loss is not None and not (math.isfinite(self.max_loss) and self.max_loss > 0):
            raise ConfigError(f"--max-loss {self.max_loss} is out of range: give a share above 0, such as 5%.")
        if self.loss_scale is not None and not (math.isfinite(self.loss_scale) and self.loss_scale > 0):
            raise ConfigError(f"{display('loss_scale', self.loss_scale)} is out of range: give a number above 0.")
        if self.loss_scale is not None and self.max_loss is None:
            raise ConfigError(f"{display('loss_scale', self.loss_scale)} is of --max-loss; give that, or leave it out.")
        found = self.gguf_bytes if self.finds_share else None
        sizes_asked = (
            *(("--params", self.parameters), ("--max-size", self.size_bytes), ("--max-loss", self.max_loss)),
            ("--max-file-size", found),
        )
        for option, value in sizes_asked:
            if value is not None and self.budget != "parameters":
                raise ConfigError(f"{option} is a budget of its own; give --sparsity beside --budget {self.budget}.")
        if self.parameters is not None and self.parameters <= 0:
            raise ConfigError(f"--params {self.parameters} is out of range: give a positive number of parameters.")
        check_minimum(self, size_bytes=1, gguf_bytes=1)
        check_minimum(self, round_to=1, hidden_size=1, intermediate_size=1, value_size=1, query_key_size=1)
        check_minimum(self, num_experts=1)
        for name in ("hidden_rate", "inner_rate"):
            rate = getattr(self, name)
            if rate is not None and not (math.isfinite(rate) and 0 <= rate < 1):
                raise ConfigError(f"{display(name, rate)} is out of range: give a fraction from 0 up to below 1.")
        if given and (self.intermediate_size or any(rate is not None for rate in rates)):
            raise ConfigError("Give either a target (--sparsity, --params), or an FFN width or rates, which state it.")
        if self.hidden_rate is not None and self.hidden_size is not None:
            raise ConfigError("Give either --set hidden_rate= or --set hidden_size=.")
        if self.inner_rate is not None and any(sizes[1:]):
            raise ConfigError("Give either --set inner_rate= or the sizes that it stands for.")

    @property
    def serving(self) -> Serving:
        """Return what the result is served with."""
        return ANY if self.serve is None else Serving.of(self.serve)

    @property
    def finds_share(self) -> bool:
        """Return whether the run finds how many parameters stay, within the bytes of a GGUF file."""
        return self.gguf_bytes is not None and not self.states_share and not self.states_sizes

    @property
    def states_sizes(self) -> bool:
        """Return whether a size of all layers is given."""
        sizes = self.hidden_size, self.intermediate_size, self.value_size, self.query_key_size, self.num_experts
        return any(one is not None for one in (*sizes, self.hidden_rate, self.inner_rate))

    @property
    def states_share(self) -> bool:
        """Return whether a whole size is asked for, beside or instead of sizes of its parts."""
        return (self.sparsity, self.parameters, self.size_bytes, self.max_loss) != (None, None, None, None)

    @property
    def asks_less(self) -> bool:
        """Return whether anything beside the stated sizes is to be removed."""
        others = self.parameters, self.size_bytes, self.max_loss
        return bool(self.sparsity) or any(one is not None for one in others) or self.finds_share

    @property
    def states_hidden_size(self) -> bool:
        """Return whether the hidden size is given, as a size or as a rate."""
        return self.hidden_size is not None or bool(self.hidden_rate)

    def wanted_parameters(self, dense_parameters: int) -> int:
        """Return the stored parameters that are asked for; the dense model's if only sizes are given."""
        if self.parameters is not None:
            return self.parameters
        return round(dense_parameters * (1 - (self.sparsity or 0.0)))


@dataclass(frozen=True)
class TextOptions:
    """The calibration text: its sources, joined by `+`, and how many sequences of how many tokens are read."""

    calibration: str = "c4"
    num_sequences: int = 128
    sequence_length: int = 1024

    def __post_init__(self) -> None:
        check_values(self)
        check_minimum(self, num_sequences=1, sequence_length=2)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all sequences."""
        return self.num_sequences * self.sequence_length


@dataclass(frozen=True)
class MachineOptions:
    """The device of a run and the bounds of its memory.

    Attributes:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: dtype of the forward passes.
        batch_size: sequences in one forward pass.
        max_memory_bytes: bound of the process's peak resident memory; a run that cannot keep to it is refused.
        max_device_memory_bytes: bound of what torch takes on a CUDA device.
        offload_dir: folder for activations that do not fit and for scratch files; None: the system's temporary folder.
    """

    device: str = "auto"
    dtype: Dtype = "auto"
    batch_size: int = 4
    max_memory_bytes: int | None = None
    max_device_memory_bytes: int | None = None
    offload_dir: str | None = None

    def __post_init__(self) -> None:
        check_values(self)
        check_minimum(self, batch_size=1, max_memory_bytes=1, max_device_memory_bytes=1)


@dataclass(frozen=True)
class Config:
    """Every choice of a run; the report holds the same record. `Config.of` makes one from flat options.

    Attributes:
        checkpoint: a folder of safetensors, a `.gguf` file, or a hub name.
        output: a folder that does not exist.
        target: how much is removed.
        method: what is chosen, and how it is corrected.
        text: the calibration text.
        machine: the device, and the bounds of its memory.
        recipe: the name of the method it began with.
        form: the form in which the result is written; `auto`: as `Run` settles it.
        profile: folder of a profile to plan from; None: the run makes one if it needs one.
        seed: seed of the text's order, of sketches and of random choices.
        save_dtype: dtype of the stored weights; `keep`: the input's; `q8_0`: blocks of 8 bits in a GGUF file.
        max_file_bytes: maximum bytes of tensors per weight file, as transformers counts them.
        bits: mean bits of the weights of a GGUF file whose tensors have quantised types of their own, instead of the
            target's `gguf_bytes`; None: as that says.
        quantise: what the linears of layers are rounded to, in the format of compressed-tensors; None: nothing is.
        overwrite: replace an output and forget an interrupted run.
        resume: continue an interrupted run.
        tie: store one table for an output head and an embedding that are two copies of it.
        revision: branch, tag or commit of a hub name; None: its main branch.
    """

    checkpoint: str
    output: str
    target: Target
    method: Method = RECIPES["oneshot"]
    text: TextOptions = TextOptions()
    machine: MachineOptions = MachineOptions()
    recipe: str = "oneshot"
    form: FormChoice = "auto"
    profile: str | None = None
    seed: int = 0
    save_dtype: SaveDtype = "keep"
    max_file_bytes: int = MAX_FILE_BYTES
    bits: float | None = None
    quantise: QuantiseName | None = None
    overwrite: bool = False
    resume: bool = False
    revision: str | None = None
    tie: bool = False

    def __post_init__(self) -> None:
        check_values(self)
        check_minimum(self, max_file_bytes=1)
        if not 0 <= self.seed <= MOST_SEED:
            raise ConfigError(f"--seed {self.seed} is out of range: give an integer from 0 to {MOST_SEED}.")
        if self.bits is not None and not (math.isfinite(self.bits) and 0 < self.bits <= 16):
            raise ConfigError(f"--bits {self.bits} is out of range: give a number above 0 and up to 16.")
        if self.bits is not None and self.target.gguf_bytes is not None:
            raise ConfigError("--bits and --max-file-size say the same; leave out --bits.")
        if self.quantises and self.form != "gguf":
            raise ConfigError("--bits and --max-file-size are of GGUF files alone; add --form gguf, or leave them out.")
        if self.quantises and self.save_dtype == "q8_0":
            raise ConfigError("--bits and --max-file-size choose the types of tensors; leave out --save-dtype q8_0.")
        if self.save_dtype == "q8_0" and self.form != "gguf":
            raise ConfigError("--save-dtype q8_0 is a type of GGUF files (--form gguf) alone; leave it out.")
        if self.quantise is not None and self.form == "gguf":
            raise ConfigError(
                "--quantise is not of GGUF files, whose types --bits and --max-file-size choose; leave it out."
            )
        if self.quantise is not None and self.target.budget == "bytes":
            raise ConfigError("--quantise changes what --budget bytes is a share of; give --max-size instead.")

    @property
    def quantises(self) -> bool:
        """Return whether tensors of the result get quantised types of their own."""
        return self.bits is not None or self.target.gguf_bytes is not None

    @property
    def gguf_options(self) -> list[str]:
        """Return the options given that GGUF files alone have."""
        found = {
            "--bits": self.bits is not None,
            "--max-file-size": self.target.gguf_bytes is not None,
            "--save-dtype q8_0": self.save_dtype == "q8_0",
        }
        return [option for option, is_given in found.items() if is_given]

    @property
    def given_settings(self) -> dict[str, Any]:
        """Return the fields of the method that are neither the recipe's nor usual, so that somebody has given them."""
        plain = find_recipe(self.recipe)
        found = {field.name: getattr(self.method, field.name) for field in fields(self.method)}
        usual = {field.name: field.default for field in fields(self.method)}
        return {name: value for name, value in found.items() if value not in (getattr(plain, name), usual[name])}

    @staticmethod
    def of(
        checkpoint: str | Path, output: str | os.PathLike[str] | None = None, *, recipe: str = "oneshot", **options: Any
    ) -> "Config":
        """Make a config from flat options, such as `sparsity=0.2, calibration="text.jsonl", ffn="obs"`.

        Every option is a field of `Target`, `Method`, `TextOptions`, `MachineOptions` or `Config`, or one of
        `SPELLINGS`; the method's other fields are the recipe's. Without an output it is `default_output`.

        Raises `ConfigError` for an unknown option or recipe, and for values that are not allowed.
        """
        parts: dict[str, dict[str, Any]] = {name: {} for name in ("target", "method", "text", "machine", "config")}
        for name, value in options.items():
            field, parse = SPELLINGS.get(name, (name, str))
            parts[part_of(field)][field] = parsed(value, parse)
        if parts["config"].get("form", "auto") == "auto":
            parts["config"]["form"] = RECIPE_FORMS.get(recipe, "auto")
        target = Target(**parts["target"])
        return Config(
            str(checkpoint),
            default_output(str(checkpoint), target) if output is None else str(output),
            target,
            find_recipe(recipe, **parts["method"]),
            TextOptions(**parts["text"]),
            MachineOptions(**parts["machine"]),
            recipe,
            **parts["config"],
        )

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Config":
        """Return the inverse of `to_dict`, also after JSON; values may also be flat options, as `of` takes them.

        Raises `ConfigError` without a checkpoint, and as `of`.
        """
        flat: dict[str, Any] = {}
        for name, value in values.items():
            flat |= value if name in PARTS and isinstance(value, Mapping) else {name: value}
        if flat.get("checkpoint") is None:
            raise ConfigError("No checkpoint is given: name a folder, a .gguf file, or a model on the hub.")
        return Config.of(flat.pop("checkpoint"), **flat)

    def options(self) -> dict[str, Any]:
        """Return flat options from which `of` makes this config; those that are as the recipe has them are left out.

        The text and what chooses between results are always there, because their defaults may change.
        """
        always = ("checkpoint", "recipe", "form", "calibration", "num_sequences", "sequence_length", "seed")
        plain = find_recipe(self.recipe)
        found: dict[str, Any] = {}
        for record in (self, self.target, self.method, self.text, self.machine):
            for field in fields(record):
                value = getattr(record, field.name)
                default = getattr(plain, field.name) if record is self.method else field.default
                if field.name in always or (field.name not in PARTS and value != default):
                    found[field.name] = value
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        values = asdict(self)
        values["target"]["keep"] = list(self.target.keep)
        return values

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that change the result; the text counts by its tokens and not by its name."""
        options = {name: value for name, value in self.to_dict().items() if name not in NOT_IN_FINGERPRINT}
        del options["text"]["calibration"]
        return options


def tcsp_options(hidden_percent: float, inner_percent: float) -> dict[str, Any]:
    """Return the options of `Config.of` for the paper's TCSP{a %, b %} (sections 4, 5.2; algorithms 2 to 5).

    One projection for the whole model, filters by a score of forward passes, smaller heads by the values themselves,
    and no correction. Only the per-layer form holds smaller heads.
    """
    options: dict[str, Any] = {"recipe": "tcsp", "hidden_rate": hidden_percent / 100}
    if inner_percent:
        options |= {"inner_rate": inner_percent / 100, "ffn": "tcsp-score", "value_features": "values"}
        options |= {"form": "per-layer"}
    return options


@dataclass(frozen=True)
class EvaluationOptions:
    """Hold the options of `oneshot evaluate`, checked.

    Attributes:
        sequence_length: tokens in a window or of an example.
        max_windows: largest number of windows or examples of each text; None: all.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: dtype of the forward passes.
        prefill_tokens: tokens of the timed prefill; None: 512, or as many as learned positions allow.
        decode_tokens: tokens of the timed decoding; 0 leaves the latency out.
        tasks: names of lm-eval's tasks, of our own, or `builtin`.
        limit: largest number of documents of each task; None: all.
        include_path: folder with task files; None: only lm-eval's tasks and our own.
        kind: task of the models, such as `causal`; None: the task of the first one's class.
        batch_size: windows, examples or requests of tasks in one forward pass; None: 8 examples, or one of the others.
    """

    sequence_length: int = 1024
    max_windows: int | None = None
    device: str = "auto"
    dtype: Dtype = "auto"
    prefill_tokens: int | None = None
    decode_tokens: int = 32
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    include_path: str | None = None
    kind: Kind | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("device", "dtype", "include_path"):
            object.__setattr__(self, name, parsed(getattr(self, name), SPELLINGS.get(name, (name, str))[1]))
        if isinstance(self.tasks, str | list):  # of Python's callers
            object.__setattr__(self, "tasks", (self.tasks,) if isinstance(self.tasks, str) else tuple(self.tasks))
        check_values(self)
        for task in self.tasks:
            if not isinstance(task, str) or not task:
                raise ConfigError(f"--tasks {task!r} is not the name of a task; give one such as builtin.")
        check_minimum(self, sequence_length=2, max_windows=1, prefill_tokens=1, decode_tokens=0, limit=1, batch_size=1)
        for name in ("limit", "include_path"):
            value = getattr(self, name)
            if value is not None and not self.tasks:
                raise ConfigError(f"{display(name, value)} is for tasks; give --tasks, or leave it out.")
        if self.prefill_tokens is not None and self.decode_tokens == 0:
            raise ConfigError(
                f"--prefill-tokens {self.prefill_tokens} is for the latency, which --decode-tokens 0 leaves out; give "
                "one of the two."
            )

    @staticmethod
    def of(**options: Any) -> "EvaluationOptions":
        """Return the record of options. Raises `ConfigError` for an unknown one and for values that are not allowed."""
        known = field_names(EvaluationOptions)
        for name in options:
            if name not in known:
                raise ConfigError(f"{name} is not an option of evaluate{did_you_mean(name, known)}")
        return EvaluationOptions(**options)


PARTS: dict[str, type] = {
    "target": Target,
    "method": Method,
    "text": TextOptions,
    "machine": MachineOptions,
    "config": Config,
}


def parsed(value: Any, parse: Callable[[str], Any]) -> Any:
    """Return what a text becomes; a path, and a dtype or a device of torch, count as text, and others stay."""
    is_text = isinstance(value, str | os.PathLike) or type(value).__module__ == "torch"
    return parse(str(value)) if is_text else value


def refuse_prompt(prompt: str | None, form: str) -> None:
    """Raise `ConfigError` for a question that is empty or is not a text, and for a form that nothing here asks."""
    if prompt is not None and not (isinstance(prompt, str) and prompt.strip()):
        stated = "empty" if isinstance(prompt, str) else f"of the type {type(prompt).__name__}"
        raise ConfigError(f"--prompt is {stated}; give a question, or leave it out.")
    if prompt is not None and form == "gguf":
        raise ConfigError("--prompt is asked by the check, which opens no GGUF file; leave out --prompt.")


def own_name(checkpoint: str) -> str:
    """Return the last part of a checkpoint's path or hub name, which names what is made of it."""
    path = Path(checkpoint).expanduser()
    return path.stem if path.suffix == ".gguf" else path.name or path.resolve().name


def default_output(checkpoint: str, target: Target, *, several: bool = False) -> str:
    """Return the folder of a result whose output is not given: `NAME-oneshot-0.20` in the working folder.

    `several`: whether it holds the results of several sparsities.
    """
    size = "" if several or target.sparsity is None else f"-{target.sparsity:.2f}"
    if target.parameters is not None:
        size = f"-{target.parameters / 1e6:.0f}M"
    if target.size_bytes is not None:
        size = f"-{target.size_bytes / 1e6:.0f}MB"
    if target.finds_share and target.gguf_bytes is not None:
        size = f"-{target.gguf_bytes / 1e6:.0f}MB"
    if target.max_loss is not None:
        size = f"-loss-{target.max_loss:.2f}"
    return f"{own_name(checkpoint)}-oneshot{size}"


def part_of(option: str) -> str:
    """Return the part of a config that has this option. Raises `ConfigError` for an unknown option."""
    known: dict[str, str] = {}
    for name, record in PARTS.items():
        known |= {field: name for field in field_names(record) if field not in PARTS}
    if option not in known:
        similar = did_you_mean(option, [*known, *SPELLINGS])
        raise ConfigError(f"{option} is not an option, see --help and --help-methods{similar}")
    return known[option]
