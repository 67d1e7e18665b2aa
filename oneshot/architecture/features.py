"""Features of runs that some families cannot have."""

from typing import Literal

Feature = Literal[
    "heads",
    "hidden size",
    "ffn biases",
    "up_proj",
    "queries and keys",
    "embedding ranks",
    "self text",
    "profile",
    "depth",
    "latency",
    "experts",
    "sketch",
    "moments",
    "neuron scores",
    "held-out damping",
    "per-layer form",
]
