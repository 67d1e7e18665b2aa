"""Examples that models are evaluated on: their columns, their tokens, and batches with padding."""

import inspect
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oneshot.errors import CalibrationError
from oneshot.report.display import progress_bar
from oneshot.text import encode, padded, read_rows, whole_letters


@dataclass(frozen=True)
class Reading:
    """The way that examples are read.

    Attributes:
        tokenizer: the models' tokenizer. longest: most tokens of an example; the rest is cut.
        limit: at most so many rows of each source; None for all.
        config, folder: the config.json of the first model, and where it lies.
    """

    tokenizer: Any
    longest: int
    limit: int | None
    config: Mapping[str, Any]
    folder: Path

    def encode(self, text: str, pair: str | None, source: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a text or a pair, cut to `longest`, and which text each is of.

        Raises `CalibrationError`.
        """
        return next(encode(self.tokenizer, text, pair, self.longest, source))

    def rows(self, source: str, *choices: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the first rows of a source under our names of columns.

        Args:
            choices: our names and a data set's; the first choice that the source has every column of is taken.

        Raises `CalibrationError` if the source fits none.
        """
        rows = read_rows(source, self.limit)
        present = dict.fromkeys(name for row in rows for name in row)
        for columns in choices:
            if all(name in present for name in columns.values()):
                return [{ours: row.get(name) for ours, name in columns.items()} for row in rows]
        raise CalibrationError(
            f"{source} has the columns {reprlib.repr(', '.join(present))} but needs "
            f"{' and '.join(choices[-1].values())}; rename its columns, or choose another --kind."
        )


def text_of(row: Mapping[str, Any], column: str, source: str) -> str:
    """Return a text of a row. Raises `CalibrationError` if it is missing or not a text."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise CalibrationError(
            f"{source} holds {reprlib.repr(value)} where text should be in the column {column}; mend that row."
        )
    return whole_letters(value)


@dataclass(frozen=True)
class Inputs:
    """The tokens of examples, and which text of a pair each token is of: lists of their own lengths."""

    token_ids: list[list[int]]
    token_types: list[list[int]]

    @classmethod
    def of(cls, encoded: Sequence[tuple[list[int], list[int]]]) -> "Inputs":
        """Return the inputs of examples as `Reading.encode` gives them."""
        return cls([ids for ids, _ in encoded], [types for _, types in encoded])

    def __len__(self) -> int:
        return len(self.token_ids)

    def tokens(self) -> list[int]:
        """Return the tokens of all examples, one after the other."""
        return [token for ids in self.token_ids for token in ids]

    def batches(self, model: Any, batch_size: int) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
        """Yield the places of examples and a model's arguments for them: equally long ones together, padded.

        The arguments are int64 `(examples, longest)` on the model's device: `input_ids`, `attention_mask`, and
        `token_type_ids` if the model tells the texts of a pair apart.
        """
        device = next(model.parameters()).device
        padding = padding_of(model) or 0
        tells_apart = "token_type_ids" in inspect.signature(model.forward).parameters
        with_types = tells_apart and getattr(model.config, "type_vocab_size", 2) > 1
        order = sorted(range(len(self)), key=lambda place: (len(self.token_ids[place]), place))
        chunks = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        for places in progress_bar(chunks, "evaluating"):
            ids = [self.token_ids[place] for place in places]
            arguments = {
                "input_ids": padded(ids, padding),
                "attention_mask": padded([[1] * len(row) for row in ids], 0),
            }
            if with_types:
                arguments["token_type_ids"] = padded([self.token_types[place] for place in places], 0)
            yield places, {name: tensor.to(device) for name, tensor in arguments.items()}


def padding_of(model: Any) -> int | None:
    """Return the padding token of a model; None if its config states none that has a row of the embedding."""
    token: int | None = getattr(model.config.get_text_config(), "pad_token_id", None)
    return token if token in range(model.get_input_embeddings().num_embeddings) else None


class Examples(ABC):
    """Examples of one source: models of a kind predict something for each, and numbers tell how well."""

    inputs: Inputs

    @classmethod
    def reason_against(cls, config: Mapping[str, Any]) -> str | None:
        """Return why a model of this config.json does not predict what the numbers are of; None if it does."""
        return None

    @classmethod
    def reason_against_comparing(cls, first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
        """Return why the outputs of models of two configs mean different things; None if they do not."""
        return None

    @classmethod
    @abstractmethod
    def read(cls, source: str, reading: Reading) -> "Examples":
        """Read the examples of a source. Raises `CalibrationError`."""

    @property
    def count(self) -> int:
        """Return the number of examples."""
        return len(self.inputs)

    @property
    def tokens(self) -> list[int]:
        """Return all tokens of the texts."""
        return self.inputs.tokens()

    @property
    def known(self) -> set[int]:
        """Return the tokens that models need to know, also those that stand in the place of others."""
        return set(self.tokens)

    @abstractmethod
    def predict(self, model: Any, batch_size: int) -> Any:
        """Return what a model predicts; it is small beside the model."""

    @abstractmethod
    def numbers(self, prediction: Any, dense: Any) -> dict[str, float]:
        """Return the numbers of a prediction; `dense`: the baseline's prediction, or None."""
