"""Short texts of different kinds that no run is calibrated on, for the check of a result."""

import json
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_name("kinds.jsonl")  # written for this check
TOKENS_OF_A_KIND = 384  # at most
NUM_KINDS = 4


def kind_windows(tokenizer: Any, longest: int) -> dict[str, torch.Tensor]:
    """Return the tokens of each text by its kind, int64 `(windows, length)` with `length ≤ longest`.

    A text begins with the tokens that the tokenizer puts before one; what fills no window at its end is left out.
    """
    windows = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = tokenizer(row["text"], return_tensors="pt")["input_ids"][0, :TOKENS_OF_A_KIND]
        length = min(longest, len(ids))
        windows[row["kind"]] = ids[: len(ids) // length * length].view(-1, length)
    return windows
