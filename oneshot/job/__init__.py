"""One target of a run: its plan and stages, its sizes, its layers, and what it writes."""

from oneshot.job.job import Job, expect_stages
from oneshot.job.layers import compress_layers
from oneshot.job.result import expect_parts, write_outside, write_result
from oneshot.job.sizes import decide_sizes, tell_of_missed_target

__all__ = [
    "Job",
    "compress_layers",
    "decide_sizes",
    "expect_parts",
    "expect_stages",
    "tell_of_missed_target",
    "write_outside",
    "write_result",
]
