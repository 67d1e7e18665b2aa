"""lm-eval's tasks on a local checkpoint."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from oneshot.errors import ConfigError, cause
from oneshot.evaluation.models import load_model
from oneshot.machine.shared import shared_by_threads
from oneshot.tasks import ALL_BUILTIN, builtin_tasks, expanded, refuse_unknown, task_config, unknown
from oneshot.text import load_tokenizer

BOOTSTRAP_ROUNDS = 1000  # for lm-eval's standard error of a perplexity; its default of 100,000 takes minutes
LM_EVAL_LOG = logging.getLogger("lm_eval")


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

    `tasks`: lm-eval's names, our own, or `builtin` for all of ours. `manager`: from `task_manager`, if it was made
    before. `batch_size`: requests that pass together. Raises `ConfigError` as `task_manager` and `load_documents`.
    """
    if manager is None:
        manager = task_manager(tasks, include_path)
        load_documents(tasks, manager)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    tokenizer = load_tokenizer(folder)
    loaded = load_model(folder, device=device, dtype=dtype)
    with _quiet():
        model = HFLM(pretrained=loaded, tokenizer=tokenizer, device=str(device), batch_size=batch_size)
        if not sys.stderr.isatty():
            _leave_out_bars(model)
        results = simple_evaluate(
            model=model,
            tasks=_configs(tasks, manager),
            limit=limit,
            task_manager=manager,
            bootstrap_iters=BOOTSTRAP_ROUNDS,
        )
    return {
        task: {name: value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in results["results"].items()
    }


def _leave_out_bars(model: Any) -> None:
    """Let a model of lm-eval show no bars, each of which would fill a file with hundreds of lines."""
    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until", "_loglikelihood_tokens"):
        answer = getattr(model, name)

        def without(*arguments: Any, answer: Any = answer, **options: Any) -> Any:
            return answer(*arguments, **options | {"disable_tqdm": True})

        setattr(model, name, without)


@shared_by_threads
@contextmanager
def _quiet() -> Iterator[None]:
    """Let lm-eval draw its bootstrap samples here, and keep its warnings and its question to git to itself.

    A pool that it forks for the samples can hang where threads hold locks. Its question for the commit of the working
    folder is an error message of git where there is none.
    """
    from lm_eval import evaluator

    name = "DISABLE_MULTIPROC"  # of lm-eval
    before, level, hash_of = os.environ.get(name), LM_EVAL_LOG.level, evaluator.get_git_commit_hash
    os.environ[name] = "1"
    LM_EVAL_LOG.setLevel(logging.ERROR)
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = hash_of
        LM_EVAL_LOG.setLevel(level)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def task_manager(tasks: Sequence[str], include_path: str | None) -> Any:
    """Return lm-eval's index of tasks: of `include_path` if it has what is not our own (lm-eval's take ten seconds).

    A task in `include_path` replaces lm-eval's and ours of the same name. Raises `ConfigError` if lm-eval is missing
    or does not know a task.
    """
    refuse_unknown(tasks, include_path)
    from lm_eval.tasks import TaskManager

    with _quiet():
        manager = TaskManager(include_path=include_path, include_defaults=False)
        others = {task for task in expanded(tasks) if task not in builtin_tasks()}
        if not others <= set(manager.all_subtasks):
            manager = TaskManager(include_path=include_path)  # the later definition replaces lm-eval's
    known = {*manager.all_tasks, ALL_BUILTIN, *builtin_tasks()}
    for task in tasks:
        if task not in known and not Path(task).is_file():
            raise unknown(task, known)
    return manager


def load_documents(tasks: Sequence[str], manager: Any) -> None:
    """Load the documents of the tasks once, so that hours of scoring do not end without them.

    Raises `ConfigError` if that is not possible, as without a network.
    """
    for name, config in zip(expanded(tasks), _configs(tasks, manager), strict=True):
        try:
            with _quiet():
                manager.load([config])
        except Exception as error:  # datasets and task files raise many unrelated types; the cause is chained
            raise ConfigError(
                f"--tasks {name} cannot be loaded ({cause(error)}); check the network and the task's files, or "
                f"measure the small tasks that need no network: --tasks {ALL_BUILTIN}."
            ) from error


def _configs(tasks: Sequence[str], manager: Any) -> list[Any]:
    """Return what lm-eval loads of each task: its name, or the config of one of ours."""
    return [
        task_config(name) if name in builtin_tasks() and name not in manager.all_tasks else name
        for name in expanded(tasks)
    ]
