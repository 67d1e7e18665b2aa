"""Quality of models on packed text: perplexity, agreement with a baseline, and one number over several texts."""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from oneshot.errors import CheckpointError
from oneshot.report.display import progress_bar

LARGEST_LOSS = math.log(sys.float_info.max)
POSITIONS = 256  # with float32 logits at a time; vocabulary × length is large


@dataclass(frozen=True)
class TextScore:
    """One model on one text.

    `top1_agreement` is the share of scored positions with the baseline's most likely next token,
    `kl_divergence` the mean KL(baseline ‖ model) in nats per token, `acceptance` the mean of `Σ min(p, q)` over the
    vocabulary: the share of its tokens that the baseline accepts in speculative sampling (Leviathan et al. 2023,
    arXiv:2211.17192, section 3.1). All three are None without a baseline. `window_losses` has the mean loss of every
    window in nats per token; `perplexity` is the exponential of their mean.
    """

    perplexity: float
    tokens_scored: int
    window_losses: tuple[float, ...]
    top1_agreement: float | None = None
    kl_divergence: float | None = None
    acceptance: float | None = None


def perplexity(
    model: torch.nn.Module, token_ids: torch.Tensor, *, batch_size: int = 1, has_bar: bool = True
) -> tuple[float, int]:
    """Return a model's perplexity and the number of scored tokens; see `score_windows`."""
    (score,) = score_windows([model], token_ids, batch_size=batch_size, has_bar=has_bar)
    return score.perplexity, score.tokens_scored


@torch.inference_mode()
def score_windows(
    models: Sequence[torch.nn.Module],
    token_ids: torch.Tensor,
    *,
    baseline: torch.nn.Module | None = None,
    batch_size: int = 1,
    has_bar: bool = True,
) -> list[TextScore]:
    """Score tokens 2 … L of every window, log-softmax in float32: the models in order, then the baseline.

    Windows are independent. Every model runs once over each. At most one batch of the baseline's logits and one of a
    model's exist at a time.

    Args:
        models: causal language models of transformers, on one device. baseline: the model to compare with; a model
            with logits of another width has no agreement (None).
        token_ids: int64 `(windows, L)`. batch_size: windows in one forward pass. has_bar: whether a bar is on stderr.
    """
    totals = [_Totals() for _ in models]
    baseline_totals = _Totals()
    device = next((models[0] if baseline is None else baseline).parameters()).device
    for batch in progress_bar(token_ids.split(batch_size), "scoring", visible=has_bar):
        batch = batch.to(device)
        targets = batch[:, 1:]
        reference = None
        if baseline is not None:
            reference = _logits(baseline, batch)
            baseline_totals.add(reference, targets)
        for model, total in zip(models, totals, strict=True):
            total.add(_logits(model, batch), targets, reference)
    return [total.score() for total in ([*totals, baseline_totals] if baseline is not None else totals)]


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a mean loss, nats per token.

    Raises `CheckpointError` for a loss whose exponential is beyond float64, or NaN.
    """
    if not loss < LARGEST_LOSS:
        raise CheckpointError(
            f"The mean loss on the text is {loss:.3g} nats per token, which has no perplexity; look for huge "
            "weights in the checkpoint, or give --dtype float32."
        )
    return math.exp(loss)


def relative_score(perplexities: Mapping[str, float], baseline: Mapping[str, float]) -> tuple[float, str, float]:
    """Return the geometric mean over texts of perplexity ÷ the baseline's, the worst text, and its ratio."""
    ratios = {text: value / baseline[text] for text, value in perplexities.items()}
    worst = max(ratios, key=lambda text: ratios[text])
    return statistics.geometric_mean(ratios.values()), worst, ratios[worst]


def _logits(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return logits of the next tokens, `(windows · (L − 1), vocabulary)`, in the model's dtype."""
    logits: torch.Tensor = model(batch, use_cache=False).logits
    return logits[:, :-1].flatten(0, 1)


@dataclass
class _Totals:
    """Sums over scored positions, in float64, and the mean loss of every window."""

    window_losses: list[float] = field(default_factory=list)
    tokens: int = 0
    compared: int = 0
    agreed: int = 0
    divergence: float = 0.0
    accepted: float = 0.0

    def add(self, logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None = None) -> None:
        """Add windows: logits and the baseline's `(windows · (L − 1), vocabulary)`, targets `(windows, L − 1)`."""
        flat, losses = targets.flatten(), []
        for start in range(0, len(flat), POSITIONS):
            part = slice(start, start + POSITIONS)
            log_p = logits[part].float().log_softmax(-1)
            losses.append(-log_p.gather(1, flat[part, None]).double().squeeze(1))
            if reference is not None and reference.shape == logits.shape:
                log_q = reference[part].float().log_softmax(-1)
                self.agreed += int((logits[part].argmax(-1) == reference[part].argmax(-1)).sum())
                self.divergence += (log_q.exp() * (log_q - log_p)).sum(-1).double().sum().item()
                self.accepted += torch.minimum(log_p, log_q).exp_().sum(-1).double().sum().item()
                self.compared += len(log_q)
        self.window_losses += torch.cat(losses).view(targets.shape).mean(1).tolist()
        self.tokens += len(flat)

    def score(self) -> TextScore:
        """Return the means. Raises `CheckpointError` for a loss that has no perplexity."""
        losses = tuple(self.window_losses)
        value = perplexity_of(statistics.fmean(losses))
        if not self.compared:
            return TextScore(value, self.tokens, losses)
        means = (each / self.compared for each in (self.agreed, self.divergence, self.accepted))
        return TextScore(value, self.tokens, losses, *means)
