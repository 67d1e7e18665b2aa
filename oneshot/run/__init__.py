"""Resources that several targets share: the machine, the model, the method, the text and the profile."""

from oneshot.run.calibration import SAVED_TEXT
from oneshot.run.latencies import SAVED_TIMINGS
from oneshot.run.opening import open_run
from oneshot.run.resources import Run

__all__ = ["SAVED_TEXT", "SAVED_TIMINGS", "Run", "open_run"]
