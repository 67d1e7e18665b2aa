"""Sentence encoders: cosine to the baseline's embeddings, and retrieval of passages by questions."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oneshot.checkpoint.pooling import further_modules, pooling_of
from oneshot.errors import CalibrationError, CheckpointError
from oneshot.evaluation.examples import Examples, Inputs, Reading, text_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retrieval(Examples):
    """Examples `question, passage`: the passages of all examples are searched for each question's own.

    Attributes:
        questions, passages: passages are distinct. own: the place of each question's passage, int64 `(questions,)`.
        pooling: what an embedding is made of (`embed`), as the first model's folder states it.
    """

    questions: Inputs
    passages: Inputs
    own: torch.Tensor
    pooling: str

    @classmethod
    def read(cls, source: str, reading: Reading) -> "Retrieval":
        rows = reading.rows(source, {"question": "question", "passage": "passage"})
        questions = [text_of(row, "question", source) for row in rows]
        passages = [text_of(row, "passage", source) for row in rows]
        distinct = list(dict.fromkeys(passages))
        place_of = {passage: place for place, passage in enumerate(distinct)}

        def encoded(texts: Sequence[str]) -> Inputs:
            return Inputs.of([reading.encode(text, None, source) for text in texts])

        own = torch.tensor([place_of[passage] for passage in passages])
        return cls(encoded(questions), encoded(distinct), own, _pooling(reading.folder))

    @property
    def tokens(self) -> list[int]:
        return self.questions.tokens() + self.passages.tokens()

    @property
    def count(self) -> int:
        return len(self.questions)

    def predict(self, model: Any, batch_size: int) -> torch.Tensor:
        """Return embeddings of length 1, of the questions and then of the passages: `(questions + passages, D)`."""
        return torch.cat([embed(model, inputs, batch_size, self.pooling) for inputs in (self.questions, self.passages)])

    def numbers(self, embeddings: torch.Tensor, dense: torch.Tensor | None) -> dict[str, float]:
        """Return retrieval and, beside a baseline, agreement, neighbours and mean cosine.

        `retrieval` is the share of questions whose own passage has the largest cosine, `agreement` the share with the
        same passage as for the baseline, and `neighbours` the share with the same nearest other question. `cosine` is
        the mean cosine of an embedding to the baseline's, over questions and passages.
        """
        found = self._found(embeddings)
        numbers = {"retrieval": float((found == self.own).double().mean())}
        if dense is not None:
            if dense.shape != embeddings.shape:
                raise CalibrationError(
                    f"The baseline's embeddings have {dense.shape[1]} coordinates and the model's "
                    f"{embeddings.shape[1]}, so they have no cosine; give models with embeddings of one size."
                )
            numbers["agreement"] = float((found == self._found(dense)).double().mean())
            if self.count > 1:
                numbers["neighbours"] = float((self._nearest(embeddings) == self._nearest(dense)).double().mean())
            numbers["cosine"] = float((embeddings * dense).sum(-1).mean())
        return numbers

    def _found(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the passage with the largest cosine to each question, int64 `(questions,)`."""
        questions, passages = embeddings[: self.count], embeddings[self.count :]
        return (questions @ passages.T).argmax(-1)

    def _nearest(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the other question with the largest cosine to each question, int64 `(questions,)`."""
        questions = embeddings[: self.count]
        return (questions @ questions.T).fill_diagonal_(-torch.inf).argmax(-1)


def _pooling(folder: Path) -> str:
    """Return what `embed` makes embeddings of: what the files of sentence-transformers state, or else the mean."""
    try:
        if further := further_modules(folder):
            logger.warning(
                "The embeddings are what the pooling gives, because oneshot does not apply the module %s of %s.",
                " and ".join(further)[:100],
                folder,
            )
        return pooling_of(folder) or "mean"
    except CheckpointError as error:
        logger.warning("The embeddings are means over tokens, because %s", error)
        return "mean"


def embed(model: Any, inputs: Inputs, batch_size: int, pooling: str) -> torch.Tensor:
    """Return the embedding of each example, scaled to length 1: float64 `(examples, D)`, on the CPU.

    `pooling`: of the last hidden states, `mean` over the tokens, or the first (`cls`) or the last one (`lasttoken`).
    """
    rows: dict[int, torch.Tensor] = {}
    for places, arguments in inputs.batches(model, batch_size):
        states = model(**arguments).last_hidden_state.double()
        mask = arguments["attention_mask"]
        if pooling == "mean":
            pooled = (states * mask.unsqueeze(-1)).sum(1)  # of any length, as only its direction counts
        else:
            token = mask.sum(1) - 1 if pooling == "lasttoken" else torch.zeros_like(mask[:, 0])
            pooled = states[torch.arange(len(states), device=states.device), token]
        rows |= dict(zip(places, nn.functional.normalize(pooled, dim=-1).cpu(), strict=True))
    return torch.stack([rows[place] for place in range(len(inputs))])
