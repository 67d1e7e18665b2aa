"""Files beside the weights: config, tokenizer, licence; and the check of the result against its model class.

Results of forms with a modelling file are opened by classes of this package. No file of a checkpoint is run.
"""

import json
import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oneshot.architecture import Description, Experts, as_stored
from oneshot.checkpoint import (
    Checkpoint,
    Journal,
    attention_of,
    complete_config,
    identify,
    stock_classes,
    tied_names,
    with_floats,
)
from oneshot.checkpoint.checks import without_lacking_pooler
from oneshot.checkpoint.safe_files import CONFIG_ENDING, companion_files, read_config
from oneshot.errors import CalibrationError, OutputError
from oneshot.export.older_keys import with_older_keys
from oneshot.families import (
    COMPRESSED_MODEL_TYPE,
    ENCODER_MODEL_TYPE,
    FAMILIES,
    NAS_MODEL_TYPE,
    RESIZED_MODEL_TYPE,
    find_family,
)
from oneshot.text import holds_tokenizer, load_tokenizer, needs_conversion

Classes = tuple[Any, Any]  # of the config and of the model


def _classes(file: str, name: str | None, config: dict[str, Any]) -> Classes:
    """Return the classes of a modelling file; the one that the config states if no `name` is given."""
    model_class = getattr(import_module(f"oneshot.export.{file}"), name or config["architectures"][0])
    return model_class.config_class, model_class


def coordinates(width: int, rank: int) -> nn.Module:
    """Return what a linear of low rank reads through in the per-layer form, with no values yet."""
    from oneshot.export.modeling_oneshot import OneshotCoordinates

    return OneshotCoordinates(width, rank)


OWN_CLASSES: dict[str, Callable[[dict[str, Any]], Classes]] = {
    COMPRESSED_MODEL_TYPE: partial(_classes, "modeling_oneshot", "OneshotForCausalLM"),
    ENCODER_MODEL_TYPE: partial(_classes, "modeling_oneshot_encoder", None),
    NAS_MODEL_TYPE: partial(_classes, "modeling_nemotron_nas", "DeciLMForCausalLM"),
    RESIZED_MODEL_TYPE: partial(_classes, "modeling_oneshot_resized", None),
}
"""The classes of a config.json, by its model type; imported when they are needed, because they load transformers."""


CODE, PIPELINES = "auto_map", "custom_pipelines"  # entries that name classes in files of code or on the hub
logger = logging.getLogger(__name__)


def write_companions(source: Path, folder: Path, config: dict[str, Any], *, dtype: str | None) -> None:
    """Write `config.json` and copy the tokenizer, chat template, generation config and licence unchanged.

    Only code that the input's files name is left out: whoever opens a result with code of this package would run it.
    If the result has another model type, its tokenizer is written where transformers would otherwise read another one
    than the input's, or none.

    Args:
        dtype: replaces the dtype that the config states; None keeps it.

    Raises `CheckpointError` for a file that leads out of the checkpoint, because it would be published with the result,
    and `CalibrationError` for a tokenizer that must be converted and cannot be read.
    """
    config = {name: value for name, value in config.items() if name != PIPELINES}
    if dtype is not None:
        config = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(with_older_keys(config), indent=2) + "\n")
    for path in companion_files(source):
        place = folder / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        _copy_without_code(path, place)
    if config.get("model_type") != read_config(source).get("model_type"):
        keep_tokenizer(source, folder)


def _copy_without_code(path: Path, place: Path) -> None:
    """Copy a file; configs without code that they name."""
    content = json.loads(path.read_bytes()) if path.name.endswith(CONFIG_ENDING) else None
    allowed = _without_code(content)
    if allowed == content:
        shutil.copyfile(path, place)
        return
    place.write_text(json.dumps(allowed, indent=2) + "\n", encoding="utf-8")
    logger.warning("%s names code (%s), which the result leaves out; transformers' own classes read it.", path, CODE)


def _without_code(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _without_code(value) for name, value in content.items() if name != CODE}
    return [_without_code(value) for value in content] if isinstance(content, list) else content


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the config class and the model class of a config.json: this package's own, or transformers'."""
    own = OWN_CLASSES.get(config["model_type"])
    return stock_classes(config) if own is None else own(config)


def empty_model(config: dict[str, Any]) -> Any:
    """Return a model of the class of a config.json, without values, on torch's meta device; callers only read it."""
    return _empty_model(json.dumps(config))


@lru_cache(maxsize=4)  # a run asks before it writes, and when it checks what was written
def _empty_model(config_json: str) -> Any:
    config = json.loads(config_json)
    config_class, model_class = model_classes(config)
    stated = with_floats(config) | {"output_attentions": False}  # which this attention refuses to return
    with torch.device("meta"):
        return model_class(config_class.from_dict(stated, attn_implementation=attention_of(model_class, config)))


def empty_tensors(config: dict[str, Any], experts: Experts | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors that files of a config.json's class have, by their names there, on torch's meta device.

    `experts`: as the files have them; None for the family's own way.
    """
    return _stored(empty_model(config), config, experts)


def _stored(model: Any, config: dict[str, Any], experts: Experts | None = None) -> dict[str, torch.Tensor]:
    """Return the state of a model as files have it."""
    state, family = dict(model.state_dict()), _family(config)
    if family is None:
        return state
    if experts is not None:
        family = replace(family, stack=family.stack.with_experts(experts))
    return as_stored(family, config, state).layers_to_files(state)


def _family(config: dict[str, Any]) -> Description | None:
    """Return the family of a config.json as it describes the layers; None for a model type of this package."""
    return find_family(config | complete_config(config)) if config["model_type"] in FAMILIES else None


def verify(folder: Path, further: Collection[str] = ()) -> Checkpoint:
    """Check that the model class has exactly the written tensors, shape by shape; it reads only headers.

    Returns the model that was written, without layers that predict tokens after the next one: `further` names these.

    Raises `OutputError` with the first tensor that does not fit.
    """
    checkpoint = Checkpoint(folder)
    if missing := sorted(set(further) - checkpoint.shapes.keys()):
        raise OutputError(f"{missing[0]} was not written; please report this with the input's config.json.")
    if further:
        checkpoint = checkpoint.renamed({name: name for name in checkpoint.shapes if name not in further})
    family = _family(checkpoint.config)
    if family is not None and family.text_module is not None:
        return identify(checkpoint).checkpoint  # the language model; all else is the input's
    renamed = {} if family is None else family.renamed
    written = {renamed.get(name, name): shape for name, shape in checkpoint.shapes.items()}
    model = empty_model(checkpoint.config)
    own = None if family is None else family.stack.experts
    experts = None if own is None else own.as_in(written)
    expected = {name: tuple(tensor.shape) for name, tensor in _stored(model, checkpoint.config, experts).items()}
    names = without_lacking_pooler(expected, written) | written.keys()
    for name in sorted(names - tied_names(model).keys()):
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if expected.get(name) != written.get(name):
            raise OutputError(
                f"{name} was written as {written.get(name)} but {type(model).__name__} expects {expected.get(name)}; "
                "please report this with the input's config.json."
            )
    return checkpoint


def finish_weights(journal: Journal, *beside: Path) -> int:
    """Complete the weight files, copy files `beside` them, check the result, and return the model's parameters."""
    journal.finish()
    for path in beside:
        shutil.copyfile(path, journal.partial / path.name)
    return verify(journal.partial, journal.further).num_parameters


def keep_tokenizer(source: Path, folder: Path) -> None:
    """Write the input's tokenizer as transformers reads it, if it reads another one beside another model type.

    It chooses the tokenizer's class by the type, and mends the pattern of old Mistral tokenizers
    (`fix_mistral_regex`) only beside types of Mistral.
    """
    if needs_conversion(source):
        load_tokenizer(source).save_pretrained(folder)
        return
    if not holds_tokenizer(source):
        return
    try:
        own = load_tokenizer(source)
    except CalibrationError:  # a run on tokens needs no tokenizer; its files are what they were
        return
    written = load_tokenizer(folder)
    if content_of(own) != content_of(written):
        own.save_pretrained(folder)
    if getattr(getattr(own, "backend_tokenizer", None), "fix_mistral_regex", None) is False:
        logger.warning(
            "transformers takes fix_mistral_regex for the tokenizer of %s but not for the result's, which has another "
            'model type; to have both mended, state "fix_mistral_regex": true in tokenizer_config.json of the input.',
            source,
        )


def content_of(tokenizer: Any) -> str | None:
    """Return all that decides how a tokenizer cuts texts; None for one that is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str())
