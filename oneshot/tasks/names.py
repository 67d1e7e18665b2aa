"""Small tasks of our own, which need no network, and names of tasks, looked up in the task files of lm-eval.

A task of ours is a YAML file of lm-eval and JSON lines beside it. Loading lm-eval and its index takes ten seconds.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from oneshot.errors import ConfigError
from oneshot.parsing import did_you_mean

FOLDER = Path(__file__).parent
ALL_BUILTIN = "builtin"  # the name of all of them


@cache
def builtin_tasks() -> tuple[str, ...]:
    """Return the names of the tasks."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def expanded(tasks: Sequence[str]) -> list[str]:
    """Return the names, with all built-in tasks in place of `builtin`, each once."""
    found = [name for task in tasks for name in (builtin_tasks() if task == ALL_BUILTIN else (task,))]
    return list(dict.fromkeys(found))


def task_config(name: str) -> dict[str, Any]:
    """Return lm-eval's config of a built-in task, whose documents are read from the package."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return config | {"custom_dataset": partial(_documents, FOLDER / f"{name}.jsonl")}


def _documents(path: Path, /, **metadata: Any) -> dict[str, Any]:
    """Return the split `test` of the JSON lines of a file, without a copy in the cache of `datasets`."""
    from datasets import Dataset

    return {"test": Dataset.from_list(list(map(json.loads, path.read_text(encoding="utf-8").splitlines())))}


NAMED = re.compile(rb"^(?:task|group|tag): *[\"']?([\w.-]+)[\"']? *$", re.MULTILINE)


def refuse_unknown(tasks: Sequence[str], include_path: str | None) -> None:
    """Raise `ConfigError` if lm-eval is missing, `include_path` is not a folder, or a name is in no task file.

    A name that is part of a file's text passes here, and lm-eval's index decides.
    """
    origin = getattr(find_spec("lm_eval"), "origin", None)
    if origin is None:
        raise ConfigError("--tasks needs lm-eval; run pip install 'oneshot-llm[eval]'.")
    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigError(f"--include-path {include_path} is not a folder; give the one with your task YAML files.")
    own = {ALL_BUILTIN, *builtin_tasks()}
    wanted = [task for task in tasks if task not in own and not Path(task).is_file()]
    folders = [*([] if include_path is None else [Path(include_path)]), Path(origin).parent / "tasks"]
    unseen, named = {task: task.encode() for task in wanted}, set(own)
    for folder in folders if wanted else ():
        for text in _task_files(folder):
            unseen = {task: name for task, name in unseen.items() if name not in text}
            if not unseen:
                return
            named.update(match.decode() for match in NAMED.findall(text))
    if unseen:
        raise unknown(next(iter(unseen)), named)


def unknown(task: str, known: set[str]) -> ConfigError:
    """Return the error on a name that is not known."""
    start = task[:1]
    similar = did_you_mean(task, sorted(name for name in known if name[:1] == start and abs(len(name) - len(task)) < 4))
    advice = f"; check the name, give --include-path, or the small tasks of --tasks {ALL_BUILTIN}"
    return ConfigError(f"--tasks {task} is not known to lm-eval{advice if similar == '.' else ''}{similar}")


def _task_files(folder: Path) -> Iterator[bytes]:
    """Yield the text of every task file, and of every file that task files include."""
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith("yaml"):
                with open(os.path.join(place, name), "rb") as file:
                    yield file.read()
