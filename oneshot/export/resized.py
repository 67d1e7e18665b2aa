"""The per-layer form of families whose layers are not Llama's: their own class, whose layers have their own sizes."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from oneshot.architecture import Description, Experts, LayerShape, Stack, StackShape, read_by, stored_shapes
from oneshot.checkpoint import Model, resized_config, stock_classes, stock_config, with_kept_layers, without_head
from oneshot.checkpoint.own_sizes import WITHIN
from oneshot.compression import StreamSubspaces
from oneshot.compression.embedding import MODULES
from oneshot.errors import PlanError
from oneshot.export.form import Form
from oneshot.export.outside import Part
from oneshot.export.per_layer import MODELLING_FILE as LLAMA_FILE
from oneshot.export.stock import StockForm
from oneshot.families import RESIZED_MODEL_TYPE
from oneshot.planning import Grid, Plan
from oneshot.tensors import Tensors

MODELLING_FILE = Path(__file__).parent / "modeling_oneshot_resized.py"


class ResizedForm(StockForm):
    """A checkpoint of the family's own class with other linears in every layer; all else is the stock class's."""

    name = "per-layer"
    title = Form.title
    modelling_files = LLAMA_FILE, MODELLING_FILE
    further_in_class = True

    def loading(self, config: dict[str, Any]) -> str:
        return (
            "It loads with `AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)`, which runs the "
            "modelling files in this folder. `vllm serve FOLDER --trust-remote-code` opens most families of this form "
            "with the plugin `oneshot-vllm` of oneshot's repository."
        )

    def grid(self, model: Model) -> Grid:
        """Return the sizes that the family's class can have when its linears are replaced."""
        family = model.family
        readers = [linear for attention in family.stack.attentions for linear in attention.readers]
        splits_heads = all(family.stack.stored_linear(linear) == linear for linear in readers)
        return Grid(
            family,
            model.shape,
            refusal=family.reason_against("per-layer form"),
            layers_differ=True,
            heads_differ=splits_heads and family.reason_against("heads") is None,
            ranks=not family.stack.fused,
            # engines give layers for further tokens the whole table
            embedding_ranks=_names_tables(family) and not _makes_further(model),
        )

    def layer(self, model: Model, number: int, tensors: Tensors) -> Tensors:
        """Return a layer's tensors under their stored names; experts have the parameters of the class.

        A layer of this number may have another mixer in the input, so the linears of low rank are told by the tensors.
        """
        low_rank = tuple(f"{linear}." for linear in _low_rank(model.family.stack, tensors))
        named = {_within(name) if name.startswith(low_rank) else name: tensor for name, tensor in tensors.items()}
        return super().layer(_in_class(model), number, named)

    def original(self, model: Model, number: int, stored: Tensors) -> Tensors:
        tensors = super().original(_in_class(model), number, stored)
        return {name.replace(f".{WITHIN}.", "."): tensor for name, tensor in tensors.items()}

    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        """Return the config.json of the result. Raises `PlanError` for a smaller hidden size."""
        if plan.hidden is not None:
            raise PlanError(
                f"The per-layer form of this {model.family.model_type} keeps its hidden size; use --form stock."
            )
        config, shape, stack = model.checkpoint.config, model.shape, self.grid(model).stack(plan)
        if len(plan.kept_layers) < shape.num_hidden_layers:
            config = with_kept_layers(config, plan.kept_layers, model.family)
        config = {name: value for name, value in config.items() if name not in ("auto_map", "_model_name_or_path")}
        resized = [_resized(model, number, layer) for number, layer in zip(plan.kept_layers, stack.layers, strict=True)]
        config_class, model_class = stock_classes(config)
        file, own = MODELLING_FILE.stem, f"Oneshot{model_class.__name__}"
        return config | {
            "model_type": RESIZED_MODEL_TYPE,
            "architectures": [own],
            "auto_map": {
                "AutoConfig": f"{file}.Oneshot{config_class.__name__}",
                "AutoModel": f"{file}.Oneshot{without_head(config)}",
                "AutoModelForCausalLM": f"{file}.{own}",
            },
            "tie_word_embeddings": stack.head != "own" and not stack.embedding,
            "layers_name": model.family.stack.layers,
            "embedding_ranges": [asdict(table) for table in stack.embedding] or None,
            "resized": resized,
            "sizes": stated_sizes(stack),
            **({"output_head_ranges": [asdict(table) for table in stack.output_head]} if stack.output_head else {}),
            # layers that predict further tokens are whole, and the class makes them by the config
            **({} if _makes_further(model) else _equal_in_mixtures(resized)),
        }

    def reason_against_further(self, model: Model, plan: Plan) -> str | None:
        if not _makes_further(model):
            return f"transformers' class of {model.family.model_type} does not make them in this form; use --form stock"
        return super().reason_against_further(model, plan)

    def outside(self, model: Model, plan: Plan, subspaces: StreamSubspaces | None) -> list[Part]:
        return [partial(_as_class, model.family, part) for part in super().outside(model, plan, subspaces)]


def stated_sizes(stack: StackShape) -> dict[str, Any]:
    """Return the sizes that the config states, by which oneshot counts parameters; ranges of a head if it has some."""
    return {name: size for name, size in asdict(stack).items() if name != "output_head" or size}


def _low_rank(stack: Stack, tensors: Tensors) -> list[str]:
    """Return the linears of a layer that are stored with a low rank."""
    return [
        linear
        for sublayer in stack.sublayers
        for kind, linears in sublayer.mixer.ranked.items()
        if f"{read_by(sublayer.mixer, kind)}.columns" in tensors
        for linear in linears
    ]


def _within(name: str) -> str:
    """Return the name of a tensor in the plain linear inside a linear of low rank."""
    linear, _, tensor = name.rpartition(".")
    return f"{linear}.{WITHIN}.{tensor}"


def renamed_ranks(config: dict[str, Any]) -> dict[str, str]:
    """Return the names of tensors of low rank in older results of this form, with those that they have now."""
    if config["model_type"] != RESIZED_MODEL_TYPE:
        return {}
    return {
        name: _within(name)
        for number, layer in enumerate(config["resized"])
        for linear, (_, source) in layer["linears"].items()
        if isinstance(source, str)
        for name in (f"{config['layers_name']}.{number}.{linear}.{tensor}" for tensor in ("weight", "bias"))
    }


def _names_tables(family: Description) -> bool:
    """Return whether the tables of the vocabulary are called as their ranges are."""
    own = family.stack.embedding, family.head or f"{MODULES['output_head']}.weight"
    return own == tuple(f"{module}.weight" for module in MODULES.values())


def _makes_further(model: Model) -> bool:
    """Return whether transformers makes the layers of a model that predict tokens after the next one."""
    return model.checkpoint.beside is not None and hasattr(stock_config(model.checkpoint.config), "num_mtp_layers")


def _in_class(model: Model) -> Model:
    """Return the model whose files have experts as the class has them."""
    family, experts = model.family, model.family.stack.experts
    if experts is None:
        return model
    return replace(model, family=replace(family, stack=family.stack.with_experts(experts.in_class)))


def _as_class(family: Description, part: Part) -> Tensors:
    """Return tensors under the names of the class, which transformers knows old ones of only for its own types."""
    return {family.renamed.get(name, name): tensor for name, tensor in part().items()}


def _resized(model: Model, number: int, layer: LayerShape) -> dict[str, Any]:
    """Return which linears of a layer are others than the stock class has, as the modelling file reads it.

    `number`: of the layer in the dense model. A carried mixer stays as it is.
    """
    family, dense = _in_class(model).family, replace(model.shape, own_sizes=())
    stack = family.stack_of(number)
    before = family.stored_tensors(dense, number)
    after = stored_shapes(stack.tensors(layer) | dense.carried_tensors(number), stack)
    linears: dict[str, list[Any]] = {}
    made = () if stack.experts is None else tuple(f"{module}." for module in stack.experts.made)
    for name, size in after.items():
        if len(size) == 2 and size != before[name] and not name.startswith(made):
            linear = name.removesuffix(".weight")
            linears[linear] = list(reversed(size) if linear in stack.transposed else size)
    reads: dict[str, list[int]] = {}
    for sublayer in stack.sublayers:
        for kind, names in sublayer.mixer.ranked.items():
            if rank := getattr(layer, f"{kind}_rank"):
                for linear in names:
                    outputs, inputs = after[f"{linear}.weight"]
                    read = read_by(sublayer.mixer, kind)
                    reads[read] = [inputs, rank]
                    linears[linear] = [outputs, read]
    attention = next(iter(stack.attentions), None)
    return {
        "attention": None if attention is None else attention.module,
        "heads_per_group": 0 if attention is None else layer.num_attention_heads // layer.num_key_value_heads,
        "linears": linears,
        "reads": reads,
        "mixture": None if stack.experts is None else _mixture(model, stack.experts, layer),
    }


def _mixture(model: Model, experts: Experts, layer: LayerShape) -> dict[str, Any]:
    """Return the modules of a layer's experts, and what the config of the class states of them."""
    sizes = model.family.sizes
    shape = replace(model.shape, intermediate_size=layer.intermediate_size, experts=layer.experts)
    stated = resized_config(model.family, model.checkpoint.config, shape)
    names = [name for name in (sizes.intermediate_size, *sizes.num_experts) if name in stated]
    return {"modules": list(experts.made), "config": {name: stated[name] for name in names}}


def _equal_in_mixtures(resized: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the config of the class states alike for the experts of all layers, as engines read it there."""
    first, *others = [layer["mixture"]["config"] for layer in resized if layer["mixture"] is not None] or [{}]
    return {name: value for name, value in first.items() if all(other[name] == value for other in others)}
