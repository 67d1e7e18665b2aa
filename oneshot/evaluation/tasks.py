"""lm-eval's tasks on a local checkpoint."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from oneshot.errors import ConfigError
from oneshot.evaluation.models import load_model
from oneshot.machine.shared import shared_by_threads
from oneshot.text import load_tokenizer

BOOTSTRAP_ROUNDS = 1000  # for lm-eval's standard error of a perplexity; its default of 100,000 takes minutes


def run_tasks(
    folder: Path,
    tasks: Sequence[str],
    *,
    limit: int | None,
    include_path: str | None,
    device: torch.device,
    dtype: torch.dtype | str = "auto",
    manager: Any = None,
    batch_size: int = 1,
) -> dict[str, dict[str, float]]:
    """Return lm-eval's own metrics for the tasks, measured by its stock `hf` model.

    `manager`: from `task_manager`, if it was made before. `batch_size`: requests that pass together. Raises
    `ConfigError` as `task_manager`.
    """
    manager = manager or task_manager(tasks, include_path)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    tokenizer = load_tokenizer(folder)
    loaded = load_model(folder, device=device, dtype=dtype)
    with _without_forks():
        results = simple_evaluate(
            model=HFLM(pretrained=loaded, tokenizer=tokenizer, device=str(device), batch_size=batch_size),
            tasks=list(tasks),
            limit=limit,
            task_manager=manager,
            bootstrap_iters=BOOTSTRAP_ROUNDS,
        )
    return {
        task: {name: value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in results["results"].items()
    }


@shared_by_threads
@contextmanager
def _without_forks() -> Iterator[None]:
    """Let lm-eval draw its bootstrap samples here: a pool that it forks for them can hang where threads hold locks."""
    name = "DISABLE_MULTIPROC"  # of lm-eval
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def task_manager(tasks: Sequence[str], include_path: str | None) -> Any:
    """Return lm-eval's index of tasks: of `include_path` if it has them all (lm-eval's own take ten seconds), or both.

    A task in `include_path` replaces lm-eval's task of the same name. Raises `ConfigError` if lm-eval is missing or
    does not know a task.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError("--tasks needs lm-eval; run pip install 'oneshot-llm[eval]'.") from error
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ConfigError(f"--include-path {include_path} is not a folder; give the one with your task YAML files.")
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(tasks) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=include_path)  # the later definition replaces lm-eval's
    for task in tasks:
        if task not in manager.all_tasks and not Path(task).is_file():
            raise ConfigError(f"--tasks {task} is not known to lm-eval; check the name, or give --include-path.")
    return manager
