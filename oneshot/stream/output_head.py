"""The output of a model, to compare two models: predictions of tokens, or the last hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from oneshot.linalg.products import linear, product

# Rows. On a CPU glibc takes what has 32 MiB or more anew from the system.
VOCABULARY_PANEL, DEVICE_VOCABULARY_PANEL = 2048, 8192


def panel_rows(*, on_cuda: bool) -> int:
    """Return the rows of the head in one panel of logits."""
    return DEVICE_VOCABULARY_PANEL if on_cuda else VOCABULARY_PANEL


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
        total = _RunningSoftmax(states.shape, states.device)
        for panel in self._panels() if self.cap is None else []:
            total.add_(self._logits(states, panel), partial(_weighted_rows, rows=self.weight[panel].float()))
        return Prediction(states, total)

    def divergence(self, dense: "Prediction", x: torch.Tensor) -> torch.Tensor:
        """Return the KL divergence of the prediction from `x (length, D)`, float32 `(length,)`, in nats.

        It is the difference of the two log normalisers beyond the tangent at the dense one. The tangent's slope is the
        expected row of the head, so the second softmax is not needed. Bounded logits have no such tangent.
        """
        states = self.norm(x).float()
        if self.cap is not None:
            return self._difference(self, dense.states, states)
        tangent = (dense.softmax.expected * (states - dense.states)).sum(-1)
        return self._log_normaliser(states) - dense.softmax.log_normaliser - tangent

    def divergence_from(self, dense: "OutputHead", dense_states: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the divergence, float32 `(length,)`, of a head that differs from the `dense` one.

        Args:
            dense_states, x: last hidden states `(length, D)` of the dense model and of this one.
        """
        return self._difference(dense, dense.norm(dense_states).float(), self.norm(x).float())

    def _difference(self, dense: "OutputHead", reference: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the divergence between normed states of two heads, panel by panel."""
        total, panels = _RunningSoftmax((len(states), 1), states.device), []
        for panel in self._panels():
            logits, own = dense._logits(reference, panel), self._logits(states, panel)
            panels.append(own.logsumexp(-1))
            difference = own.neg_().add_(logits)
            total.add_(logits, partial(_weighted_sum, numbers=difference))
        return torch.stack(panels).logsumexp(0) - total.log_normaliser + total.expected.squeeze(1)

    def drawn_gradient(self, x: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Return the gradient at `x (length, D)` of the loss of tokens that are drawn from the prediction.

        Args:
            uniforms: float32 `(length,)` in [0, 1): where a token is taken from its cumulative probabilities.
        """
        states = self.norm(x).float()
        total = _RunningSoftmax(states.shape, states.device)
        for panel in self._panels():
            logits = self._logits(states, panel)
            slopes = None if self.cap is None else self._slopes(logits, self.cap)
            total.add_(logits, partial(_weighted_rows, rows=self.weight[panel].float(), factors=slopes))
        expected = total.expected
        drawn = self._drawn(states, uniforms, total)
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

    def _drawn(self, states: torch.Tensor, uniforms: torch.Tensor, total: "_RunningSoftmax") -> torch.Tensor:
        """Return the token of every state that is drawn by a uniform number, int64 `(length,)`.

        The sums of panels say in which panel it is, so logits are computed again in this panel alone.
        """
        normaliser = total.log_normaliser
        until = (torch.stack(total.panels) - normaliser).exp_().cumsum(0)
        panel_of = (until <= uniforms).sum(0).clamp_max_(len(until) - 1)
        before = torch.cat((torch.zeros_like(until[:1]), until)).gather(0, panel_of.unsqueeze(0)).squeeze(0)
        drawn = torch.empty_like(panel_of)
        order, counts = panel_of.argsort(stable=True), panel_of.bincount(minlength=len(until)).tolist()
        for panel, chosen in zip(self._panels(), order.split(counts), strict=True):
            probabilities = self._logits(states[chosen], panel).sub_(normaliser[chosen].unsqueeze(1)).exp_()
            cumulative = probabilities.cumsum(-1).add_(before[chosen].unsqueeze(1))
            drawn[chosen] = panel.start + (cumulative <= uniforms[chosen].unsqueeze(1)).sum(-1)
        return drawn.clamp_max_(len(self.weight) - 1)

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean softmax over the states `(length, D)`: how often each token is predicted, `(vocabulary,)`."""
        states = self.norm(x).float()
        normaliser = self._log_normaliser(states).unsqueeze(1)
        return torch.cat([self._logits(states, panel).sub_(normaliser).exp_().mean(0) for panel in self._panels()])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last hidden states `(…, D)`."""
        return self._logits(self.norm(x).float(), slice(None))

    def _panels(self) -> list[slice]:
        rows = panel_rows(on_cuda=self.weight.is_cuda)
        return [slice(start, start + rows) for start in range(0, len(self.weight), rows)]

    def _logits(self, states: torch.Tensor, panel: slice) -> torch.Tensor:
        """Return the logits of a panel for normed states."""
        logits = linear(states, self.weight[panel].float())
        if self.bias is not None:
            logits += self.bias[panel].float()
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    @staticmethod
    def _slopes(logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Return the derivatives of bounded logits by those before the bound."""
        return 1 - (logits / cap).square()

    def _log_normaliser(self, states: torch.Tensor) -> torch.Tensor:
        panels = [self._logits(states, panel).logsumexp(-1) for panel in self._panels()]
        return torch.stack(panels).logsumexp(0)


def _weighted_rows(weights: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sums of `rows (tokens, D)` by `weights (length, tokens)`, which the `factors` multiply in place."""
    return product(weights if factors is None else weights.mul_(factors), rows)


def _weighted_sum(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the sums of numbers by weights `(length, tokens)`, which are overwritten; `(length, 1)`."""
    return weights.mul_(numbers).sum(-1, keepdim=True)


class _RunningSoftmax:
    """The softmax of logits that come by panels of the vocabulary, so that each is computed once.

    Attributes:
        panels: the log of the sum of exponentials of every panel, `(length,)`.
    """

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self.panels: list[torch.Tensor] = []
        self._largest = torch.full(shape[:1], -torch.inf, device=device)
        self._sum, self._weighted = torch.zeros(shape[:1], device=device), torch.zeros(shape, device=device)

    def add_(self, logits: torch.Tensor, weigh: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add a panel, whose logits are overwritten.

        `weigh`: from the panel's exponentials, `(length, tokens)`, to their weighted sums, `(length, k)`.
        """
        largest = torch.maximum(self._largest, logits.amax(-1))
        smaller = (self._largest - largest).exp_()
        exponentials = logits.sub_(largest.unsqueeze(1)).exp_()
        of_panel = exponentials.sum(-1)
        self.panels.append(of_panel.log() + largest)
        self._sum.mul_(smaller).add_(of_panel)
        self._weighted.mul_(smaller.unsqueeze(1)).add_(weigh(exponentials))
        self._largest = largest

    @property
    def log_normaliser(self) -> torch.Tensor:
        """Return the log of the sum of all exponentials, `(length,)`."""
        return self._sum.log() + self._largest

    @property
    def expected(self) -> torch.Tensor:
        """Return the mean of what is weighed under the softmax, `(length, k)`."""
        return self._weighted / self._sum.unsqueeze(1)


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
    """Normed states `h (length, D)`, and the softmax of `W h` with the mean row of `W`."""

    states: torch.Tensor
    softmax: _RunningSoftmax
