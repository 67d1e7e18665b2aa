"""Form `per-layer` of encoders: a checkpoint of our own class under BERT's names, whose layers have their own sizes."""

from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from oneshot.architecture import Description, LayerShape, ModelShape, StackShape, stated_class
from oneshot.checkpoint import Model, complete_config
from oneshot.compression import StreamSubspaces
from oneshot.compression.fold_post_norm import fold_output, fold_table, fold_tied_head
from oneshot.export.llama_layers import RenamedLayers
from oneshot.export.outside import Part, unchanged_outside
from oneshot.families import BERT, ENCODER_MODEL_TYPE
from oneshot.planning import Grid, Plan
from oneshot.report.card import USES
from oneshot.tensors import Tensors

MODELLING_FILE = Path(__file__).parent / "modeling_oneshot_encoder.py"
# what DistilBERT calls the dropout before the head of a task; the other heads have the one of hidden states
DISTILBERT_DROPOUT = {"ForQuestionAnswering": "qa_dropout", "ForSequenceClassification": "seq_classif_dropout"}
DISTILBERT_EPSILON = 1e-12  # in its code; its config does not state it
KEPT_KEYS = (
    *("bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range"),
    *("label2id", "max_position_embeddings", "pad_token_id", "problem_type", "tie_word_embeddings"),
)
OUTPUT_FLAGS = ("output_attentions", "output_hidden_states")  # of what the input also returns without being asked


class EncoderForm(RenamedLayers):
    """A checkpoint of an encoder whose layers have their own widths and heads, and its states their own subspaces."""

    name = "per-layer"
    modelling_files = (MODELLING_FILE,)

    def loading(self, config: dict[str, Any]) -> str:
        auto_class = [name for name in config["auto_map"] if name not in ("AutoConfig", "AutoModel")] or ["AutoModel"]
        return (
            f"It loads with `{auto_class[0]}.from_pretrained(..., trust_remote_code=True)`, which runs the modelling "
            "file in this folder."
        )

    def grid(self, model: Model) -> Grid:
        return Grid(
            model.family,
            model.shape,
            refusal=model.family.reason_against("per-layer form"),
            layers_differ=True,
            heads_differ=True,
            inner_sizes=True,
            subspaces_differ=True,
            maps_tied_head=True,
        )

    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        has_pooler = any(name.endswith("pooler.dense.weight") for name in model.checkpoint.tensor_names)
        stack = self.grid(model).stack(plan)
        return encoder_config(model.checkpoint.config, model.shape, stack, has_pooler=has_pooler)

    def names_of(self, model: Model) -> Description:
        """Return BERT with the prefix that the result's class has: none for a plain model."""
        return BERT.stored_as({_as_bert(model.family, model.family.stack.embedding)})

    def outside(self, model: Model, plan: Plan, subspaces: StreamSubspaces | None) -> list[Part]:
        def renamed(read: Part) -> Tensors:
            return {_as_bert(model.family, name): tensor for name, tensor in read().items()}

        def folded() -> Tensors:
            assert subspaces is not None
            return _fold_outside(model, subspaces)

        parts = [folded] if plan.hidden is not None else unchanged_outside(model)
        return [partial(renamed, part) for part in parts]


def _as_bert(family: Description, name: str) -> str:
    """Return the name under which a tensor outside the layers is stored."""
    return name.replace(f"{family.prefix}.", "bert.", 1) if name.startswith(f"{family.prefix}.") else name


def _fold_outside(model: Model, subspaces: StreamSubspaces) -> Tensors:
    """Return the tensors outside the layers for states inside subspaces; heads stay as they are."""
    stack = model.family.stack
    assert stack.embedding_norm is not None
    [read, *rest] = unchanged_outside(model)
    assert not rest
    tensors, first = read(), subspaces.basis(0)
    prefix = stack.embedding.removesuffix("embeddings.word_embeddings.weight")
    if model.shape.tied:
        head = fold_tied_head(tensors[stack.embedding], first)
        tensors |= {f"{name}.weight" if name == "head_map" else name: tensor for name, tensor in head.items()}
    for name in (stack.embedding, stack.positions, stack.token_types):
        if name is not None:
            tensors[name] = fold_table(tensors[name], first)
    for part in model.read_embedding_norm():
        del tensors[f"{stack.embedding_norm.name}.{part}"]
    last = subspaces.basis(stack.position(model.shape.num_hidden_layers))
    output = fold_output(model.read_norm_before(model.shape.num_hidden_layers), last)
    return tensors | {f"{prefix}output_map.{part}": tensor for part, tensor in output.items()}


def encoder_config(config: dict[str, Any], shape: ModelShape, stack: StackShape, *, has_pooler: bool) -> dict[str, Any]:
    """Return the config.json of a per-layer encoder from the dense model's config and the new sizes."""
    complete = complete_config(config)
    kept = _of_others(config) | {name: complete[name] for name in KEPT_KEYS if complete.get(name) is not None}
    kept |= {name: True for name in OUTPUT_FLAGS if config.get(name) is True}
    head = next(name for name in USES if (stated_class(config) or "Model").endswith(name))
    auto_map = {"AutoConfig": f"{MODELLING_FILE.stem}.OneshotEncoderConfig"}
    auto_map |= {USES[name].auto_class: f"{MODELLING_FILE.stem}.OneshotEncoder{name}" for name in {"Model", head}}
    is_bert = complete["model_type"] == BERT.model_type
    return kept | {
        "model_type": ENCODER_MODEL_TYPE,
        "architectures": [f"OneshotEncoder{head}"],
        "auto_map": dict(sorted(auto_map.items())),
        "dense_type": complete["model_type"],
        "vocab_size": stack.vocab_size,
        "type_vocab_size": stack.num_token_types,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": len(stack.layers),
        "num_attention_heads": shape.num_attention_heads,
        "head_dim": shape.head_dim,
        "hidden_act": complete["hidden_act" if is_bert else "activation"],
        "hidden_dropout_prob": complete["hidden_dropout_prob" if is_bert else "dropout"],
        "attention_probs_dropout_prob": complete["attention_probs_dropout_prob" if is_bert else "attention_dropout"],
        "classifier_dropout": complete.get("classifier_dropout" if is_bert else DISTILBERT_DROPOUT.get(head, "")),
        "layer_norm_eps": complete["layer_norm_eps"] if is_bert else DISTILBERT_EPSILON,
        "has_pooler": has_pooler,
        "subspaces": stack.output_size > 0,
        "layers": [_stored(layer) for layer in stack.layers],
        "head": stack.head,
        "further_parameters": stack.further_parameters,
    }


def _of_others(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that neither the config's class nor BERT's knows, such as what sentence-transformers reads."""
    known = {name for one in (config["model_type"], BERT.model_type) for name in complete_config({"model_type": one})}
    others = complete_config(config).keys() - known  # without older spellings
    return {name: value for name, value in config.items() if name in others and not name.startswith("_")}


def _stored(layer: LayerShape) -> dict[str, Any]:
    return {name: value for name, value in asdict(layer).items() if name != "shared_norm"}


def encoder_shape(config: dict[str, Any]) -> StackShape:
    """Return the sizes that the config.json of a per-layer encoder states."""
    names = {field.name for field in fields(LayerShape)}
    return StackShape(
        tuple(LayerShape(**{name: layer[name] for name in names & layer.keys()}) for layer in config["layers"]),
        config["vocab_size"],
        config["head"],
        num_positions=config["max_position_embeddings"],
        num_token_types=config["type_vocab_size"],
        final_norm=False,
        output_size=config["hidden_size"] if config["subspaces"] else 0,
        further_parameters=config["further_parameters"],
        causal=False,
    )
