"""Short texts of different kinds that no run is calibrated on: for the probes of a profile, and for the check."""

import json
from pathlib import Path
from typing import Any

import torch

# Two files, because the check must not read what the sizes of a result were chosen on.
CHECKED, PROBED = Path(__file__).with_name("kinds.jsonl"), Path(__file__).with_name("probes.jsonl")
TOKENS_OF_A_KIND = 384  # at most
NUM_KINDS = 4


def kind_windows(tokenizer: Any, longest: int, file: Path = CHECKED) -> dict[str, torch.Tensor]:
    """Return the tokens of each text by its kind, int64 `(windows, length)` with `length ≤ longest`.

    A text begins with the tokens that the tokenizer puts before one; what fills no window at its end is left out, and
    so is a text that has no tokens.
    """
    windows = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = tokenizer(row["text"], return_tensors="pt")["input_ids"][0, :TOKENS_OF_A_KIND]
        if not len(ids):
            continue
        length = min(longest, len(ids))
        windows[row["kind"]] = ids[: len(ids) // length * length].view(-1, length)
    return windows


def probed_kinds(tokenizer: Any, longest: int) -> torch.Tensor:
    """Return the first tokens of the texts for probes, int64 `(NUM_KINDS, length)` with `length ≤ longest`.

    It is empty for a tokenizer that knows too few of their words or letters: if a text has less than half so many.
    """
    first = [windows[0] for windows in kind_windows(tokenizer, longest, PROBED).values()]
    length = min(map(len, first), default=0)
    if len(first) < NUM_KINDS or 2 * length < min(longest, TOKENS_OF_A_KIND):
        return torch.empty(0, 0, dtype=torch.int64)
    return torch.stack([ids[:length] for ids in first])
