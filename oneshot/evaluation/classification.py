"""Classification of texts or pairs: accuracy, and agreement with the baseline."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from oneshot.errors import CalibrationError
from oneshot.evaluation.examples import Examples, Inputs, Reading, padding_of, text_of

PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
)  # columns of JSON lines here, and of GLUE's data sets
COLUMNS = (
    *({"text": first, "text_pair": second, "label": "label"} for first, second in PAIRS),
    {"text": "sentence", "label": "label"},
    {"text": "text", "label": "label"},
)


@dataclass(frozen=True)
class Classification(Examples):
    """Examples `text[, text_pair], label`; a label is a class's number, or its name in the model's config."""

    inputs: Inputs
    labels: torch.Tensor

    @classmethod
    def reason_against(cls, config: Mapping[str, Any]) -> str | None:
        """Return why a classifier's outputs are not the scores of classes of which one is right; None if they are.

        transformers reads `problem_type`, and takes a classifier of one output for a regression.
        """
        problem, count = config.get("problem_type"), len(config.get("id2label") or ()) or config.get("num_labels", 2)
        if problem == "multi_label_classification":
            stated = "may give a text several classes at once (problem_type multi_label_classification)"
        elif problem == "regression" or count == 1:
            stated = "gives a text a number and not a class" + " (it has one output)" * (count == 1)
        else:
            return None
        return (
            f"{stated}, and only classifiers that give one of several classes are measured; leave out --text, and "
            "compare its outputs in a program of your own."
        )

    @classmethod
    def reason_against_comparing(cls, first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
        """Return that both have the same classes in another order, so that their numbers are of others; or None."""
        classes, others = (
            {str(number): str(label).lower() for number, label in (config.get("id2label") or {}).items()}
            for config in (first, other)
        )
        if classes == others or sorted(classes.values()) != sorted(others.values()):
            return None
        return (
            "have the same classes in another order (id2label), so their outputs cannot be compared; give models of "
            "one order, or evaluate each alone."
        )

    @classmethod
    def read(cls, source: str, reading: Reading) -> "Classification":
        classes = {str(name): int(number) for number, name in reading.config.get("id2label", {}).items()}
        count = len(classes) or 2
        encoded, labels = [], []
        for row in reading.rows(source, *COLUMNS):
            pair = None if row.get("text_pair") is None else text_of(row, "text_pair", source)
            encoded.append(reading.encode(text_of(row, "text", source), pair, source))
            labels.append(_label(row["label"], classes, count, source))
        return cls(Inputs.of(encoded), torch.tensor(labels))

    def predict(self, model: Any, batch_size: int) -> torch.Tensor:
        """Return the log-probabilities of the classes, float64 `(examples, classes)`.

        Decoders look for the last token that is no padding, so without such a token they take one example at a time.
        """
        rows: dict[int, torch.Tensor] = {}
        for places, arguments in self.inputs.batches(model, 1 if padding_of(model) is None else batch_size):
            log_p = model(**arguments).logits.double().log_softmax(-1).cpu()
            rows |= dict(zip(places, log_p, strict=True))
        return torch.stack([rows[place] for place in range(self.count)])

    def numbers(self, log_p: torch.Tensor, dense: torch.Tensor | None) -> dict[str, float]:
        """Return accuracy and, beside a baseline, agreement and mean KL(baseline ‖ model) in nats.

        Agreement is the share of examples that both give the same class: "model correlation", STAT A.7.
        """
        numbers = {"accuracy": _share(log_p.argmax(-1) == self.labels)}
        if dense is not None:
            if dense.shape != log_p.shape:
                raise CalibrationError(
                    f"The baseline has {dense.shape[1]} classes and the model {log_p.shape[1]}; give two of one task."
                )
            numbers["agreement"] = _share(log_p.argmax(-1) == dense.argmax(-1))
            numbers["KL divergence"] = float((dense.exp() * (dense - log_p)).sum(-1).mean())
        return numbers


def _share(hits: torch.Tensor) -> float:
    return float(hits.double().mean())


def _label(value: Any, classes: dict[str, int], count: int, source: str) -> int:
    """Return the number of a label's class. Raises `CalibrationError` if the model has no such class."""
    number = classes.get(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
        raise CalibrationError(
            f"{source} holds the label {reprlib.repr(value)}, but the model has the classes 0 to {count - 1}; give a "
            "split with labels, of the task that the model is for."
        )
    return number
