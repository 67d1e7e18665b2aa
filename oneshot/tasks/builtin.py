"""Small tasks of our own, which need no network: a YAML file of lm-eval and JSON lines beside it for each."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

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
    return config | {"custom_dataset": _Documents(FOLDER / f"{name}.jsonl")}


class _Documents:
    """Make the split `test` of the JSON lines of a file, without a copy in the cache of `datasets`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, **metadata: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list(list(map(json.loads, self._path.read_text(encoding="utf-8").splitlines())))}
