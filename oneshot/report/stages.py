"""The stages of a run and the seconds that are left: predicted ratios, scaled by what the run took so far."""

import time
from collections.abc import Callable, Sequence

LEAST_SECONDS = 2.0  # of measured time, before which nothing is said about what is left
LEAST_SHARE = 0.005  # of the whole prediction, likewise
PRIOR = 0.05  # of a stage, as which the stages before it count when its own speed is judged


class Stages:
    """The stages of a run in order; the one that it is in; and about how long the rest takes.

    Only ratios of the predicted seconds count, because a machine may be busy or of another kind. A stage whose seconds
    are not predicted (0) is judged by its own progress alone, and not before it begins.

    Args:
        clock: seconds of a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names: list[str] = []
        self._predicted: list[float] = []
        self._spent: dict[int, float] = {}  # seconds of finished stages
        self._now: int | None = None
        self._entered = clock()
        self.name = ""

    def expect(self, stages: Sequence[tuple[str, float]]) -> None:
        """State all stages of the run, and the predicted seconds of each; the present one may be among them."""
        self._names, self._predicted = [name for name, _ in stages], [seconds for _, seconds in stages]
        self._now = self._names.index(self.name) if self.name in self._names else None

    def enter(self, name: str) -> bool:
        """Go on to the next stage of this name, and return whether it is another one than before."""
        if name == self.name:
            return False
        if self._now is not None:
            self._spent[self._now] = self._spent.get(self._now, 0.0) + self.seconds
        later = range(0 if self._now is None else self._now + 1, len(self._names))
        found = [number for number in (*later, *range(len(self._names))) if self._names[number] == name]
        self._now = found[0] if found else None
        self.name, self._entered = name, self._clock()
        return True

    @property
    def number(self) -> int | None:
        """Return the number of the present stage, from 1; None as long as the stages are not known."""
        return None if self._now is None else self._now + 1

    @property
    def count(self) -> int | None:
        """Return the number of stages; None as long as they are not known."""
        return len(self._names) or None

    @property
    def seconds(self) -> float:
        """Return the seconds since the present stage began."""
        return self._clock() - self._entered

    def left(self, share: float | None) -> float | None:
        """Return about how many seconds the run still takes; None as long as too little was measured.

        Args:
            share: of the present stage that is done; None if that is not known.
        """
        if self._now is None:
            return None
        spent, now = self.seconds, self._predicted[self._now]
        known = {number: seconds for number, seconds in self._spent.items() if self._predicted[number] > 0}
        before, predicted_before = sum(known.values()), sum(self._predicted[number] for number in known)
        measured, expected = before, predicted_before
        if now > 0 and share is not None:
            measured, expected = measured + spent, expected + share * now
        if measured < LEAST_SECONDS or expected < LEAST_SHARE * sum(self._predicted) or expected <= 0:
            scale = None
        else:
            scale = measured / expected
        later = sum(self._predicted[self._now + 1 :])
        if later > 0 and scale is None:
            return None
        rest = self._rest(spent, now, share, scale, before / predicted_before if predicted_before else None)
        return None if rest is None else rest + later * (scale or 0.0)

    @staticmethod
    def _rest(
        spent: float, predicted: float, share: float | None, scale: float | None, before: float | None
    ) -> float | None:
        """Return the seconds that the present stage still takes; `before`: the scale of the finished stages."""
        if share is None:
            return None if scale is None else max(0.0, predicted * scale - spent)
        if predicted <= 0 or before is None:
            if share <= 0 or spent < LEAST_SECONDS:
                return None if scale is None else predicted * scale * (1 - share)
            return spent / share * (1 - share)
        whole = (spent + PRIOR * predicted * before) / (share + PRIOR)
        return whole * (1 - share)
