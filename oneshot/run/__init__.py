"""What the results of a run share, and what is asked of it: budgets, and what a result will take."""

from oneshot.run.budgets import budget_of
from oneshot.run.calibration import SAVED_TEXT
from oneshot.run.earlier import SAVED_TIMINGS, reported
from oneshot.run.forms import better_form, grid_of, plans_by_profile
from oneshot.run.inputs import paths_read
from oneshot.run.opening import open_run
from oneshot.run.prediction import file_bytes, footprint_of, stages_of
from oneshot.run.run import Run
