"""Measurements in words: what opens a model, how much worse it is, and how long something takes."""

import math
from collections.abc import Mapping

NOTHING = "(nothing)"  # stands for an empty answer
CUT = " …"  # after an answer that its model did not end
OPENED = {  # what opens a result, by form; its card says more
    "stock": "whatever opens the original",
    "per-layer": "transformers with trust_remote_code; --form stock is for every engine",
    "nemotron-nas": "transformers with trust_remote_code, and vLLM",
    "gguf": "llama.cpp",
}
VERDICTS = (  # up to this perplexity ÷ the original's
    (1.03, "as good as the original on this text"),
    (1.10, "a little worse than the original"),
    (1.25, "worse than the original; a user may notice"),
    (1.60, "much worse than the original; train it further or remove less"),
)
WORST = "far worse than the original: remove less, or use the per-layer form and more text"
FAR_RATIO, FAR_SHARE = 1.25, 2.0  # of the worst kind's perplexity ÷ the original's, and its log-loss ÷ the others'
LANGUAGES = "other languages"  # a kind of text: passages in those that the original knows
KIND_REMEDY = "add text of this kind to the calibration text, or the sources builtin and self, which have several kinds"
LANGUAGES_REMEDY = (
    "add text in those that you use to the calibration text; with the source self the model also writes in those that "
    "it knows"
)
MINUTE, HOUR = 60.0, 3600.0


def verdict(ratio: float) -> str:
    """Return what a perplexity divided by the original's means."""
    return next((words for most, words in VERDICTS if ratio <= most), WORST)


def by_kind(ratios: Mapping[str, float]) -> str:
    """Return perplexities divided by the original's, by kind of text, the worst last, as a sentence."""
    *others, worst = (f"{kind} × {ratio:.2f}" for kind, ratio in ratios.items())
    return f"{', '.join(others)}, and worst {worst}"


def far_kind(ratios: Mapping[str, float]) -> str | None:
    """Return the warning on the worst kind of text if it loses far more than the others, with the remedy; else None."""
    *others, (worst, ratio) = ratios.items()
    rest = math.exp(sum(math.log(value) for _, value in others) / len(others)) if others else ratio
    if ratio < FAR_RATIO or math.log(ratio) < FAR_SHARE * math.log(max(1.0, rest)):
        return None
    text = "in other languages" if worst == LANGUAGES else f"of the kind {worst}"
    remedy = LANGUAGES_REMEDY if worst == LANGUAGES else KIND_REMEDY
    return f"Text {text} loses far more than the others (× {ratio:.2f}, where their mean is × {rest:.2f}): {remedy}."


def duration(seconds: float) -> str:
    """Return seconds as people say them, such as `40 s`, `12 min` or `3 h 20 min`."""
    if seconds < 1:
        return "less than 1 s"
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR:
        return f"{seconds / MINUTE:.0f} min"
    hours, minutes = divmod(round(seconds / MINUTE), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def left(seconds: float) -> str:
    """Return what is left of a run as `about 6 min left`."""
    return "a few seconds left" if seconds < 10 else f"about {duration(seconds)} left"


def amount(number: float) -> str:
    """Return a large number, such as a count of parameters, as `107.6 M`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def size(bytes_: float) -> str:
    """Return bytes of files with the digits that a reader compares: `12.41 GB`, `216 MB`, `1.4 MB`, `87 KB`."""
    if bytes_ >= 1e10:
        return f"{bytes_ / 1e9:,.2f} GB"
    if bytes_ >= 1e7:
        return f"{bytes_ / 1e6:,.0f} MB"
    if bytes_ >= 1e6:
        return f"{bytes_ / 1e6:.1f} MB"
    return f"{bytes_ / 1e3:.0f} KB" if bytes_ >= 1e3 else f"{bytes_:.0f} bytes"


def gibibytes(bytes_: float) -> str:
    """Return bytes of memory as `1.25 GiB`."""
    return f"{bytes_ / 2**30:.2f} GiB"


def show(value: float | None, spec: str) -> str:
    """Return a formatted number; a dash for None."""
    return "–" if value is None else format(value, spec)
