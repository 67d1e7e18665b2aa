"""The model that a run reads: found or converted, identified, and what the user should know of it.

Also the files and folders that it reads, which no result may replace.
"""

import logging
import os
from pathlib import Path

from oneshot.architecture import StackShape, predicts_tokens, stated_class
from oneshot.checkpoint import Checkpoint, GgufCheckpoint, Model, identify, locate_checkpoint, open_gguf, parts_of
from oneshot.checkpoint.dtypes import DTYPES
from oneshot.checkpoint.safe_files import module_folders
from oneshot.checkpoint.tables import NOISE, sampled_difference, tied
from oneshot.config import Config
from oneshot.families import FAMILIES
from oneshot.footprint import current_bounds, refuse_conversion
from oneshot.machine import Machine
from oneshot.method import Method
from oneshot.report.progress import Tracker
from oneshot.report.sharing import shared_name
from oneshot.text import SELF, SHORT_NAMES, exists, file_of, split_sources

logger = logging.getLogger(__name__)


def paths_read(config: Config) -> dict[str, list[Path]]:
    """Return the files and folders on this machine that a run reads, by what a sentence calls them."""
    checkpoint = Path(os.path.expanduser(config.checkpoint))  # as `open_gguf`
    found = {"the input checkpoint": [path for path in parts_of(checkpoint) if path.exists()]}
    if checkpoint.is_dir():
        found["the input checkpoint"] += [checkpoint / place for place in module_folders(checkpoint)]
    for source in split_sources(config.text.calibration):
        path, _ = file_of(source)
        if source not in (*SHORT_NAMES, SELF) and exists(path):
            found[f"the calibration text {path}"] = [path]
    if config.profile is not None:
        found[f"the profile {config.profile}"] = [Path(config.profile).expanduser()]
    return found


def open_input(config: Config, machine: Machine, tracker: Tracker) -> tuple[Checkpoint, GgufCheckpoint | None]:
    """Find, fetch or convert the checkpoint, in one process for all; return it, and the GGUF file that it is from."""
    tracker.step(f"opening {shared_name(str(config.checkpoint))}")
    gguf = open_gguf(config.checkpoint)
    if gguf is not None:
        bounds = current_bounds(config.machine, machine.device)
        refuse_conversion(config.checkpoint, gguf, config.machine, bounds)
    folder = machine.workers.share(0, lambda: locate_checkpoint(config.checkpoint, machine.scratch, config.revision))
    return Checkpoint(folder), gguf


def read_model(opened: Checkpoint, *, tie: bool) -> Model:
    """Return the model of a checkpoint, and warn of what it lacks or was rounded to; `tie`: store one table of two."""
    model = identify(opened)
    _tell_of_class(opened, model)
    _tell_of_left_out(model)
    _tell_of_quantised(opened)
    if tie:
        return _tied(model)
    difference = sampled_difference(model.checkpoint, model.family)
    if difference is not None and difference <= NOISE:
        share = model.shape.vocab_size * model.shape.hidden_size / model.checkpoint.num_parameters
        logger.warning(
            "The output head and the embedding differ by %.1f %%, as copies of one table do; --tie stores one of "
            "them, which removes %.0f %% of the parameters and little else.",
            100 * difference,
            100 * share,
        )
    return model


def _tied(model: Model) -> Model:
    once = identify(tied(model.checkpoint, model.family))
    logger.warning(
        "--tie stores one table for embedding and output head: removed shares count from %s parameters, "
        "and the checkpoint has %s.",
        f"{once.checkpoint.num_parameters:,}",
        f"{model.checkpoint.num_parameters:,}",
    )
    return once


def _tell_of_class(opened: Checkpoint, model: Model) -> None:
    """Say which class a config without one is taken to mean, and that no head is stored where one is stated."""
    stated, found = stated_class(opened.config), stated_class(model.checkpoint.config)
    if stated is None and found in FAMILIES[model.family.model_type].classes:
        logger.warning(
            "config.json states no class: by its tensors the model is taken for a %s, which the result states. If it "
            "is another one, state its class as architectures there.",
            found,
        )
    elif predicts_tokens(opened.config) and not predicts_tokens(model.checkpoint.config):
        logger.warning(
            "The checkpoint has no output head, although config.json states %s: the result is a %s, which writes "
            "no text.",
            stated or f"a {model.family.model_type}",
            found,
        )


def _tell_of_left_out(model: Model) -> None:
    """Say that tensors of other classes are stored, which the result does not have."""
    if model.left_out:
        first, *others = model.left_out
        logger.warning(
            "The result is without %s%s: a %s has no such tensors, and transformers also leaves them out.",
            first,
            f" and {len(others)} more" if others else "",
            stated_class(model.checkpoint.config),
        )


def _tell_of_quantised(opened: Checkpoint) -> None:
    """Say that weights were rounded before, and what they are read as."""
    weights = opened.quantised.weights.values()
    if opened.quantised.kind is None or not weights:
        return
    dtypes = " and ".join(sorted({str(DTYPES[one.dtype]).removeprefix("torch.") for one in weights}))
    logger.warning(
        "The weights were rounded when they were quantised (%s); they are read as %s, which a result also stores "
        "unless --save-dtype says otherwise. Give the unquantised model if there is one.",
        opened.quantised.kind,
        dtypes,
    )


def tell_of_ranks(stored: StackShape, plain: Model, method: Method) -> bool:
    """Say how an input with matrices of low rank counts, and return whether its ranks count.

    Otherwise they count as whole matrices. `plain`: the model without biases that only the result has.
    """
    counted = f"{stored.stored_parameters():,}"
    if (stored.has_linear_ranks and method.plans_ranks) or (stored.has_table_ranks and method.embedding == "low-rank"):
        logger.warning(
            "The input stores matrices of low rank, which are multiplied out when they are read; ranks are chosen "
            "anew, and removed shares count from the %s parameters that it stores.",
            counted,
        )
        return True
    logger.warning(
        "The input stores matrices of low rank, which this result has whole: removed shares count from %s "
        "parameters, and the input stores %s; --form per-layer with its default options keeps ranks.",
        f"{plain.as_whole().stored.stored_parameters():,}",
        counted,
    )
    return False
