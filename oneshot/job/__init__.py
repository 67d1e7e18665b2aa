"""One result of a run: its plan and stages, its sizes, its layers, and what it writes. `pipeline` has the order."""

from oneshot.job.job import Job, plan_jobs
from oneshot.job.layers import compress_layers
from oneshot.job.result import expect_parts, write_outside, write_result
from oneshot.job.sizes import decide_sizes, tell_of_missed_target
