"""Tasks of lm-eval by name, without loading lm-eval, and small tasks that come with this package."""

from oneshot.tasks.builtin import ALL_BUILTIN, builtin_tasks, expanded, task_config
from oneshot.tasks.names import refuse_unknown, unknown
