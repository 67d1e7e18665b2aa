"""Shared by tests of compressed encoders: stock models, and checkpoints of the encoder form made from them."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oneshot.architecture import LayerShape, Stack
from oneshot.compression.fold_post_norm import fold_output, fold_post_norm, fold_table, fold_tied_head
from oneshot.export import modeling_oneshot_encoder as modelling
from oneshot.families import FAMILIES

Tensors = dict[str, torch.Tensor]
Norms = list[tuple[str, Tensors]]

TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification")
STOCK = {"bert": "Bert", "distilbert": "DistilBert"}
TOKEN_IDS = torch.randint(2, 400, (4, 20), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(20) < torch.tensor([[20], [3], [11], [16]])).long()
TOKEN_TYPES = (torch.arange(20) > 8).long().expand(4, 20)


def inputs_of(stock: Any) -> dict[str, torch.Tensor]:
    """Return a padded batch, with token types if the model has them."""
    given = {"input_ids": TOKEN_IDS, "attention_mask": MASK}
    return given | ({"token_type_ids": TOKEN_TYPES} if stock.config.model_type == "bert" else {})


def outputs_of(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all tensors that the model returns; hidden states only of real tokens."""
    with torch.inference_mode():
        found = model(**given)
    outputs = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return {name: value[MASK.bool()] if value.shape[:2] == MASK.shape else value for name, value in outputs.items()}


def relative_difference(model: Any, other: Any, given: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of all outputs, relative to the largest value of each."""
    first, second = outputs_of(model, given), outputs_of(other, given)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max() / second[name].abs().max()) for name in first)


def base_of(stock: Any) -> Any:
    """Return the model without its head."""
    return getattr(stock, stock.base_model_prefix, stock)


def stack_of(stock: Any) -> Stack:
    return FAMILIES[stock.config.model_type].stack


def layers_of(stock: Any) -> Any:
    """Return the stock model's layers."""
    return base_of(stock).get_submodule(stack_of(stock).layers)


def norms_of(stock: Any) -> list[tuple[Any, str]]:
    """Return the norm of every position: the module that holds it, and its name there."""
    found = [(base_of(stock).embeddings, "LayerNorm")]
    for layer in layers_of(stock):
        for sublayer in stack_of(stock).sublayers:
            module, _, name = sublayer.norm.name.rpartition(".")
            found.append((layer.get_submodule(module), name))
    return found


def norm_tensors(stock: Any) -> list[Tensors]:
    """Return `weight` and `bias` of the norm of every position."""
    return [dict(getattr(module, name).state_dict()) for module, name in norms_of(stock)]


def shape_of(stock: Any, **changes: Any) -> LayerShape:
    """Return the shape of a dense layer, with changes."""
    layer, stack = layers_of(stock)[0], stack_of(stock)
    hidden, heads = stock.config.hidden_size, stock.config.num_attention_heads
    width = layer.get_submodule(stack.ffn.up).out_features
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "middle_size": hidden,
        "output_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "query_key_size": hidden // heads,
        "value_size": hidden // heads,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "gated": False,
    }
    return LayerShape(**(sizes | changes))


def outside_of(stock: Any) -> Tensors:
    """Return the tensors outside the layers as the encoder form names them; not those that are tied."""
    prefix, layers = f"{stock.base_model_prefix}.", f"{stack_of(stock).layers}."
    found = {}
    for name, tensor in stock.state_dict().items():
        inside = name.removeprefix(prefix)
        if inside.startswith(layers) or name in (stock.all_tied_weights_keys or {}):
            continue
        found[f"bert.{inside}" if inside != name else name] = tensor
    return found


def layer_tensors(stock: Any, number: int) -> Tensors:
    """Return a layer's tensors under the family's own names."""
    return dict(layers_of(stock)[number].state_dict())


def as_stored(stock: Any, layers: list[Tensors], outside: Tensors) -> Tensors:
    """Return all tensors under the names of the encoder form."""
    family, bert = FAMILIES[stock.config.model_type], FAMILIES["bert"]
    prefix = "" if base_of(stock) is stock else "bert."
    stored = dict(outside)
    for number, tensors in enumerate(layers):
        stored |= {
            f"{prefix}{bert.stack.layer_prefix(number)}{name}": tensor
            for name, tensor in family.rename(tensors, bert).items()
        }
    return {name: tensor.contiguous().clone() for name, tensor in stored.items()}


def fold_into_subspaces(stock: Any, bases: list[torch.Tensor]) -> tuple[Tensors, list[LayerShape]]:
    """Return the folded checkpoint of a stock model, and its layers' shapes."""
    norms, stack = norm_tensors(stock), stack_of(stock)
    layers = [
        fold_post_norm(layer_tensors(stock, number), stack, norms[2 * number], bases[2 * number : 2 * number + 3])
        for number in range(len(layers_of(stock)))
    ]
    outside, prefix = outside_of(stock), "" if base_of(stock) is stock else "bert."
    words = outside[f"{prefix}embeddings.word_embeddings.weight"]
    tables = {name: tensor for name, tensor in outside.items() if "_embeddings.weight" in name}
    outside = {name: tensor for name, tensor in outside.items() if "embeddings.LayerNorm" not in name}
    outside |= {name: fold_table(table, bases[0]) for name, table in tables.items()}
    outside |= {f"{prefix}output_map.{part}": tensor for part, tensor in fold_output(norms[-1], bases[-1]).items()}
    if head_of(stock) == "tied":
        head = fold_tied_head(words, bases[0])
        outside |= {"head_map.weight": head["head_map"], "row_means": head["row_means"]}
    shapes = [
        shape_of(
            stock,
            hidden_size=bases[2 * number].shape[1],
            middle_size=bases[2 * number + 1].shape[1],
            output_size=bases[2 * number + 2].shape[1],
            attention_shortcut=True,
            ffn_shortcut=True,
        )
        for number in range(len(layers))
    ]
    return as_stored(stock, layers, outside), shapes


def head_of(stock: Any) -> str:
    """Return whether a stock model predicts tokens with its embedding."""
    predicts = type(stock).__name__.endswith("ForMaskedLM")
    return "tied" if predicts and stock.config.tie_word_embeddings else "none"


def form_config(stock: Any, shapes: list[LayerShape], *, subspaces: bool) -> dict[str, Any]:
    """Return the config.json of an encoder form."""
    dense, file = stock.config, "modeling_oneshot_encoder"
    task = next(task for task in TASKS if type(stock).__name__.endswith(task))
    bert, tied = dense.model_type == "bert", head_of(stock) == "tied"
    autos = {"AutoModel" + task.removeprefix("Model"): f"{file}.OneshotEncoder{task}" for task in TASKS}
    return {
        "model_type": "oneshot-encoder",
        "architectures": [f"OneshotEncoder{task}"],
        "auto_map": {"AutoConfig": f"{file}.OneshotEncoderConfig"} | autos,
        "vocab_size": dense.vocab_size,
        "hidden_size": dense.hidden_size,
        "num_hidden_layers": len(shapes),
        "num_attention_heads": dense.num_attention_heads,
        "intermediate_size": layers_of(stock)[0].get_submodule(stack_of(stock).ffn.up).out_features,
        "hidden_act": dense.hidden_act if bert else dense.activation,
        "layer_norm_eps": dense.layer_norm_eps if bert else 1e-12,
        "type_vocab_size": dense.type_vocab_size if bert else 0,
        "max_position_embeddings": dense.max_position_embeddings,
        "pad_token_id": dense.pad_token_id,
        "tie_word_embeddings": dense.tie_word_embeddings,
        "id2label": {str(number): label for number, label in dense.id2label.items()},
        "label2id": dense.label2id,
        "head_dim": dense.hidden_size // dense.num_attention_heads,
        "dense_type": dense.model_type,
        "has_pooler": getattr(base_of(stock), "pooler", None) is not None,
        "head": "mapped" if tied and subspaces else head_of(stock),
        "subspaces": subspaces,
        "layers": [asdict(shape) for shape in shapes],
    }


def save_form(folder: Path, stock: Any, tensors: Tensors, shapes: list[LayerShape], *, subspaces: bool) -> Path:
    """Write a checkpoint of the encoder form with its modelling file."""
    folder.mkdir(parents=True)
    config = form_config(stock, shapes, subspaces=subspaces)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert modelling.__file__ is not None
    shutil.copy(modelling.__file__, folder)
    return folder


def open_form(folder: Path, **options: Any) -> Any:
    """Open a checkpoint of the encoder form; it must hold exactly the tensors of its class."""
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    model, info = getattr(modelling, name).from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def random_bases(sizes: list[int], hidden: int, *, centred: bool = False, seed: int = 3) -> list[torch.Tensor]:
    """Return random orthonormal `(hidden, size)` float64 for every position; `centred`: with columns of mean zero."""
    generator = torch.Generator().manual_seed(seed)
    bases = []
    for size in sizes:
        columns = torch.randn(hidden, size, generator=generator, dtype=torch.float64)
        bases.append(torch.linalg.qr(columns - columns.mean(0) if centred else columns)[0])
    return bases
