"""An opened checkpoint with a known family: the model that is compressed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from oneshot.architecture import (
    BEHIND,
    FURTHER_PREFIX,
    Description,
    ModelShape,
    Stack,
    StackShape,
    Table,
    as_stored,
    check_layers,
    from_files,
    predicts_tokens,
    read_shape,
    stated_class,
    stated_of_further,
    without_further,
)
from oneshot.checkpoint.checks import (
    Outside,
    check_biases,
    check_carried,
    check_count,
    check_dtypes,
    check_outside,
    expected_outside,
    without_zero_biases,
)
from oneshot.checkpoint.dtypes import WEIGHT_DTYPES
from oneshot.checkpoint.found_class import named_by, stating_class
from oneshot.checkpoint.nearest import nearest_family
from oneshot.checkpoint.own_sizes import as_stock
from oneshot.checkpoint.quantised import refuse_quantised
from oneshot.checkpoint.reader import Checkpoint
from oneshot.checkpoint.stock import (
    as_opened,
    complete_config,
    layer_kinds,
    stock_classes,
    stock_config,
    under_own_names,
    with_head,
    without_head,
)
from oneshot.checkpoint.tables import check_copies, without_equal_head
from oneshot.errors import CheckpointError, PlanError
from oneshot.families import FAMILIES, UnknownFamilyError, find_family, text_of, with_text
from oneshot.tensors import Tensors

MOST_FURTHER_LAYERS = 16


@dataclass(frozen=True)
class Model:
    """A checkpoint whose family is known and whose layers have the shapes that its config states.

    `stated_further`: what the input's config states of layers that predict tokens after the next one. Such layers are
    beside the checkpoint, whose own config states none of them. `left_out`: stored weights of other classes.
    """

    checkpoint: Checkpoint
    family: Description
    shape: ModelShape
    stated_further: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Return for every layer of a stack the first layer of its kind, see `stock.layer_kinds`."""
        return layer_kinds(self.checkpoint.config, self.shape.num_hidden_layers, self.family)

    @property
    def stored(self) -> StackShape:
        """Return the sizes that are stored, of which shares are counted; a result of ours may have ranks."""
        stack, stated = self.shape.stack(), self.checkpoint.stated
        return stack if stated is None else replace(stated, head=stack.head)

    @property
    def has_ranks(self) -> bool:
        """Return whether linears or tables of the vocabulary are stored with low rank."""
        stated = self.checkpoint.stated
        return stated is not None and (stated.has_linear_ranks or stated.has_table_ranks)

    def as_whole(self) -> "Model":
        """Return the same model, counted with whole matrices where low ranks are stored."""
        return replace(self, checkpoint=self.checkpoint.counted_whole())

    @property
    def start_token(self) -> int:
        """Return the token before a decoder's first one."""
        config = self.checkpoint.config
        start = config.get("decoder_start_token_id")
        return int(config.get("pad_token_id") or 0) if start is None else int(start)

    @property
    def head_scale(self) -> float:
        """Return what the stock class multiplies the logits or the last states with: `D^-½` in T5 1.0."""
        scaled = getattr(stock_config(self.checkpoint.config), "scale_decoder_outputs", False)
        return self.shape.hidden_size**-0.5 if scaled else self.family.head_scale

    def read_layer(self, layer: int) -> Tensors:
        """Return the tensors of a layer, without its prefix, and the table of positions that its stack shares."""
        with torch.inference_mode():  # the mode belongs to a thread, and a prefetching thread also reads
            stack = self.family.stack_of(layer)
            prefix, whole, places = stack.layer_prefix(layer), Tensors(), Tensors()
            if stack.experts is not None and self.checkpoint.has_values:  # experts are read to where they are stacked
                described = self.checkpoint.without_values().read_prefix(prefix)
                whole, places = stack.experts.stacked(described, torch.device("cpu"))
            read = self.checkpoint.read_prefix(prefix, places)
            left = {name: one for name, one in read.items() if name not in places and "rotary_emb" not in name}
            tensors = from_files(left | whole, stack)
            if stack.relative_bias is not None:
                tensors[stack.relative_bias] = self.read_relative_bias(stack)
            if self.shape.mlp_bias:  # zeros if the checkpoint stores no biases, see `with_ffn_biases`
                ffn = self.family.stack.ffn
                for linear in (*ffn.readers, ffn.down):
                    weight = tensors[f"{linear}.weight"]
                    tensors.setdefault(f"{linear}.bias", weight.new_zeros(len(weight)))
            return tensors

    def with_ffn_biases(self) -> "Model":
        """Return the same model with biases in its FFN, zeros if it has none.

        Raises `PlanError` if the family's config cannot state such biases.
        """
        reason = None if self.shape.mlp_bias else self.family.reason_against("ffn biases")
        if reason is not None:
            raise PlanError(reason)
        return replace(self, shape=replace(self.shape, mlp_bias=True))

    def without_values(self) -> "Model":
        """Return the same model whose tensors have a dtype and a shape only, on torch's meta device."""
        return replace(self, checkpoint=self.checkpoint.without_values())

    def read_embedding(self) -> torch.Tensor:
        """Return the token embedding `(vocabulary, D)`; of its own width if a linear leads from there to D."""
        return self.checkpoint.read_one(self.family.stack.embedding)

    def read_positions(self) -> torch.Tensor | None:
        """Return the position embedding's rows that tokens use, `(positions, D)`; None without one."""
        stack = self.family.stack
        if stack.positions is None:
            return None
        return self.checkpoint.read_one(stack.positions)[stack.position_offset :]

    def read_token_types(self) -> torch.Tensor | None:
        """Return the embedding of the first and the second text of a pair, `(types, D)`; None without one."""
        name = self.family.stack.token_types
        return None if name is None else self.checkpoint.read_one(name)

    def read_embedding_norm(self) -> Tensors:
        """Return the tensors of the norm that follows the embeddings; none without one."""
        norm = self.family.stack.embedding_norm
        return {} if norm is None else self.checkpoint.read_prefix(f"{norm.name}.")

    def read_norm_before(self, layer: int) -> Tensors:
        """Return the tensors of the norm after the layer before, or after the embeddings."""
        stack = self.family.stack
        if layer == 0:
            return self.read_embedding_norm()
        return self.checkpoint.read_prefix(f"{stack.layer_prefix(layer - 1)}{stack.ffn_sublayer.norm.name}.")

    def read_relative_bias(self, stack: Stack) -> torch.Tensor:
        """Return the table of relative positions `(buckets, heads)` of a stack, which its first layer stores."""
        return self.checkpoint.read_one(f"{stack.layer_prefix(stack.first_layer)}{stack.relative_bias}")

    def read_final_norm(self, stack: Stack | None = None) -> Tensors:
        """Return the final norm's own tensors; of the last stack if none is given."""
        norm = (stack or self.family.last_stack).final_norm
        return {} if norm is None else self.checkpoint.read_prefix(f"{norm.name}.")

    def read_head(self) -> torch.Tensor:
        """Return the output head, which may be the embedding and is as wide as it."""
        if self.shape.tied:
            return self.read_embedding()
        assert self.family.head is not None
        return self.checkpoint.read_one(self.family.head)

    def read_table(self, table: Table) -> torch.Tensor:
        """Return a table of the vocabulary, `(vocabulary, D)`."""
        return self.read_embedding() if table == "embedding" else self.read_head()

    def read_head_bias(self) -> torch.Tensor | None:
        """Return the bias of the output head; None without one."""
        if not self.shape.head_bias or self.family.head is None:
            return None
        return self.checkpoint.read_one(self.family.head.replace(".weight", ".bias"))


def identify(checkpoint: Checkpoint) -> Model:
    """Find the family and the sizes of an opened checkpoint; it reads headers, and no weights but those stored twice.

    Raises `CheckpointError` for a family that is not supported, quantised weights, tensors of other shapes, and copies
    that differ.
    """
    refuse_quantised(checkpoint.config, checkpoint.folder)
    checkpoint = as_stock(checkpoint)
    family = _known_family(checkpoint.config)
    if family.text_module is None:
        checkpoint = checkpoint.with_config(under_own_names(family, checkpoint.config))
        read_shape(family, checkpoint.config, checkpoint.shapes)  # no class is made of senseless sizes
        checkpoint = stating_class(checkpoint.stating(**as_opened(checkpoint.config)))
        family = _known_family(checkpoint.config)
    checkpoint = _without_other_layers(_under_class_names(checkpoint, family), family)
    config, names = checkpoint.config, checkpoint.tensor_names
    family = as_stored(family, config, names)
    expected = expected_outside(checkpoint, family)
    check_copies(checkpoint, family, expected.tied)
    complete = config | complete_config(config)  # what is not stated has the class's defaults
    stated_further = stated_of_further(text_of(family, complete))
    checkpoint = checkpoint.stating(**with_text(family, config, without_further(text_of(family, complete))))
    family = as_stored(find_family(complete), complete, names)
    left_out: tuple[str, ...] = ()
    if family.text_module is None and family.classes:
        checkpoint, left_out = _without_unused(checkpoint, family, expected)
    if family.stack.experts is not None:
        experts = family.stack.experts.as_in(checkpoint.tensor_names)
        family = replace(family, stack=family.stack.with_experts(experts))
    check_dtypes(checkpoint)
    if family.head in checkpoint.shapes:
        checkpoint = without_equal_head(checkpoint, family, is_tied=_ties_tables(checkpoint))
    checkpoint = without_zero_biases(checkpoint, family)
    shape = read_shape(family, text_of(family, complete), checkpoint.shapes)
    if checkpoint.stated is not None:
        shape = shape.with_layers(checkpoint.stated.layers)
    family = family.numbered(shape)
    check_carried(checkpoint, family, shape)
    check_biases(checkpoint, family, shape)
    check_layers(family, shape, checkpoint.shapes)
    check_outside(checkpoint, family, shape, expected)
    check_count(checkpoint, family, shape)
    return Model(checkpoint, family, shape, stated_further, left_out)


def _known_family(config: dict[str, Any]) -> Description:
    """Return the family of a config; an error for one that is not known names the nearest."""
    try:
        return find_family(config)
    except UnknownFamilyError as error:
        raise UnknownFamilyError(error.model_type, FAMILIES, nearest_family(config)) from error


def _under_class_names(checkpoint: Checkpoint, family: Description) -> Checkpoint:
    """Return the checkpoint whose tensors are called as in its stock class, and whose config states that class.

    A decoder's config may state the class with a head without having one, as configs of embedding models do, or the
    class without it beside a head. A head is absent only if no tensor is the head, and the embedding is not.

    Raises `CheckpointError` for a model of images and text without a language model.
    """
    config, named = checkpoint.config, named_by(checkpoint, family)
    if family.text_module is not None:
        if family.stack.embedding not in named.shapes:
            raise CheckpointError(
                f"The checkpoint of this {family.model_type} lacks the embedding of its language model, "
                f"{family.stack.embedding}; give a complete one."
            )
        return named
    if family.classes:
        return named
    embedding, head = family.stack.embedding, family.head
    if predicts_tokens(config):
        is_bare = embedding in named.shapes and named.stored(embedding) != embedding
        if is_bare and head not in named.shapes and not _ties_tables(checkpoint):
            return named_by(checkpoint.stating(architectures=[without_head(config)]), family)
    elif stated_class(config) == without_head(config):
        complete = named_by(checkpoint.stating(architectures=[with_head(config)]), family)
        return complete if head in complete.shapes else named
    return named


def _without_other_layers(checkpoint: Checkpoint, family: Description) -> Checkpoint:
    """Return a checkpoint without what its class does not read.

    Layers that predict tokens after the next one are beside it then. Of an encoder, or a model of images and text, only
    what begins with `unused_prefixes` is left out.
    """
    further = _further_prefixes(checkpoint, family)
    unused = family.unused_prefixes + (() if family.classes else further)
    ends = () if family.classes else family.unused
    read = {name: name for name in checkpoint.shapes if not name.startswith(unused) and not name.endswith(ends)}
    if len(read) == len(checkpoint.shapes):
        return checkpoint
    beside = {name: name for name in checkpoint.shapes if name not in read and name.startswith(further)}
    return checkpoint.renamed(read).keeping(checkpoint.renamed(beside)) if beside else checkpoint.renamed(read)


def _further_prefixes(checkpoint: Checkpoint, family: Description) -> tuple[str, ...]:
    """Return what the names of layers begin with that predict tokens after the next one.

    Those behind the model's own layers are as many as the config states, or else as have such a layer's linear.
    """
    names, own = family.further, text_of(family, checkpoint.config).get(family.sizes.num_hidden_layers)
    if names is not BEHIND or not isinstance(own, int):
        return (FURTHER_PREFIX,)
    behind = [names.of(family.stack.layers, own, index) for index in range(MOST_FURTHER_LAYERS)]
    stated = [checkpoint.config[key] for key in names.counts if isinstance(checkpoint.config.get(key), int)]
    if stated:
        behind = behind[: max(stated)]
    else:
        behind = [one for one in behind if f"{one.projection}.weight" in checkpoint.shapes]
    return FURTHER_PREFIX, *(one.block for one in behind)


def _ties_tables(checkpoint: Checkpoint) -> bool:
    """Return whether the config says that embedding and output head are one, or does not say it and its class does."""
    stated = checkpoint.config.get("tie_word_embeddings")
    if stated is None:
        config_class, _ = stock_classes(checkpoint.config)
        stated = getattr(config_class(), "tie_word_embeddings", False)
    return bool(stated)


def _without_unused(
    checkpoint: Checkpoint, family: Description, expected: Outside
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return the checkpoint without tensors that its class does not use, as transformers loads it.

    Checkpoints of BERT hold parts of other classes, buffers of integers, and norms under TensorFlow's names. The parts
    of other classes are also returned, by their stored names.
    """
    modern = {name.replace("LayerNorm.gamma", "LayerNorm.weight"): name for name in checkpoint.tensor_names}
    modern = {name.replace("LayerNorm.beta", "LayerNorm.bias"): stored for name, stored in modern.items()}
    used = expected.shapes.keys() - expected.shared(checkpoint, family)
    in_layers = {name for name in modern if family.is_in_layers(name)}
    read = used | {name for name in in_layers if not name.endswith(family.unused)}
    others = {modern[name] for name in modern.keys() - in_layers - expected.shapes.keys()}
    weights = {name for name in others if checkpoint.dtypes[name] in WEIGHT_DTYPES and not name.endswith("inv_freq")}
    left_out = sorted(map(checkpoint.stored, weights))
    return checkpoint.renamed({name: modern[name] for name in sorted(modern) if name in read}), tuple(left_out)
