"""The engine that serves a result, its GPUs, and the groups of a quantiser (`--serve`)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from oneshot.errors import ConfigError
from oneshot.parsing import did_you_mean

Engine = Literal["vllm", "sglang", "trtllm", "mlx", "llama.cpp"]
ENGINES: dict[Engine, str] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "mlx": "MLX",
    "llama.cpp": "llama.cpp",
}


@dataclass(frozen=True)
class Serving:
    """State what a result is served with.

    Attributes:
        engine: None if any.
        tp: GPUs that share every layer (tensor parallelism). pp: groups of GPUs that share the layers out (pipeline).
        group: weights of an input that a quantiser rounds together.
    """

    engine: Engine | None = None
    tp: int = 1
    pp: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        if self.engine is not None and self.engine not in ENGINES:
            similar = did_you_mean(str(self.engine), ENGINES)
            raise ConfigError(f"--serve engine={self.engine} is not one of {', '.join(ENGINES)}{similar}")
        for name in ("tp", "pp", "group"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigError(f"--serve {name}={number} is not a positive integer; give one such as {name}=2.")
        if self.engine == "llama.cpp" and (self.tp, self.pp) != (1, 1):
            raise ConfigError("--serve engine=llama.cpp shares any sizes between GPUs itself; leave tp= and pp= out.")

    @staticmethod
    def of(stated: str | Mapping[str, Any]) -> "Serving":
        """Make it of `engine=vllm,tp=2,group=128`, or of the same as a mapping. Raises `ConfigError`."""
        known, found = [field.name for field in fields(Serving)], dict[str, Any]()
        pairs = stated.items() if isinstance(stated, Mapping) else (part.split("=", 1) for part in stated.split(","))
        for name, *value in pairs:
            key = str(name).strip()
            if key not in known or not value:
                similar = did_you_mean(key, known) if value else "."
                raise ConfigError(f"--serve {key} is not understood; write engine=vllm,tp=2,pp=1,group=128{similar}")
            if key in found:
                raise ConfigError(f"--serve gives {key} twice; remove one of both.")
            found[key] = _number(value[0].strip()) if isinstance(value[0], str) else value[0]
        if not found:
            raise ConfigError("--serve is empty; write engine=vllm,tp=2,pp=1,group=128, or leave it out.")
        return Serving(**found)

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ",".join(f"{name}={value}" for name, value, default in values if value != default) or "tp=1"

    @property
    def words(self) -> str:
        """Return it as the end of a sentence: `in vLLM, with tensor parallelism of 2 and groups of 128 weights`."""
        numbers = (
            (self.tp, f"tensor parallelism of {self.tp}"),
            (self.pp, f"pipeline parallelism of {self.pp}"),
            (self.group, f"groups of {self.group} weights"),
        )
        *others, last = [text for number, text in numbers if number > 1] or ["one GPU"]
        listed = f"{', '.join(others)} and {last}" if others else last
        return f"in {'any engine' if self.engine is None else ENGINES[self.engine]}, with {listed}"


ANY = Serving()
"""Nothing is asked for."""


def _number(text: str) -> Any:
    return int(text) if text.isdecimal() and len(text) < 10 else text


assert tuple(ENGINES) == get_args(Engine)
