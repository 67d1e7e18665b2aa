"""The stock classes of a checkpoint's family, and models of them with a few layers and without weights."""

import copy
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch

from oneshot.architecture import Description, ModelShape, predicts_tokens, stated_class
from oneshot.checkpoint.reader import Checkpoint
from oneshot.checkpoint.safe_files import read_config
from oneshot.errors import CheckpointError
from oneshot.families import FAMILIES, text_of, with_text

# transformers' classes of decoders that do not predict the next token
OTHER_CLASSES = ("MODEL_MAPPING", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING")
FLOAT_TAG, SPECIAL_FLOATS = "__float__", ("Infinity", "-Infinity", "NaN")
PER_LAYER = ("layer_types", "no_rope_layers")  # lists of a config with an entry for every layer
WHOLE_LAYERS = "max_window_layers"  # how many of a Qwen have no window; vLLM asks it, transformers `layer_types`
ATTENDING = "full_attn_idxs"  # the numbers of LFM2's layers with attention; mlx-lm asks it before `layer_types`
OWN_SIZES = "per_layer_config"  # what a config states of layers whose sizes are not the model's, by their numbers


def stock_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the config class and the model class of transformers for the config.json of a supported family."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class, family = CONFIG_MAPPING[config["model_type"]], FAMILIES[config["model_type"]]
    stated = stated_class(config)
    if family.classes:
        return config_class, getattr(transformers, stated or family.classes[0])
    if predicts_tokens(config):
        return config_class, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    for name in OTHER_CLASSES:
        mapping: Any = getattr(transformers, name)
        if config_class in mapping and mapping[config_class].__name__ == stated:
            return config_class, mapping[config_class]
    raise CheckpointError(
        f"config.json states the class {str(stated)[:100]}, which is not supported for {config['model_type']}; give a "
        "model that predicts the next token (ForCausalLM), one without a head, or one that classifies."
    )


def as_opened(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the model type that transformers' `AutoConfig` makes of it.

    For example, `AutoConfig` opens a Mistral that states `layer_types` as a Ministral. A class without a head or with
    another one is then the class of that type. A config that `AutoConfig` cannot open stays as it is, for checks that
    know the reasons.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = _opened_type(json.dumps(config))
    if model_type == config.get("model_type"):
        return config
    opened = config | {"model_type": model_type}
    before, after = (CONFIG_MAPPING[one["model_type"]] for one in (config, opened))
    for name in OTHER_CLASSES:
        mapping: Any = getattr(transformers, name)
        if {before, after} <= set(mapping.keys()) and mapping[before].__name__ == stated_class(config):
            return opened | {"architectures": [mapping[after].__name__]}
    return opened


def under_own_names(family: Description, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that states sizes under the names of its class alone.

    transformers also reads other ones, such as GPT-2's `num_hidden_layers` for `n_layer`, and prefers these where a
    config has both. Raises `CheckpointError` for two values of one size.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = vars(family.sizes).values()
    names = {
        other: own
        for other, own in CONFIG_MAPPING[family.model_type].attribute_map.items()
        if other in config and own in sizes and other not in sizes
    }
    for other, own in names.items():
        if config.get(own, config[other]) != config[other]:
            both = " and ".join(f"{name} {repr(config[name])[:100]}" for name in (own, other))
            raise CheckpointError(
                f"config.json states {both}, which are two names of one size; give a complete {family.model_type} "
                "checkpoint."
            )
    stated = {own: config[other] for other, own in names.items()}
    return {name: value for name, value in config.items() if name not in names} | stated


@lru_cache(maxsize=64)
def _opened_type(config_json: str) -> Any:
    from transformers import AutoConfig

    config = json.loads(config_json)
    config.pop("auto_map", None)  # names code, which is never run
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
        except Exception:  # of values of any kind, in many types
            return config.get("model_type")


def model_type_of(name: str) -> str:
    """Return the model type of transformers' model class of this name."""
    import transformers

    return str(getattr(transformers, name).config_class.model_type)


def without_head(config: dict[str, Any]) -> str:
    """Return the name of the class of a config.json that has no head."""
    import transformers

    mapping: Any = transformers.MODEL_MAPPING
    return str(mapping[stock_classes(config)[0]].__name__)


def with_head(config: dict[str, Any]) -> str:
    """Return the name of the class of a decoder's config.json that predicts the next token."""
    import transformers

    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return str(mapping[stock_classes(config)[0]].__name__)


def stock_config(config: dict[str, Any]) -> Any:
    """Return the config.json as an object of transformers' class, with the defaults of that class.

    The dictionary and those inside it stay as they are; transformers changes what it is given.
    """
    return copy.deepcopy(_parsed(json.dumps(config)))


@lru_cache(maxsize=64)  # a run asks for few configs many times, and a copy takes a tenth of the time
def _parsed(config_json: str) -> Any:
    config = json.loads(config_json)
    parsed = _with_any_heads(config)
    parsed.return_dict = True  # older files say otherwise, and classes of today then fail
    parsed.chunk_size_feed_forward = 0  # the same numbers in parts, which a check would take for the whole
    return parsed


def _with_any_heads(config: dict[str, Any]) -> Any:
    """Return the object of a config.json, also if its class refuses the number of heads (`reason_against_config`).

    Layers with some of their heads pass the stream in any case. Their modules ask the object for the number.
    """
    from huggingface_hub.errors import StrictDataclassClassValidationError

    config_class = stock_classes(config)[0]
    try:
        return config_class.from_dict(with_floats(config))
    except StrictDataclassClassValidationError:
        family = FAMILIES[config["model_type"]]
        name = family.sizes.num_attention_heads
        parsed = config_class.from_dict(with_floats(with_text(family, config, {name: 1})))
        setattr(parsed if family.text_module is None else parsed.text_config, name, text_of(family, config)[name])
        return parsed


def reason_against_config(config: dict[str, Any]) -> str | None:
    """Return why transformers' class would refuse a config.json, as a sentence of that class; None if it accepts it."""
    from huggingface_hub.errors import StrictDataclassClassValidationError

    try:
        stock_classes(config)[0].from_dict(with_floats(config))  # of a copy, which `with_floats` makes
    except StrictDataclassClassValidationError as error:
        return str(error.__cause__)
    return None


def with_floats(value: Any) -> Any:
    """Return a value of a config.json with the floats that JSON lacks, which transformers writes as objects."""
    if isinstance(value, dict):
        special = value.get(FLOAT_TAG) if len(value) == 1 else None
        return float(special) if special in SPECIAL_FLOATS else {name: with_floats(one) for name, one in value.items()}
    return [with_floats(one) for one in value] if isinstance(value, list) else value


def complete_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json with the defaults of its class, and today's spellings."""
    complete: dict[str, Any] = _parsed(json.dumps(config)).to_dict()
    return complete


def entries_of_all_classes() -> set[str]:
    """Return the entries that the config of every class has, whatever its model computes."""
    from transformers import PretrainedConfig

    return set(PretrainedConfig().to_dict())


def settings_of_generation(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json states of generation, such as `max_length` and tokens, also as null."""
    from transformers import GenerationConfig

    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    return {name: value for name, value in config.items() if name in names}


def complete_text_config(family: Description, config: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json states of the language model, with the defaults of its class."""
    complete = config | complete_config(config)
    return text_of(family, complete)


def resized_config(family: Description, config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the config.json of the resized model; its class may refuse the sizes (`reason_against_config`).

    Of a language model inside a wrapper it states what changes, and what the class would otherwise make of the changes,
    such as the size of heads that a config does not state.
    """
    if family.text_module is None:
        return family.resized(config, shape)
    complete = text_of(family, config) | complete_text_config(family, config)  # also names that the class replaces
    resized = family.resized(complete, shape)
    changed = with_text(family, config, _differing(resized, complete))
    return with_text(family, changed, _differing(resized, complete_text_config(family, changed)))


def _differing(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value != others.get(name)}


def attention_of(model_class: Any, config: dict[str, Any]) -> str | dict[str, str]:
    """Return the implementation of attention: scaled dot product attention, or the class's own if it lacks that.

    A model of images and text states it for the language model, whose class may lack what the wrapper has; other towers
    have implementations of their own.
    """
    import transformers

    if "text_config" not in model_class.config_class.sub_configs:
        return _attention_of(model_class)
    mapping: Any = transformers.MODEL_MAPPING
    text_class = mapping.get(type(_complete_text(config)), model_class)
    return {"": _attention_of(model_class), "text_config": _attention_of(text_class)}


def _attention_of(model_class: Any) -> str:
    return "sdpa" if model_class._supports_sdpa else "eager"


def tied_names(model: Any) -> dict[str, str]:
    """Return the tensors of a model of transformers that are others under a second name, and need not be stored.

    They lead to the names of those others.
    """
    tied = model._tied_weights_keys
    return dict(tied) if tied and model.config.tie_word_embeddings else {}


def per_layer_lists(config: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what the config states for single layers, such as `layer_types`, also if only by a default.

    A list that it states under another name of the class is also there under that name, which the class prefers.
    """
    complete, stated = _complete_text(config), text_of(FAMILIES[config["model_type"]], config)
    others = [other for other, name in complete.attribute_map.items() if name in PER_LAYER and other in stated]
    lists = {name: getattr(complete, name, None) for name in (*PER_LAYER, *others) if not _is_derived(complete, name)}
    return {name: list(values) for name, values in lists.items() if values}


def of_layers(config: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return what the config of a model with only these layers states for single ones."""
    lists, stated = per_layer_lists(config), text_of(FAMILIES[config["model_type"]], config)
    chosen: dict[str, Any] = {
        name: [_as_stated(stated.get(name), values)[layer] for layer in layers] for name, values in lists.items()
    }
    if WHOLE_LAYERS in stated and len({*lists.get("layer_types", ())}) > 1:
        chosen[WHOLE_LAYERS] = chosen["layer_types"].count("full_attention")
    if stated.get(ATTENDING) is not None:
        chosen[ATTENDING] = [number for number, layer in enumerate(layers) if layer in stated[ATTENDING]]
    own = {int(layer): sizes for layer, sizes in _complete_text(config).to_dict().get(OWN_SIZES, {}).items()}
    if own:
        chosen[OWN_SIZES] = {str(number): own[layer] for number, layer in enumerate(layers) if layer in own}
    return chosen


def _as_stated(stated: Any, values: list[Any]) -> list[Any]:
    """Return the values of a list in the words that the config has for them, which engines may know alone."""
    if not isinstance(stated, list) or len(stated) != len(values):
        return values
    is_renamed = len({*stated}) == len({*values}) == len({*zip(stated, values, strict=True)})
    return stated if is_renamed else values


def with_kept_layers(config: dict[str, Any], kept: Sequence[int], family: Description) -> dict[str, Any]:
    """Return the config of a model that has only these layers."""
    lists, text = per_layer_lists(config), text_of(family, config)
    equal = {name for name, values in lists.items() if name not in text and len(set(values)) == 1}
    stated = {name: values for name, values in of_layers(config, kept).items() if name not in equal}
    if family.stack.experts is not None:
        stated |= family.with_dense([layer in family.dense_layers for layer in kept])
    return with_text(family, config, {family.sizes.num_hidden_layers: len(kept)} | stated)


def _complete_text(config: dict[str, Any]) -> Any:
    """Return the language model's config as an object of transformers' class; callers only read it."""
    complete = _parsed(json.dumps(config))
    return complete if FAMILIES[config["model_type"]].text_module is None else complete.text_config


def _is_derived(complete: Any, name: str) -> bool:
    """Return whether a config makes a value of others, so that it cannot state another one."""
    own = getattr(type(complete), complete.attribute_map.get(name, name), None)
    return isinstance(own, property) and own.fset is None


def layer_kinds(config: dict[str, Any], num_layers: int, family: Description) -> tuple[int, ...]:
    """Return for every layer the first one of its kind: those for which the config states the same.

    Kinds differ in what their attention sees (a window, or all tokens), in their rotary positions and in their carried
    mixers. In a mixture they also differ in whether they have experts: its dense layers have none.
    """
    lists, dense, carried = per_layer_lists(config).values(), family.dense_layers, family.carried_layers
    kinds = [(layer in dense, carried.get(layer), *(values[layer] for values in lists)) for layer in range(num_layers)]
    return tuple(kinds.index(kind) for kind in kinds)


def make_buffers(model: Any, device: torch.device) -> None:
    """Make the buffers that no checkpoint stores, such as rotary frequencies, as transformers does when it loads one.

    `model`: of transformers, on the meta device; its parameters stay there.
    """
    from transformers import PreTrainedModel

    absent = {name.rpartition(".")[0] for name, buffer in model.named_buffers() if buffer.is_meta}
    for name in absent:
        module = model.get_submodule(name)
        for own, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, own, torch.empty_like(buffer, device=device))
    owners: dict[str, Any] = {}  # the class of a language model knows its modules, and a wrapper around it does not
    for name, module in model.named_modules():
        holder = owners.get(name.rpartition(".")[0], model)
        owners[name] = module if isinstance(module, PreTrainedModel) else holder
        if any(other == name or not name or other.startswith(f"{name}.") for other in absent):
            owners[name]._init_weights(module)  # some classes make the buffers of a module in one that holds it


def sample_model(config: dict[str, Any], family: Description, dtype: torch.dtype, layers: Sequence[int] = (0,)) -> Any:
    """Return a model of the stock class on the meta device that has only these layers, or the first one of each stack.

    All layers would take memory and time, only to use a few. Every tensor has the dtype in which
    `from_pretrained(dtype=…)` leaves it: classes keep some in float32, such as routers.
    """
    lenders = set(family.lenders)
    assert lenders <= set(layers) or not any(map(family.borrows, layers[:-1])), "borrowers are made beside lenders"
    before: tuple[int, ...] = (0,) if family.first_differs and 0 not in layers else ()
    after: tuple[int, ...] = ()
    if family.last_differs:
        last = complete_text_config(family, config)[family.sizes.num_hidden_layers] - 1
        after = () if layers[-1] == last else (last,)
    if before or after:
        whole = sample_model(config, family, dtype, (*before, *layers, *after))
        for stack in family.stacks:
            modules = whole.get_submodule(stack.layers)
            whole.set_submodule(stack.layers, modules[len(before) : len(modules) - len(after)])
        return whole
    flags = [layer in family.dense_layers for layer in layers]
    borrowed = [family.borrows(layer) and lenders <= set(layers) for layer in layers]
    stated = of_layers(config, layers) | family.with_dense(flags) | family.with_borrowed(borrowed)
    decoder = {} if family.sizes.num_decoder_layers is None else {family.sizes.num_decoder_layers: len(layers)}
    fewer = with_text(family, config, stated | {family.sizes.num_hidden_layers: len(layers)} | decoder)
    shared = _without_weights(json.dumps(fewer), dtype)
    copied: dict[int, Any] = {}
    copy.deepcopy([shared.config, *shared.parameters(), *shared.buffers()], copied)
    return copy_modules(shared, copied)


def copy_modules(module: Any, copied: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """Return a copy of a module and of all modules in it, which may be given weights, hooks and other submodules.

    `copy.deepcopy` takes many times as long. `copied`: copies of what modules hold beside modules by `id`, such as of
    tensors and configs; the rest is shared.
    """
    twin = module.__new__(type(module))
    for name, value in vars(module).items():
        twin.__dict__[name] = value.copy() if isinstance(value, dict) else copied.get(id(value), value)
    for tensors in (twin._parameters, twin._buffers):
        tensors.update({name: copied.get(id(tensor), tensor) for name, tensor in tensors.items()})
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else copy_modules(child, copied)
    return twin


@lru_cache(maxsize=64)
def _without_weights(config_json: str, dtype: torch.dtype) -> Any:
    config = json.loads(config_json)
    _, model_class = stock_classes(config)
    with torch.device("meta"), torch.inference_mode(False):  # its parameters outlive the run
        hf_config = stock_config(config)
        model = model_class._from_config(hf_config, dtype=dtype, attn_implementation=attention_of(model_class, config))
        _keep_dtypes_(model, dtype)
    return model.requires_grad_(False)


def _keep_dtypes_(model: Any, dtype: torch.dtype) -> None:
    """Give tensors the dtypes in which `from_pretrained(dtype=…)` leaves them, as the class asks.

    The model has those already that its code makes in a fixed dtype. `model`: on the meta device.
    """
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    patterns, kept_by, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if match := patterns.search(name):
            module, _, own = name.rpartition(".")
            kept = tensor.detach().to(plan[kept_by[str(match.lastgroup)]])
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            setattr(model.get_submodule(module), own, torch.nn.Parameter(kept, False) if is_parameter else kept)


def load_whole(model_class: Any, folder: Path, **options: Any) -> Any:
    """Return what `model_class.from_pretrained` makes of a local folder, read as `Checkpoint` reads it.

    So no pickle is read beside safetensors, and FP8 is dequantised. A model of images and text has its own class.
    The model names its outputs, as by `name_outputs_`.
    """
    loaded = _loaded(model_class, folder, options)
    name_outputs_(loaded[0] if isinstance(loaded, tuple) else loaded)  # beside what `output_loading_info` tells
    return loaded


def name_outputs_(model: Any) -> None:
    """Let a model name its outputs, also with the config's `return_dict: false`, with which classes of today fail."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.return_dict = True


def _loaded(model_class: Any, folder: Path, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    stated = read_config(folder)
    family = FAMILIES.get(stated.get("model_type", ""))
    if family is not None and family.text_module is not None:
        _, model_class = stock_classes(stated)
    if stated.get("quantization_config") is None:
        has_safetensors = any(folder.glob("*.safetensors"))
        if family is not None:  # the class may be another one than the file's own type has
            options["config"] = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return model_class.from_pretrained(folder, local_files_only=True, use_safetensors=has_safetensors, **options)
    checkpoint = Checkpoint(folder)
    weights = checkpoint.read(checkpoint.shapes)
    if family is None:  # a class of this package
        config = model_class.config_class.from_dict(with_floats(checkpoint.config))
    else:
        config = stock_config(as_opened(checkpoint.config))
    if hasattr(model_class, "from_config"):  # an auto class does not read weights without files
        with torch.device("meta"):
            model_class = type(model_class.from_config(config))
    return model_class.from_pretrained(None, config=config, state_dict=weights, **options)
