"""Encoder–decoders such as T5: loss of targets, and greedy generation."""

from dataclasses import dataclass
from typing import Any

import torch

from oneshot.errors import CalibrationError
from oneshot.evaluation.examples import Examples, Inputs, Reading, text_of
from oneshot.text import padded

IGNORED = -100  # no target


@dataclass(frozen=True)
class TargetPrediction:
    """The prediction of a model for targets.

    Attributes:
        losses, best: at every token of all targets, the loss, float64, and the most likely token, int64.
        written: for each example the tokens that the model writes by itself, without special ones.
    """

    losses: torch.Tensor
    best: torch.Tensor
    written: list[list[int]]


@dataclass(frozen=True)
class Generation(Examples):
    """Examples `text, target`. `ends`: tokens that end or fill what is written, and do not count as written."""

    inputs: Inputs
    targets: list[list[int]]
    ends: frozenset[int]

    @classmethod
    def read(cls, source: str, reading: Reading) -> "Generation":
        rows = reading.rows(source, {"text": "text", "target": "target"})
        encoded = [reading.encode(text_of(row, "text", source), None, source) for row in rows]
        targets = [reading.encode(text_of(row, "target", source), None, source)[0] for row in rows]
        return cls(Inputs.of(encoded), targets, frozenset(_ends(reading)))

    @property
    def tokens(self) -> list[int]:
        return self.inputs.tokens() + [token for target in self.targets for token in target]

    def predict(self, model: Any, batch_size: int) -> TargetPrediction:
        """Predict each token of the targets after the true ones before it, and then write greedily with a cache."""
        from transformers import GenerationConfig

        greedy = GenerationConfig(
            max_new_tokens=max(len(target) for target in self.targets) + 1,  # one more than the longest shows its end
            decoder_start_token_id=model.config.decoder_start_token_id,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
        )
        losses: dict[int, torch.Tensor] = {}
        best: dict[int, torch.Tensor] = {}
        written: dict[int, list[int]] = {}
        for places, arguments in self.inputs.batches(model, batch_size):
            labels = padded([self.targets[place] for place in places], IGNORED).to(arguments["input_ids"].device)
            logits = model(**arguments, labels=labels).logits
            generated = model.generate(**arguments, generation_config=greedy).tolist()
            for row, place in enumerate(places):
                target = torch.tensor(self.targets[place])
                log_p = logits[row, : len(target)].float().log_softmax(-1).cpu()
                losses[place] = -log_p.gather(1, target[:, None])[:, 0].double()
                best[place] = log_p.argmax(-1)
                written[place] = self._ordinary(generated[row])
        order = range(self.count)
        return TargetPrediction(
            torch.cat([losses[place] for place in order]),
            torch.cat([best[place] for place in order]),
            [written[place] for place in order],
        )

    def numbers(self, prediction: TargetPrediction, dense: TargetPrediction | None) -> dict[str, float]:
        """Return the loss in nats per token of the targets, token accuracy, and exact match.

        Beside a baseline also `token agreement` on the most likely token of every position, and `agreement`, the share
        of examples for which both write the same.
        """
        targets = torch.tensor([token for target in self.targets for token in target])
        wanted = [self._ordinary(target) for target in self.targets]
        numbers = {
            "loss": float(prediction.losses.mean()),
            "token accuracy": float((prediction.best == targets).double().mean()),
            "exact match": _share_equal(prediction.written, wanted),
        }
        if dense is not None:
            numbers["token agreement"] = float((prediction.best == dense.best).double().mean())
            numbers["agreement"] = _share_equal(prediction.written, dense.written)
        return numbers

    def _ordinary(self, tokens: list[int]) -> list[int]:
        """Return the tokens without the start and the end."""
        return [token for token in tokens if token not in self.ends]


def _share_equal(written: list[list[int]], wanted: list[list[int]]) -> float:
    return sum(one == other for one, other in zip(written, wanted, strict=True)) / len(wanted)


def _ends(reading: Reading) -> list[int]:
    """Return the tokens that start, end or fill a target. Raises `CalibrationError` without an end."""
    names = ("decoder_start_token_id", "pad_token_id", "eos_token_id")
    ends = [reading.config.get(name) for name in names]
    if not isinstance(ends[2], int):
        raise CalibrationError("config.json states no eos_token_id, so nothing that is written ends; state it there.")
    return [token for token in ends if isinstance(token, int)]
