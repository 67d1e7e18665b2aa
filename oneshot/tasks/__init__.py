"""Tasks of lm-eval by name, without loading lm-eval, and small tasks that come with this package."""

from oneshot.tasks.names import ALL_BUILTIN, builtin_tasks, expanded, refuse_unknown, task_config, unknown
