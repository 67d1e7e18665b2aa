"""One record of everything that a computation needs to know of the machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from oneshot.machine.workers import ALONE, Workers

Store = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Machine:
    """The machine of a run, as every computation needs it.

    Attributes:
        device, dtype: where and in which dtype forward passes and statistics are computed.
        scratch: folder for scratch files; it is removed after the run.
        workers: the processes that share the run.
        store: where hidden states are kept between layers.
        batch_size: sequences in one forward pass.
        experts_together: experts of a layer whose statistics are held at the same time; None: all of them.
    """

    device: torch.device
    dtype: torch.dtype
    scratch: Path
    workers: Workers = ALONE
    store: Store = "host"
    batch_size: int = 4
    experts_together: int | None = None
