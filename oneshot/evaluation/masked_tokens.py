"""Masked language models: loss, accuracy and agreement on masked tokens that are the same for every model."""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from oneshot.errors import CalibrationError
from oneshot.evaluation.examples import Examples, Inputs, Reading
from oneshot.text import encode, iter_pairs

MASKED_SHARE = 0.15  # of the tokens of an example (BERT, section 3.1)
SEED = 0


@dataclass(frozen=True)
class MaskedTokens(Examples):
    """Texts, or pairs, with 15 % of their tokens replaced by the mask token; special tokens stay.

    All masked tokens become the mask token: BERT's training also keeps some and exchanges some.

    Attributes:
        masked: places of the masked tokens of every example, int64. targets: the tokens there before.
        all_tokens: token ids of all texts, before they are masked.
    """

    inputs: Inputs
    masked: list[torch.Tensor]
    targets: list[torch.Tensor]
    all_tokens: list[int]

    @classmethod
    def read(cls, source: str, reading: Reading) -> "MaskedTokens":
        """Read texts as for calibration, in their stored order, and choose tokens by a fixed seed.

        Raises `CalibrationError`.
        """
        tokenizer = reading.tokenizer
        if tokenizer.mask_token_id is None:
            raise CalibrationError("The tokenizer has no mask token; give the tokenizer of a masked language model.")
        special = torch.tensor(tokenizer.all_special_ids)
        generator = torch.Generator().manual_seed(SEED)
        encoded, masked, targets, tokens = [], [], [], []
        pieces = (
            example
            for text, pair in islice(iter_pairs(source, None), reading.limit)
            for example in encode(tokenizer, text, pair, reading.longest, source)
        )
        for token_ids, types in pieces:
            ids = torch.tensor(token_ids)
            ordinary = torch.isin(ids, special, invert=True).nonzero().flatten()
            if len(ordinary) == 0:
                continue
            count = max(1, round(MASKED_SHARE * len(ordinary)))
            places = ordinary[torch.randperm(len(ordinary), generator=generator)[:count]].sort().values
            masked.append(places)
            targets.append(ids[places])
            tokens += token_ids
            encoded.append((ids.index_fill(0, places, tokenizer.mask_token_id).tolist(), types))
        if not encoded:
            raise CalibrationError(f"{source} holds no text; give one record with text per line.")
        return cls(Inputs.of(encoded), masked, targets, tokens)

    @property
    def tokens(self) -> list[int]:
        return self.all_tokens

    @property
    def known(self) -> set[int]:
        return {*self.all_tokens, *self.inputs.tokens()}

    def predict(self, model: Any, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss at every masked token, float64 `(masked,)`, and the most likely token, int64 `(masked,)`."""
        losses: dict[int, torch.Tensor] = {}
        best: dict[int, torch.Tensor] = {}
        for places, arguments in self.inputs.batches(model, batch_size):
            logits = model(**arguments).logits
            for row, place in enumerate(places):
                log_p = logits[row, self.masked[place].to(logits.device)].float().log_softmax(-1).cpu()
                losses[place] = -log_p.gather(1, self.targets[place][:, None])[:, 0].double()
                best[place] = log_p.argmax(-1)
        order = range(self.count)
        return torch.cat([losses[place] for place in order]), torch.cat([best[place] for place in order])

    def numbers(
        self, prediction: tuple[torch.Tensor, torch.Tensor], dense: tuple[torch.Tensor, torch.Tensor] | None
    ) -> dict[str, float]:
        """Return loss in nats per masked token, accuracy and, beside a baseline, agreement on the most likely token."""
        losses, best = prediction
        accuracy = (best == torch.cat(self.targets)).double().mean()
        numbers = {"masked tokens": len(best), "loss": float(losses.mean()), "accuracy": float(accuracy)}
        if dense is not None:
            numbers["agreement"] = float((best == dense[1]).double().mean())
        return numbers
