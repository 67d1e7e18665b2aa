"""The output of a model, to compare two models: predictions of tokens, or the last hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from oneshot.linalg.products import linear, product
from oneshot.machine.transfer import uploaded

# Rows. On a CPU glibc takes what has 32 MiB or more anew from the system.
VOCABULARY_PANEL, DEVICE_VOCABULARY_PANEL = 2048, 8192


def random_signs(length: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Return signs float32 `(2 length + vocabulary − 1,)` of the states of a sequence, and of tokens for each state.

    A state has the tokens' signs from its place on, so few numbers are drawn; its own sign makes what states share
    cancel out in the mean.
    """
    drawn = torch.randint(0, 2, (2 * length + vocabulary - 1,), generator=torch.Generator().manual_seed(seed))
    return 2.0 * drawn - 1.0


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

    def random_gradient(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        """Return gradients at `x (length, D)` whose mean outer product is the Fisher information of the prediction.

        They are behind the logits `v = p^½ ε − p (p^½ · ε)` with random signs ε: `E[v vᵀ] = diag(p) − p pᵀ`, as of the
        loss of drawn tokens. But every token takes part, and not one, so they vary less. `seed`: of the signs.
        """
        states, length = self.norm(x).float(), len(x)
        signs = uploaded(random_signs(length, len(self.weight), seed), x.device)
        total = _RunningSoftmax(states.shape, states.device)
        of_rows, of_tokens = signs[:length].unsqueeze(1), signs[length:].unfold(0, len(self.weight), 1)
        for panel in self._panels():
            logits, rows = self._logits(states, panel), self.weight[panel].float()
            slopes = None if self.cap is None else 1 - (logits / self.cap).square()  # derivatives of bounded logits
            total.add_(logits, partial(_weighted_rows, rows=rows, factors=slopes), of_tokens[:, panel])
        behind = of_rows * (total.rooted - total.sum_of_roots * total.expected)
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
        rows = panel_rows(on_cuda=self.weight.is_cuda)
        return [slice(start, start + rows) for start in range(0, len(self.weight), rows)]

    def _logits(self, states: torch.Tensor, panel: slice) -> torch.Tensor:
        """Return the logits of a panel for normed states."""
        logits = linear(states, self.weight[panel].float())
        if self.bias is not None:
            logits += self.bias[panel].float()
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

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
    """The softmax of logits that come by panels of the vocabulary, so that each is computed once."""

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self._largest = torch.full(shape[:1], -torch.inf, device=device)
        self._sum, self._weighted = torch.zeros(shape[:1], device=device), torch.zeros(shape, device=device)
        self._roots, self._rooted = torch.zeros_like(self._sum), torch.zeros(1, 1, device=device)

    def add_(
        self, logits: torch.Tensor, weigh: Callable[[torch.Tensor], torch.Tensor], signs: torch.Tensor | None = None
    ) -> None:
        """Add a panel, whose logits are overwritten.

        `weigh`: from the panel's exponentials, `(length, tokens)`, to their weighted sums, `(length, k)`. `signs`: of
        the exponentials' roots, `(length, tokens)`.
        """
        largest = torch.maximum(self._largest, logits.amax(-1))
        smaller = (self._largest - largest).exp_()
        exponentials = logits.sub_(largest.unsqueeze(1)).exp_()
        if signs is not None:
            roots, less = exponentials.sqrt().mul_(signs), smaller.sqrt()
            self._roots.mul_(less).add_(roots.sum(-1))
            self._rooted = weigh(roots).add_(self._rooted * less.unsqueeze(1))
        self._sum.mul_(smaller).add_(exponentials.sum(-1))
        self._weighted.mul_(smaller.unsqueeze(1)).add_(weigh(exponentials))
        self._largest = largest

    @property
    def rooted(self) -> torch.Tensor:
        """Return the sum of what is weighed by the signed roots of the probabilities, `(length, k)`."""
        return self._rooted / self._sum.sqrt().unsqueeze(1)

    @property
    def sum_of_roots(self) -> torch.Tensor:
        """Return the sum of the signed roots of the probabilities, `(length, 1)`."""
        return (self._roots / self._sum.sqrt()).unsqueeze(1)

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
