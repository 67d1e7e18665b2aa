"""Compressed models as drafts: how many of their tokens the dense model accepts, and what that does to its speed.

`drafts.py DENSE RESULT …` lets transformers write with the dense model alone and with every result as its draft
(`assistant_model`), greedily, so that the text is the dense model's in both. One row for every result goes to
`drafts.jsonl`. On one CPU thread the seconds are the process's.
"""

from pathlib import Path
from typing import Any

import torch
from harness import Row, append_row, parser, provenance
from speed import Clock, describe

from oneshot.evaluation import load_model
from oneshot.text import load_tokenizer

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a Python function that returns the first n prime numbers.",
    "List three healthy breakfasts.",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Translate to French: The house is small but bright.",
    "Give advice to somebody who starts a new job.",
)


class Calls:
    """Counts how often a model is called."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.register_forward_pre_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


def prompt_ids(tokenizer: Any, text: str) -> torch.Tensor:
    """The tokens of a prompt as the model's template writes it, `(1, length)`."""
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt").input_ids
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


def main() -> None:
    options = parser(__doc__)
    options.add_argument("dense", type=Path)
    options.add_argument("results", type=Path, nargs="+")
    options.add_argument("--device", default="cpu")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--new-tokens", type=int, default=64)
    options.add_argument("--draft-tokens", type=int, default=5, help="that a draft proposes at once")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    tokenizer, clock = load_tokenizer(arguments.dense), Clock(device)
    dense = load_model(arguments.dense, device=device, dtype=dtype)
    calls = Calls(dense)

    def write(ids: torch.Tensor, draft: Any) -> tuple[torch.Tensor, float, int]:
        """The new tokens, the seconds and the dense model's calls."""
        before = calls.count
        text, seconds = clock(
            lambda: dense.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=draft, do_sample=False,
                max_new_tokens=arguments.new_tokens,
            )
        )  # fmt: skip
        return text[0, ids.shape[1] :], seconds, calls.count - before

    for result in arguments.results:
        draft = load_model(result, device=device, dtype=dtype)
        draft.generation_config.num_assistant_tokens = arguments.draft_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        total: Row = {"tokens": 0, "dense_calls": 0, "seconds": 0.0, "dense_seconds": 0.0, "equal_texts": 0}
        for number, prompt in enumerate(("Warm up.", *PROMPTS)):
            ids = prompt_ids(tokenizer, prompt).to(device)
            (plain, plain_seconds, _), (drafted, seconds, called) = write(ids, None), write(ids, draft)
            if number == 0:
                continue
            total["tokens"] += len(drafted)
            total["dense_calls"] += called
            total["seconds"] += seconds
            total["dense_seconds"] += plain_seconds
            total["equal_texts"] += int(torch.equal(plain, drafted))
        row = total | {
            "prompts": len(PROMPTS),
            "draft_tokens": arguments.draft_tokens,
            "accepted_per_call": total["tokens"] / total["dense_calls"] - 1,
            "speed_ratio": total["dense_seconds"] / total["seconds"],
            "dtype": arguments.dtype,
        }
        shared = {"model": arguments.dense.name, "clock": clock.name}
        append_row("drafts", provenance(**shared) | describe(result) | row)


if __name__ == "__main__":
    main()
