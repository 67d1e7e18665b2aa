"""A conversation with a model that writes text."""

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from oneshot.checkpoint import Checkpoint
from oneshot.errors import CheckpointError, cause
from oneshot.evaluation.kinds import kind_of
from oneshot.evaluation.models import load_model
from oneshot.report.words import CUT, NOTHING
from oneshot.text import load_tokenizer, prompt_ids, whole_letters

MOST_LETTERS = 2**20  # of a conversation in the words of a chat template


def was_cut(model: Any, answer: torch.Tensor, most: int) -> bool:
    """Return whether the tokens of an answer, `(length,)`, stop at the most that were allowed, without an end."""
    ends = model.generation_config.eos_token_id
    return len(answer) >= most and int(answer[-1]) not in (ends if isinstance(ends, list) else [ends])


class Conversation:
    """A model, its tokenizer, and the turns so far.

    A model without a chat template continues the prompt instead, and keeps no turns.

    Args:
        folder: of a checkpoint whose class writes text. device, dtype: of the forward passes.

    Raises `CheckpointError` for a model that does not write text.
    """

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        kind = kind_of(Checkpoint(folder).config)
        if kind != "causal":
            raise CheckpointError(
                f"{folder} holds a model of the kind {kind}, which writes no text; evaluate measures it."
            )
        self._tokenizer = load_tokenizer(folder)
        self._model = load_model(folder, device=device, dtype=dtype)
        self._turns: list[dict[str, str]] = []

    def answer(self, prompt: str, max_new_tokens: int) -> Iterator[str]:
        """Yield the pieces of the model's answer as it writes them, greedily; `CUT` follows if it did not end there.

        Raises `CalibrationError` if the chat template does not write the prompt within bounds, and `CheckpointError` if
        the model does not write.
        """
        from transformers import TextIteratorStreamer

        ids = self._ids(prompt)
        pieces = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        failures: list[Exception] = []
        outputs: list[torch.Tensor] = []

        def write() -> None:
            try:
                with torch.inference_mode():
                    output = self._model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=max_new_tokens,
                        do_sample=False,
                        streamer=pieces,
                    )
                outputs.append(output[0, ids.shape[1] :])
            except (TypeError, ValueError, RuntimeError) as error:  # told by the thread that reads the pieces
                failures.append(error)
                pieces.end()

        thread = Thread(target=write)
        thread.start()
        written = []
        for piece in pieces:
            written.append(piece)
            yield piece
        thread.join()
        if not failures and not "".join(written).strip():
            yield NOTHING
        elif not failures and was_cut(self._model, outputs[0], max_new_tokens):
            yield CUT
        if failures:
            raise CheckpointError(f"The model does not write an answer ({cause(failures[0])}).") from failures[0]
        if self._tokenizer.chat_template:
            self._turns.append({"role": "assistant", "content": "".join(written).strip()})

    def _ids(self, prompt: str) -> Any:
        """Return the tokens `(1, length)`, int64, of the conversation with one more turn, or of the prompt alone."""
        prompt = whole_letters(prompt)  # Python keeps bytes of an argument that are not UTF-8 as surrogates
        if self._tokenizer.chat_template:
            self._turns.append({"role": "user", "content": prompt})
            ids = prompt_ids(self._tokenizer, self._turns, "the conversation", MOST_LETTERS)
        else:
            ids = self._tokenizer(prompt, return_tensors="pt")["input_ids"]
        return ids.to(self._model.device)
