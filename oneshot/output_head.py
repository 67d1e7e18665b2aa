"""What follows the last layer, to compare what two streams predict."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY_PANEL = 8192  # rows of the head whose logits are there at a time


@dataclass(frozen=True)
class OutputHead:
    """From the last hidden states to the vocabulary, in float32, a panel of the vocabulary at a time."""

    norm: nn.Module
    weight: torch.Tensor

    def prediction(self, x: torch.Tensor) -> "Prediction":
        """What `divergence` needs to know of the next tokens predicted from the last hidden states `(length, D)`."""
        states = self.norm(x).float()
        normaliser = self._log_normaliser(states)
        expected = torch.zeros_like(states)
        for panel in self.weight.split(VOCABULARY_PANEL):
            rows = panel.float()
            expected += functional.linear(states, rows).sub_(normaliser.unsqueeze(1)).exp_() @ rows
        return Prediction(states, normaliser, expected)

    def divergence(self, dense: "Prediction", x: torch.Tensor) -> torch.Tensor:
        """KL divergence of what `x (length, D)` predicts from what the dense states do, float32 `(length,)`, in nats.

        Of two softmaxes it is what their log normalisers differ by beyond the first one's tangent, whose slope is the
        expected row of the head: the second one's probabilities are not needed.
        """
        states = self.norm(x).float()
        tangent = (dense.expected * (states - dense.states)).sum(-1)
        return self._log_normaliser(states) - dense.log_normaliser - tangent

    def divergence_from(self, dense: "OutputHead", dense_states: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As `divergence`, float32 `(length,)`, where the head itself is another than the `dense` one.

        Args:
            dense_states, x: last hidden states `(length, D)` of the dense model and of this one.
        """
        wanted, states = dense.norm(dense_states).float(), self.norm(x).float()
        normaliser = dense._log_normaliser(wanted)
        divergence = self._log_normaliser(states) - normaliser
        for rows, own in zip(dense.weight.split(VOCABULARY_PANEL), self.weight.split(VOCABULARY_PANEL), strict=True):
            logits = functional.linear(wanted, rows.float())
            difference = logits - functional.linear(states, own.float())
            divergence += (logits.sub_(normaliser.unsqueeze(1)).exp_() * difference).sum(-1)
        return divergence

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """How often each token is predicted, `(vocabulary,)`: the mean softmax over the states `(length, D)`."""
        states = self.norm(x).float()
        normaliser = self._log_normaliser(states).unsqueeze(1)
        panels = self.weight.split(VOCABULARY_PANEL)
        return torch.cat([functional.linear(states, panel.float()).sub_(normaliser).exp_().mean(0) for panel in panels])

    def _log_normaliser(self, states: torch.Tensor) -> torch.Tensor:
        panels = [
            functional.linear(states, panel.float()).logsumexp(-1) for panel in self.weight.split(VOCABULARY_PANEL)
        ]
        return torch.stack(panels).logsumexp(0)


@dataclass(frozen=True)
class Prediction:
    """Of every position: normed states `h (length, D)`, `log Σ exp(W h)`, and the mean row of `W` under the softmax."""

    states: torch.Tensor
    log_normaliser: torch.Tensor
    expected: torch.Tensor
