"""A model in memory, written to a folder that a run reads layer by layer, as any other checkpoint."""

import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from oneshot.checkpoint import as_opened
from oneshot.checkpoint.safe_files import check_readable, other_companions
from oneshot.errors import CalibrationError, CheckpointError, cause
from oneshot.machine.shared import shared_by_threads
from oneshot.text import load_tokenizer

logger = logging.getLogger(__name__)
CARD = "README.md"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def save_model(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Write a model of transformers and its tokenizer into a folder of `folder`; return that folder.

    The model stays as it is. It is written in its own dtype, one file of 5 GB after the other. If the checkpoint that
    it came from is on this machine, the files beside those weights are copied, such as the licence and the pooling.
    If the hub's cache has several revisions of it, a warning says that they are left out; so one says of forward hooks.

    Args:
        model: a `PreTrainedModel`. tokenizer: with `save_pretrained`, or a path or hub name; None: the one that lies
            where the model came from, or none.

    Raises `CheckpointError` for anything that is not a whole model of transformers, with the modules of its class.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"An object of type {type(model).__name__} is not a model of transformers{_remedy(model)}"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointError("The model has weights on the device meta; load it without offloading, or give its path.")
    origin = str(model.config._name_or_path or "")
    place = folder / (Path(origin).name or type(model).__name__)
    saved = copy(model)  # with the same weights: saving notes the class and the dtype in the config
    saved.config = deepcopy(model.config)
    # not saved; other implementations refuse a config that states output_attentions
    saved.config._attn_implementation = "eager"
    with _saving():
        config = json.loads(saved.config.to_json_string()) | {"architectures": [type(model).__name__]}
    if (opened_as := as_opened(config).get("model_type")) != config.get("model_type"):
        raise CheckpointError(
            f"The model is a {type(model).__name__}, but transformers opens what it saves as {opened_as}; load it with "
            "an Auto class of transformers."
        )
    _refuse_other_modules(model, saved.config)
    _tell_of_changes(model)
    with _saving(), _without_bars():
        saved.save_pretrained(place)
    source = _folder_of(origin)
    found = _tokenizer(tokenizer, origin, source)
    if found is not None:
        found.save_pretrained(place)
    if HUB_NAME.fullmatch(origin) and not Path(origin).exists():
        (place / CARD).write_text(f"---\nbase_model: {origin}\n---\n", encoding="utf-8")
    elif source is not None and (source / CARD).is_file():
        (place / CARD).write_bytes((source / CARD).read_bytes())
    if source is not None:
        _copy_companions(source, place)
    return place


def _refuse_other_modules(model: Any, config: Any) -> None:
    """Raise `CheckpointError` if a module is of another class than the one that opening the checkpoint makes."""
    if getattr(model, "hf_quantizer", None) is not None:  # which replaces linears
        return
    with torch.device("meta"):
        stock = type(model)(config)
    found = dict(model.named_modules())
    for name, module in stock.named_modules():
        if name in found and type(found[name]) is not type(module):
            raise CheckpointError(
                f"The module {name} of the model is a {type(found[name]).__name__}, but opening its checkpoint makes a "
                f"{type(module).__name__} there; put that back."
            )


def _tell_of_changes(model: Any) -> None:
    """Warn of what changes how modules compute and is in no checkpoint: forward hooks, and a `forward` of an object.

    What transformers and accelerate put there leaves what a module computes unchanged.
    """
    hooked, replaced = list[str](), list[str]()
    for name, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks):
            hooked.append(name or type(module).__name__)
        own = vars(module).get("forward", module.forward)
        if getattr(own, "__func__", own) is not type(module).forward and not hasattr(module, "_hf_hook"):
            replaced.append(name or type(module).__name__)
    for what, names in (("forward hooks", hooked), ("replaced forward methods", replaced)):
        if names:
            logger.warning(
                "The model has %s (%s), which a checkpoint does not hold: the result is of the model without them.",
                what,
                ", ".join([*names[:3], *(["..."] if names[3:] else [])]),
            )


def _folder_of(origin: str) -> Path | None:
    """Return the local folder that a model came from, which the hub's cache may have; None without one.

    A model does not tell its revision, so the cache counts if it has one of the repository.
    """
    if origin and Path(origin).is_dir():
        return Path(origin)
    if not HUB_NAME.fullmatch(origin):
        return None
    snapshots = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=origin, repo_type="model") / "snapshots"
    found = [path for path in snapshots.iterdir() if path.is_dir()] if snapshots.is_dir() else []
    if len(found) == 1:
        return found[0]
    logger.warning(
        "The files beside the checkpoint of the model are left out, and its tokenizer is of the main revision unless "
        "one is given, because the hub's cache has %d revisions of %s instead of one; load the model from a folder to "
        "have them copied.",
        len(found),
        origin,
    )
    return None


def _copy_companions(source: Path, place: Path) -> None:
    """Copy what lies beside a checkpoint and belongs neither to its weights nor to its tokenizer."""
    try:
        check_readable(source)
        companions = other_companions(source)
    except CheckpointError as error:  # the model itself is at hand
        logger.warning("The files beside the checkpoint of the model are left out, because %s", error)
        return
    for path in companions:
        copied = place / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)


@contextmanager
def _saving() -> Iterator[None]:
    """Raise `CheckpointError` for whatever transformers raises when it saves a model."""
    try:
        yield
    except Exception as error:  # transformers raises many unrelated types; the cause is named and chained
        raise CheckpointError(
            f"The model cannot be saved ({cause(error)}); give the path of its checkpoint."
        ) from error


@shared_by_threads
@contextmanager
def _without_bars() -> Iterator[None]:
    """Turn off transformers' progress bars, which are a setting of the process."""
    from transformers.utils import logging

    shows_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bar:
            logging.enable_progress_bar()


def _remedy(model: Any) -> str:
    """Return the end of the sentence on an object that is not a model of transformers."""
    if hasattr(model, "merge_and_unload"):
        return "; give model.merge_and_unload()."
    if hasattr(model, "_orig_mod"):
        return "; give the model that was compiled (model._orig_mod)."
    return "; give one, a path, or a name on the hub."


def _tokenizer(tokenizer: Any, origin: str, source: Path | None) -> Any:
    """Return a tokenizer that is given, or lies where the model came from; None without one.

    `source`: the local folder that the model came from, of which the hub's cache names the revision; None: unknown.
    """
    from transformers import AutoTokenizer

    if hasattr(tokenizer, "save_pretrained"):
        return tokenizer
    name = str(tokenizer or origin)
    if not name:
        return None
    try:
        if Path(name).is_dir():
            return load_tokenizer(Path(name))
        revision = source.name if source is not None and not tokenizer else "main"
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # the readers of tokenizers raise many unrelated types; the cause is named and chained
        if tokenizer is None:
            return None
        raise CalibrationError(f"The tokenizer {name} cannot be read ({cause(error)}); give another.") from error
