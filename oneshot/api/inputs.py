"""Make a config of a caller's names and objects in memory; objects lie in a folder until the end."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from oneshot.api.models import save_model
from oneshot.api.texts import joined, listed_sources, save_text
from oneshot.api.words import in_words_of_python, python_words
from oneshot.config import Config, MachineOptions, TextOptions, default_output, own_name
from oneshot.errors import ConfigError
from oneshot.footprint import offload_folder
from oneshot.machine import usual_settings
from oneshot.machine.scratch import scratch_folder
from oneshot.planning import Profile


@dataclass(frozen=True)
class Request:
    """A config, the options of it that were objects in memory, and what puts a message into Python's words."""

    config: Config
    in_memory: tuple[str, ...] = ()
    words: Callable[[str], str] = in_words_of_python


@contextmanager
def request(
    model: Any, output: Any, tokenizer: Any, options: Mapping[str, Any], *, ending: str = "", several: bool = False
) -> Iterator[Request]:
    """Make the config of a call; objects in memory lie in a temporary folder until the end.

    Until then torch has the settings that it starts with, and not the caller's.

    Args:
        model: a path, a hub name, a model of transformers, or a `Config` that has all options.
        output: None for a folder in the working folder that is named after the model, with `ending` if that is given;
            `several`: of several sparsities.
        options: as `Config.of` takes them; those that are None count as not given. `calibration`: as
            `texts.save_text` takes it, or a list of files.

    Raises a subclass of `OneshotError` for everything that cannot be used.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(output, str | os.PathLike | None):
        raise ConfigError(f"An output of the type {type(output).__name__} is not a path; give one.")
    if isinstance(given.get("profile"), Profile):
        raise ConfigError(
            "A profile is read from its folder; give the output of oneshot.profile(), as profile='FOLDER'."
        )
    if isinstance(model, Config):
        if output is not None or given:
            raise ConfigError("A Config has all options; give them there.")
        with usual_settings(), python_words():
            yield Request(model)
        return
    with usual_settings(), python_words(), scratch_folder(_scratch(given)) as folder, python_words(folder):
        in_memory = []
        plain = {name: value for name, value in given.items() if name != "calibration"}
        Config.of("model", "output", **plain)  # wrong values are told of before anything is written
        calibration = given.get("calibration", "")
        sources = listed_sources(calibration)
        if sources is not None:
            calibration = joined(sources)
            given |= {"calibration": calibration}
        if not isinstance(calibration, str | os.PathLike):
            source, sizes = save_text(
                calibration,
                folder,
                num_sequences=given.get("num_sequences", TextOptions().num_sequences),
                seed=given.get("seed", 0),
                sequence_length=given.get("sequence_length"),
            )
            given = sizes | given | {"calibration": source}
            in_memory.append("calibration")
        checkpoint = model
        if not isinstance(model, str | os.PathLike):
            checkpoint = save_model(model, tokenizer, folder)
            in_memory.append("checkpoint")
        elif tokenizer is not None:
            raise ConfigError("A tokenizer is given for a model in memory; leave it out beside a path or a hub name.")
        config = Config.of(checkpoint, output, **given)
        if output is None and ending:
            config = replace(config, output=f"{own_name(config.checkpoint)}{ending}")
        if output is None and several:
            config = replace(config, output=default_output(config.checkpoint, config.target, several=True))
        yield Request(config, tuple(in_memory), partial(in_words_of_python, scratch=folder))


def _scratch(options: Mapping[str, Any]) -> Path:
    """Return the folder for scratch files that the options name, or the system's."""
    folder = options.get("offload_dir")
    return offload_folder(MachineOptions(offload_dir=None if folder is None else os.fspath(folder)))
