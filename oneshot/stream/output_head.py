"""The output of a model, to compare those of two: predictions of tokens, or the last hidden states."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY_PANEL = 8192  # rows of the head in one panel of logits


@dataclass(frozen=True)
class OutputHead:
    """Map the last hidden states to the vocabulary, in float32, by panels of the vocabulary.

    `norm`: the final norm, or whatever else the last states pass before they meet the weight. `bias`: added to the
    logits; None for none. `cap`: logits `z` become `cap tanh(z / cap)`, as in Gemma 2; None if they stay.
    """

    norm: nn.Module
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    cap: float | None = None

    def prediction(self, x: torch.Tensor) -> "Prediction":
        """Return what `divergence` needs of the prediction from the last hidden states `(length, D)`."""
        states = self.norm(x).float()
        normaliser = self._log_normaliser(states)
        expected = torch.zeros_like(states)
        if self.cap is None:
            for panel in self._panels():
                probabilities = self._logits(states, panel).sub_(normaliser.unsqueeze(1)).exp_()
                expected += probabilities @ self.weight[panel].float()
        return Prediction(states, normaliser, expected)

    def divergence(self, dense: "Prediction", x: torch.Tensor) -> torch.Tensor:
        """Return the KL divergence of the prediction from `x (length, D)`, float32 `(length,)`, in nats.

        It is the difference of the two log normalisers beyond the tangent at the dense one. The tangent's slope is the
        expected row of the head, so the second softmax is not needed. Bounded logits have no such tangent.
        """
        states = self.norm(x).float()
        if self.cap is not None:
            return self._difference(self, dense.states, dense.log_normaliser, states)
        tangent = (dense.expected * (states - dense.states)).sum(-1)
        return self._log_normaliser(states) - dense.log_normaliser - tangent

    def divergence_from(self, dense: "OutputHead", dense_states: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the divergence, float32 `(length,)`, of a head that differs from the `dense` one.

        Args:
            dense_states, x: last hidden states `(length, D)` of the dense model and of this one.
        """
        reference = dense.norm(dense_states).float()
        return self._difference(dense, reference, dense._log_normaliser(reference), self.norm(x).float())

    def _difference(
        self, dense: "OutputHead", reference: torch.Tensor, normaliser: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Return the divergence between normed states of two heads, panel by panel."""
        divergence = self._log_normaliser(states) - normaliser
        for panel in self._panels():
            logits = dense._logits(reference, panel)
            difference = logits - self._logits(states, panel)
            divergence += (logits.sub_(normaliser.unsqueeze(1)).exp_() * difference).sum(-1)
        return divergence

    def drawn_gradient(self, x: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Return the gradient at `x (length, D)` of the loss of tokens that are drawn from the prediction.

        Args:
            uniforms: float32 `(length,)` in [0, 1): where a token is taken from its cumulative probabilities.
        """
        states = self.norm(x).float()
        normaliser = self._log_normaliser(states).unsqueeze(1)
        expected, below = torch.zeros_like(states), torch.zeros_like(uniforms)
        drawn = torch.zeros(uniforms.shape, dtype=torch.int64, device=uniforms.device)
        for panel in self._panels():
            logits = self._logits(states, panel)
            slopes = None if self.cap is None else self._slopes(logits, self.cap)
            probabilities = logits.sub_(normaliser).exp_()
            cumulative = probabilities.cumsum(-1).add_(below.unsqueeze(1))
            weights = probabilities if slopes is None else probabilities.mul_(slopes)
            expected += weights @ self.weight[panel].float()
            drawn += (cumulative <= uniforms.unsqueeze(1)).sum(-1)
            below = cumulative[:, -1]
        drawn.clamp_max_(len(self.weight) - 1)
        rows = self.weight[drawn].float()
        if self.cap is not None:
            logits = (states * rows).sum(-1, keepdim=True)
            logits = logits if self.bias is None else logits + self.bias[drawn].float().unsqueeze(1)
            rows = rows * self._slopes(self.cap * (logits / self.cap).tanh(), self.cap)
        behind = expected - rows
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            states = self.norm(x).float()
        [gradient] = torch.autograd.grad(states, x, behind)
        return gradient

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean softmax over the states `(length, D)`: how often each token is predicted, `(vocabulary,)`."""
        states = self.norm(x).float()
        normaliser = self._log_normaliser(states).unsqueeze(1)
        return torch.cat([self._logits(states, panel).sub_(normaliser).exp_().mean(0) for panel in self._panels()])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last hidden states `(…, D)`."""
        return self._logits(self.norm(x).float(), slice(None))

    def _panels(self) -> list[slice]:
        return [slice(start, start + VOCABULARY_PANEL) for start in range(0, len(self.weight), VOCABULARY_PANEL)]

    def _logits(self, states: torch.Tensor, panel: slice) -> torch.Tensor:
        """Return the logits of a panel for normed states."""
        bias = None if self.bias is None else self.bias[panel].float()
        logits = functional.linear(states, self.weight[panel].float(), bias)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    @staticmethod
    def _slopes(logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Return the derivatives of bounded logits by those before the bound."""
        return 1 - (logits / cap).square()

    def _log_normaliser(self, states: torch.Tensor) -> torch.Tensor:
        panels = [self._logits(states, panel).logsumexp(-1) for panel in self._panels()]
        return torch.stack(panels).logsumexp(0)


class LastStates:
    """The last hidden states are the output, as in an encoder."""

    def prediction(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `divergence` needs of the last hidden states `(length, D)`."""
        return x.float()

    def divergence(self, dense: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return half the squared distance from the dense states over their squared norm, float32 `(length,)`.

        For small changes that keep the norm it is one minus the cosine.
        """
        return 0.5 * (x.float() - dense).square().sum(-1) / dense.square().sum(-1)


@dataclass(frozen=True)
class Prediction:
    """Normed states `h (length, D)`, `log Σ exp(W h)`, and the mean row of `W` under the softmax."""

    states: torch.Tensor
    log_normaliser: torch.Tensor
    expected: torch.Tensor
