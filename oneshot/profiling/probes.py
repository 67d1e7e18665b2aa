"""Probe sequences in the dense model and in models with one sublayer reduced: what the reduction does to the output."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from oneshot.checkpoint import Model
from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.curvature import mean_cost
from oneshot.machine import Machine
from oneshot.stream import ActivationStore, Layer, Memory
from oneshot.text import NUM_KINDS, TOKENS_OF_A_KIND, Text, holds_tokenizer, load_tokenizer, probed_kinds

PROBE_SEQUENCES = 2
SEQUENCES_PER_PROBE = 8  # of the text; few sequences are needed for the statistics
PIECES = 2  # of a sequence, beside other kinds of text: each as long as one of these, so that all pass a layer together
# Layers whose reduced FFNs pass the rest of the model, if output curvature predicts what they cost: so many at either
# end, where the prediction is off by more than in the middle, and so many between them.
PROBED_ENDS, PROBED_BETWEEN = 3, 1
PROBED_KINDS = ("ffn", "heads", "layer", "sublayer", "inner", "rank", "experts")
LEFT_OUT_SUBLAYERS = ("no heads", "no ffn")  # the probes of `sublayer`
INNER_SIZES = ("queries and keys", "values")  # the probes of `inner`
PROBE_SHARE = 3 / 4  # of a sublayer's neurons or heads stays in its probe; less if the error is too small
MIN_PROBE_ERROR = 1e-4  # relative and squared: below this the divergence is rounding noise


@dataclass(frozen=True)
class Probe:
    """State what is reduced or left out in a model that the probe sequences pass.

    `error` is the relative squared error of the reduced sublayer's own output. `energy`: what this costs on the probe
    sequences (`SublayerOutput`); only of FFNs. `memory`: what layers read beside the hidden states; None if they read
    nothing.
    """

    kind: str
    layer: int
    error: float = 1.0
    energy: float = 0.0
    memory: Memory | None = None


class Probes:
    """The probe sequences in the dense model, whose hidden states are `dense`, and the probes of reduced sublayers.

    All move side by side, so every layer is read once. Their states `(sequences, length, D)` are stored as the text's
    are.

    Args:
        machine: where they are stored. most: how many probes there may be. memory: what layers read beside `dense`;
            None if they read nothing.
    """

    def __init__(self, dense: torch.Tensor, machine: Machine, most: int, memory: Memory | None = None) -> None:
        self.dense, self.memory = dense, memory
        self._reduced: list[Probe] = []
        self._store = ActivationStore(most * self.num_tokens, dense.shape[-1], machine)

    @property
    def num_tokens(self) -> int:
        """Return the tokens that divergences are means over."""
        return self.dense.shape[0] * self.dense.shape[1]

    def add(self, probe: Probe, states: torch.Tensor) -> None:
        """Add the probe of a layer that the others have passed, and its states behind the layer.

        Keys and values that the layer lends are the dense ones.
        """
        self._store.write(self._rows(len(self._reduced)), states)
        self._reduced.append(probe if self.memory is None else replace(probe, memory=self.memory.copied()))

    def states(self, index: int, sequence: int | None = None) -> torch.Tensor:
        """Return the states of a probe `(sequences, length, D)`, or of one of its sequences `(length, D)`."""
        rows = self._store.read(self._rows(index, sequence))
        return rows.view_as(self.dense if sequence is None else self.dense[sequence])

    def _rows(self, index: int, sequence: int | None = None) -> slice:
        first, count = index * self.num_tokens, self.num_tokens
        if sequence is not None:
            count = self.dense.shape[1]
            first += sequence * count
        return slice(first, first + count)

    def close(self) -> None:
        """Release the memory or the file."""
        self._store.close()

    def move(self, layer: Layer) -> None:
        """Move the probes of earlier layers through a dense layer; `dense` stays before it."""
        for index, probe in enumerate(self._reduced):
            self._store.write(self._rows(index), layer.reading(probe.memory).run_all(self.states(index)))

    def sensitivities(self, output: Any, num_layers: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return what errors cost in nats per token, float64 `(layers,)`; zeros where nothing was probed.

        The first are divergences from the dense output per relative squared error, of each kind of `PROBED_KINDS`,
        `LEFT_OUT_SUBLAYERS` and `INNER_SIZES`. The second are FFNs' ones per `energy`. `output`: the final norm and
        the output head.
        """
        kinds = (*PROBED_KINDS, *LEFT_OUT_SUBLAYERS, *INNER_SIZES)
        by_kind = {kind: torch.zeros(num_layers, dtype=torch.float64) for kind in kinds}
        of_stream = torch.zeros(num_layers, dtype=torch.float64)
        for probe, divergence in zip(self._reduced, self._divergences(output), strict=True):
            by_kind[probe.kind][probe.layer] = divergence / max(probe.error, MIN_PROBE_ERROR)
            if probe.energy:
                of_stream[probe.layer] = divergence / probe.energy
        return by_kind, of_stream

    def _divergences(self, output: Any) -> list[float]:
        """Return the mean divergence of every probe's output from the dense model's, one sequence at a time."""
        totals = torch.zeros(len(self._reduced), dtype=torch.float64, device=self.dense.device)
        for sequence, dense_state in enumerate(self.dense):
            dense = output.prediction(dense_state)
            for index in range(len(self._reduced)):
                totals[index] += output.divergence(dense, self.states(index, sequence)).double().mean()
        return [max(0.0, total / len(self.dense)) for total in totals.tolist()]


class SublayerOutput:
    """The output of a dense sublayer, to compare with the outputs of reduced ones.

    Args:
        x: the stream before the sublayer, `(sequences, length, D)`.
        branch_norm: the norm that may follow the writer, if changes are weighed by a curvature. They are then measured
            at the writer's output, divided by each token's root mean square.

    Attributes:
        x: the same. total: the sum of the stream and the sublayer, as `Layer.sum` returns it.
    """

    def __init__(self, dense: Layer, index: int, x: torch.Tensor, branch_norm: BranchNorm | None) -> None:
        self.x, self._index = x, index
        self._written: torch.Tensor | None = None
        if branch_norm is None:
            self.total = dense.sum(index, x)
            return
        self._written, added, self.total = _parts(dense, index, x)
        self._scales = branch_norm.scales(self._written, added)

    def compare(self, reduced: Layer, curvature: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean cost of a reduced layer's change over tokens, a float64 scalar, and the layer's `total`.

        The cost is in nats by the `curvature` of the writer's output; without one it is the squared norm of the change.
        """
        if self._written is not None:
            assert curvature is not None
            written, _, total = _parts(reduced, self._index, self.x)
            return mean_cost((written - self._written).float() * self._scales, curvature), total
        total = reduced.sum(self._index, self.x)
        if curvature is None:
            return (total - self.total).double().square().sum(-1).mean(), total
        return mean_cost(reduced.before_sum(total - self.total), curvature), total


def _parts(layer: Layer, index: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the writer writes and what the stream gets of it, as rows `(tokens, D)`, and their sum with it."""
    written = layer.write(index, layer.inner(index, x))
    added = layer.added(index, written)
    return written, added, layer.base(index, x) + added.view_as(x)


def probe_sequences(num_sequences: int) -> int:
    """Return how many sequences of a text are probes."""
    return max(1, min(PROBE_SEQUENCES, num_sequences // SEQUENCES_PER_PROBE))


def probe_text(model: Model, own: Text) -> Text:
    """Return the sequences that probes are: of the calibration text, its `own` ones, and of a decoder other kinds.

    What a size costs on text that the calibration text lacks differs by layers and tables: in a coder the middle layers
    cost twice to four times as much as on the calibration text, and the embedding as much
    (benchmarks/records/experiments.md). Examples of their own lengths have no others, nor have models without a
    tokenizer of such text.
    """
    folder, length = model.checkpoint.folder, own.longest // PIECES
    packed = own.lengths is None and own.decoder is None
    if not (packed and length and model.family.stack.causal and holds_tokenizer(folder)):
        return own
    kinds = probed_kinds(load_tokenizer(folder), length)
    if not kinds.numel() or int(kinds.max()) >= model.shape.vocab_size:
        return own
    pieces = own.token_ids[:, : PIECES * kinds.shape[1]].reshape(-1, kinds.shape[1])
    return Text(torch.cat((pieces, kinds)), own.source)


def probe_shape(num_sequences: int, length: int, causal: bool) -> tuple[int, int]:
    """Return how many sequences are probes of a text of so many sequences, and the most tokens of each."""
    own = probe_sequences(num_sequences)
    if not causal or length < PIECES:
        return own, length
    return PIECES * own + NUM_KINDS, min(TOKENS_OF_A_KIND, length // PIECES)


def probed_layers(layers: Sequence[int], predicts: bool) -> list[int]:
    """Return the layers, of the given ones, whose reduced FFN passes the rest of the model.

    Output curvature predicts the divergence up to a factor. In SmolLM2-135M it is 5.7 and 1.9 in the first layers, 3.5
    in the last two, and 1.1 to 1.6 in all others. So if it `predicts` the divergence, a few layers suffice.
    """
    inner = layers[PROBED_ENDS:-PROBED_ENDS]
    if not predicts or len(inner) <= PROBED_BETWEEN:
        return list(layers)
    between = [inner[(index + 1) * len(inner) // (PROBED_BETWEEN + 1)] for index in range(PROBED_BETWEEN)]
    return [*layers[:PROBED_ENDS], *between, *layers[-PROBED_ENDS:]]


def between(values: torch.Tensor) -> torch.Tensor:
    """Return values `(layers,)` of which those that are zero are interpolated from the others; ones if all are zero.

    A reduced FFN that changes nothing, or nothing above rounding, does not say that other errors cost nothing. The
    predicted ones are in nats already, and squared ones at least keep their order.
    """
    known = values.nonzero().squeeze(1).numpy()
    if not len(known):
        return torch.ones_like(values)
    return torch.from_numpy(np.interp(np.arange(len(values)), known, values.numpy()[known]))


def num_probes(kinds: Sequence[str], num_layers: int, predicts: bool) -> int:
    """Return how many probes a profile of these kinds of `PROBED_KINDS` has at most; `predicts`: see above."""
    per_layer = len(kinds) + ("sublayer" in kinds) + ("inner" in kinds) - ("rank" in kinds) - ("ffn" in kinds)
    of_ffns = len(probed_layers(range(num_layers), predicts)) if "ffn" in kinds else 0
    return per_layer * num_layers + of_ffns


def probe_size(errors: torch.Tensor, share: float = PROBE_SHARE) -> int:
    """Return how many of a sublayer's n units stay in its probe: this share, or the most with enough error.

    `errors (n + 1,)`: relative squared errors by kept units, falling.
    """
    units = len(errors) - 1
    largest = min(units - 1, max(1, round(share * units)))
    return max(1, int((errors[1 : largest + 1] >= MIN_PROBE_ERROR).sum()))
