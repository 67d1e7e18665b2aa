"""Layers that predict tokens after the next one: what files and configs call them.

transformers' classes do not load them with the model. `generate(use_mtp=True)` and vLLM's speculative decoding read
them from the same files: transformers' `MtpModel` and vLLM's `*_mtp` models have these names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

WORDS = {"mtp", "nextn"}  # in the names of what a config states of such layers
PREFIX = "mtp."  # of such layers in files of Qwen; others have them behind the model's own layers


@dataclass(frozen=True)
class FurtherNames:
    """The names of such layers in files.

    A layer reads the embedding of the next token and the final states, each after a norm, side by side through a
    linear. What follows is a block as a layer of the model, and a norm before the model's output head.

    Every name may contain `{layers}`, the model's own layers, `{number}`, counted on from those, and `{index}`, from 0.

    Attributes:
        counts: keys of a config for their number; all that are stated are equal.
        block: what the names of the block's tensors begin with.
        projection, embedding_norm, states_norm, output_norm: modules.
        copies: tensors of the model that files may have again.
    """

    counts: tuple[str, ...]
    block: str
    projection: str
    embedding_norm: str
    states_norm: str
    output_norm: str
    copies: tuple[str, ...] = ()

    def of(self, layers: str, own: int, index: int) -> "FurtherNames":
        """Return the names of layer `index`, behind so many layers of the model's `own`."""
        named = partial(str.format, layers=layers, number=own + index, index=index)
        projection, *norms = map(named, self.modules)
        copies = tuple(map(named, self.copies))
        return FurtherNames(self.counts, named(self.block), projection, norms[0], norms[1], norms[2], copies)

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the modules outside the block."""
        return self.projection, self.embedding_norm, self.states_norm, self.output_norm


BEHIND = FurtherNames(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    "{layers}.{number}.",
    "{layers}.{number}.eh_proj",
    "{layers}.{number}.enorm",
    "{layers}.{number}.hnorm",
    "{layers}.{number}.shared_head.norm",
    ("{layers}.{number}.embed_tokens.weight", "{layers}.{number}.shared_head.head.weight"),
)
APART = FurtherNames(
    ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"),
    f"{PREFIX}layers.{{index}}.",
    f"{PREFIX}fc",
    f"{PREFIX}pre_fc_norm_embedding",
    f"{PREFIX}pre_fc_norm_hidden",
    f"{PREFIX}norm",
)


def stated_of_further(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config states of such layers."""
    stated = {name: value for name, value in config.items() if WORDS & set(name.split("_"))}
    return {name: value for name, value in stated.items() if isinstance(value, int | list | dict)}


def without_further(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config states of a model without such layers: numbers of 0, and empty lists."""
    return {name: type(value)() for name, value in stated_of_further(config).items()}
