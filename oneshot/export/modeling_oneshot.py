"""The per-layer form of a compressed model: a Llama whose every layer has sizes of its own.

This file is shipped with every per-layer checkpoint; `AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)`
runs it. It needs torch and transformers and nothing else. Beyond Llama it knows what its input families need:
biases, norms of queries and keys, learned positions, an FFN without a gate.
"""

import copy
import inspect
from typing import Any

from transformers.utils.versions import require_version

require_version("transformers>=5.5", "Update it: pip install -U transformers")  # older ones fail below without a reason

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)


@strict
class OneshotConfig(LlamaConfig):
    """A Llama config, and the sizes of every layer.

    `layers` has a dictionary for each layer with the fields of `LayerShape` in the package oneshot. `norm_width` is the
    hidden size that norms divide by, which is the dense model's. `head_dim` is the size of its queries and
    keys. `head_map`: the tied output head reads the last hidden state through a matrix. `num_positions`: rows of a
    learned position embedding, 0 for rotary positions. `embedding`: the rows and the rank of every range of the
    vocabulary, None for one table of full width. `own_head`: the output head is not these ranges. `output_head`: the
    ranges of such a head, None for one table.
    `centred_embedding`: embedded tokens lose their mean, as the family's LayerNorms would take it from them; it stays
    in the tied output head. `residual_dropout`: what a training step drops of the output of every sublayer.
    """

    model_type = "oneshot"

    layers: list[dict] | None = None
    norm_width: int = 4096
    head_map: bool = False
    head_bias: bool = False
    num_positions: int = 0
    embedding: list[dict] | None = None
    own_head: bool = False
    output_head: list[dict] | None = None
    centred_embedding: bool = False
    residual_dropout: float | int = 0.0

    def validate_architecture(self) -> None:
        """Heads need not divide the hidden size here."""

    def validate_rope(self) -> None:
        """Rotary positions are the same in all layers."""
        LlamaConfig.validate_rope(of_equal_layers(self))


stated_layers: Any = getattr(getattr(LlamaConfig, "per_layer_config", None), "fget", None)


def of_equal_layers(config: OneshotConfig) -> OneshotConfig:
    """Return a config for rotary positions: some types read a number of heads in vain, and layers may have others."""
    if stated_layers is None:
        return config
    equal = copy.copy(config)
    equal.per_layer_config = None
    return equal


def cache_slot(attends: list[bool], layer_idx: int) -> int:
    """Return the place of a layer in caches: its number. The first place has their length.

    So the first layer with attention has it, where the layers before have none.
    """
    return 0 if layer_idx == attends.index(True) else layer_idx


def cached_layers(config: OneshotConfig) -> Any:
    """Return the config of every layer, which static caches ask for the heads and the head size of their places."""
    stated = stated_layers(config)
    if not config.layers or all(sizes == config.layers[0] for sizes in config.layers):
        return stated
    layers = [stated[number] for number in range(len(config.layers))]
    attends = [sizes["num_attention_heads"] > 0 for sizes in config.layers]
    for number, sizes in enumerate(config.layers):
        if attends[number]:
            place = cache_slot(attends, number)
            own = layers[place] = copy.copy(layers[place])
            own.num_key_value_heads, own.head_dim = sizes["num_key_value_heads"], sizes["query_key_size"]
            if sizes["query_key_size"] != sizes["value_size"]:
                own.qk_head_dim = sizes["query_key_size"]  # so a cache is filled when keys and values come
    return layers


if stated_layers is not None:  # transformers 5.14 and later
    OneshotConfig.per_layer_config = property(cached_layers, LlamaConfig.per_layer_config.fset)  # type: ignore


def refuse_pages(are_equal: bool) -> None:
    """Raise `ValueError` unless all layers have the heads and head sizes of the config."""
    if not are_equal:
        raise ValueError(
            "Continuous batching of transformers has the same heads and head sizes in all layers, but layers of this "
            "model have others; use generate()."
        )


class OneshotRMSNorm(LlamaRMSNorm):
    """The same norm by torch's own operator: one kernel instead of six, and one rounding."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class OneshotCoordinates(nn.Module):
    """`rank` numbers that stand for `width` coordinates which a matrix of low rank reads or makes.

    `columns` lists the coordinates: first `rank` of them, then the others, which are linear in the first ones by
    `weight (others, rank)`. So `W x = W' (x[first] + x[others] weight)`, with the first columns `W'` of W.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.sizes = rank, width - rank
        self.weight = nn.Parameter(torch.empty(width - rank, rank))
        self.columns: torch.Tensor
        self.register_buffer("columns", torch.arange(width))

    def forward(self, x: torch.Tensor, *, expand: bool = False) -> torch.Tensor:
        """States `(…, width)` -> `(…, rank)`, which stand for them; `expand`: rows `(…, rank)` -> `(…, width)`."""
        if expand:
            every = torch.cat((x, nn.functional.linear(x, self.weight)), dim=-1)
            return torch.empty_like(every).scatter(-1, self.columns.expand(every.shape), every)
        states = x.flatten(0, -2)  # a CPU reads columns of a matrix faster than columns of a batch
        if x.dtype == torch.float32:
            chosen = states.index_select(1, self.columns)  # twice as fast as gathering, but slower in other dtypes
        else:
            chosen = states.gather(1, self.columns.expand(states.shape))
        first, others = chosen.split_with_sizes(self.sizes, 1)
        return torch.addmm(first, others, self.weight).view(*x.shape[:-1], -1)


def count_(places: torch.Tensor) -> None:
    """Fill rows with 0, 1, 2 and so on, unless a file held them."""
    init.copy_(places, torch.arange(places.shape[-1], device=places.device).expand_as(places))


def coordinates_of(width: int, rank: int) -> nn.Module:
    """Return what a linear of this rank reads through; nothing for rank 0, a whole linear."""
    return OneshotCoordinates(width, rank) if rank else nn.Identity()


def cache_name(arguments: dict[str, Any]) -> str | None:
    """Return what a call names its cache, None without one; transformers has changed the name once.

    The cache of continuous batching is not of transformers' class of caches, and is found by its name alone.
    """
    names = ("cache", "past_key_values")
    return next(
        (name for name, one in arguments.items() if isinstance(one, Cache) or (name in names and one is not None)),
        None,
    )


def refuse_other_place(cache: Any, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise `ValueError` if a static cache was filled early for keys and values of other sizes."""
    layers = getattr(cache, "layers", ())
    place: Any = layers[slot] if slot < len(layers) else None
    if not hasattr(place, "max_cache_len") or not place.is_initialized:
        return
    for held, own, name in ((place.keys, keys, "keys"), (place.values, values, "values")):
        if (held.shape[1], held.shape[3]) != (own.shape[1], own.shape[3]):
            raise ValueError(
                f"A static cache was filled early with {held.shape[1]} heads of {held.shape[3]} numbers, but the "
                f"{name} of a layer have {own.shape[1]} heads of {own.shape[3]}; use a dynamic cache, or compress "
                "without --set value_size, query_key_size and inner_sizes."
            )


class OneshotAttention(nn.Module):
    """Grouped-query attention with sizes of its own, and rotary pairs chosen by each KV group where they are fewer."""

    def __init__(self, config: OneshotConfig, sizes: dict[str, Any], layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.query_key_size, self.value_size = sizes["query_key_size"], sizes["value_size"]
        heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        self.num_key_value_groups = heads // groups  # transformers' name for query heads in a group
        assert config.head_dim is not None
        self.scaling = config.head_dim**-0.5
        self.rotary = config.num_positions == 0
        width, bias = sizes["hidden_size"], sizes["attention_bias"]
        rank, queries, keys = sizes["query_key_rank"], heads * self.query_key_size, groups * self.query_key_size
        self.qk_read = coordinates_of(width, rank)
        self.q_proj = nn.Linear(rank or width, queries, bias=bias)
        self.k_proj = nn.Linear(rank or width, keys, bias=bias)
        self.v_proj = nn.Linear(width, groups * self.value_size, bias=bias)
        rank, read = sizes["output_rank"], heads * self.value_size
        self.o_read = coordinates_of(read, rank)
        self.o_proj = nn.Linear(rank or read, sizes["middle_size"], bias=sizes["output_bias"])
        norms = sizes["query_key_norms"]
        self.q_norm = OneshotRMSNorm(self.query_key_size, eps=config.rms_norm_eps) if norms else nn.Identity()
        self.k_norm = OneshotRMSNorm(self.query_key_size, eps=config.rms_norm_eps) if norms else nn.Identity()
        self.rotary_selected = sizes["rotary_selected"]
        if self.rotary_selected:
            self.rotary_pairs: torch.Tensor
            self.register_buffer("rotary_pairs", torch.zeros(groups, self.query_key_size // 2, dtype=torch.int64))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = hidden_states.shape[:-1]
        read = self.qk_read(hidden_states)
        queries = self.q_norm(self.q_proj(read).view(*shape, -1, self.query_key_size)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(read).view(*shape, -1, self.query_key_size)).transpose(1, 2)
        values = self.v_proj(hidden_states).view(*shape, -1, self.value_size).transpose(1, 2)
        if self.rotary:
            cos, sin = (self.of_group(table) for table in position_embeddings)
            queries, keys = self.rotate(queries, cos, sin), self.rotate(keys, cos, sin)
        name = cache_name(kwargs)
        if name is not None:
            cache = kwargs.pop(name)
            refuse_other_place(cache, self.layer_idx, keys, values)
            keys, values = cache.update(keys, values, self.layer_idx, kwargs=kwargs)  # caches of pages change them
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(self.o_read(output.reshape(*shape, -1).contiguous())), weights

    def of_group(self, table: torch.Tensor) -> torch.Tensor:
        """Cosines or sines `(batch, length, head_dim)` -> the ones of each KV group's pairs `(batch, G, length, k)`."""
        if not self.rotary_selected:
            return table.unsqueeze(1)
        chosen = table[..., self.rotary_pairs]
        return torch.cat((chosen, chosen), dim=-1).transpose(1, 2)

    def rotate(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary positions for `(batch, heads, length, k)`."""
        if cos.shape[1] > 1:
            repeats = states.shape[1] // cos.shape[1]
            cos, sin = cos.repeat_interleave(repeats, dim=1), sin.repeat_interleave(repeats, dim=1)
        return states * cos + rotate_half(states) * sin


class OneshotMLP(nn.Module):
    """The FFN, with or without a gate."""

    def __init__(self, config: OneshotConfig, sizes: dict[str, Any]) -> None:
        super().__init__()
        width, middle, bias = sizes["intermediate_size"], sizes["middle_size"], sizes["mlp_bias"]
        gate_rank, up_rank = sizes["gate_rank"], sizes["up_rank"]
        self.gate_read = coordinates_of(middle, gate_rank)
        self.gate_proj = nn.Linear(gate_rank or middle, width, bias=bias) if sizes["gated"] else None
        self.up_read = coordinates_of(middle, up_rank)
        self.up_proj = nn.Linear(up_rank or middle, width, bias=bias)
        self.down_proj = nn.Linear(width, sizes["output_size"], bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(self.up_read(x))))
        return self.down_proj(self.act_fn(self.gate_proj(self.gate_read(x))) * self.up_proj(self.up_read(x)))


class OneshotDecoderLayer(GradientCheckpointingLayer):
    """`W x + attn(norm(x))`, then `V h + ffn(norm(h))`; W and V only where the stream enters another subspace.

    Attention without heads and an FFN without neurons are absent, also their norms.
    """

    def __init__(self, config: OneshotConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.layers is not None
        sizes = config.layers[layer_idx]
        hidden, middle, output = sizes["hidden_size"], sizes["middle_size"], sizes["output_size"]
        self.hidden_size = hidden
        self.self_attn, self.input_layernorm = None, None
        if sizes["num_attention_heads"]:
            in_cache = cache_slot([other["num_attention_heads"] > 0 for other in config.layers], layer_idx)
            self.self_attn = OneshotAttention(config, sizes, in_cache)
            self.input_layernorm = norm_of(config, hidden)
        self.mlp, self.post_attention_layernorm = None, None
        if sizes["intermediate_size"]:
            self.mlp = OneshotMLP(config, sizes)
            self.post_attention_layernorm = norm_of(config, middle)
        self.attention_shortcut = (
            nn.Linear(hidden, middle, bias=False) if sizes["attention_shortcut"] else nn.Identity()
        )
        self.ffn_shortcut = nn.Linear(middle, output, bias=False) if sizes["ffn_shortcut"] else nn.Identity()
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        carried = self.attention_shortcut(hidden_states)
        if self.self_attn is not None and self.input_layernorm is not None:
            carried = carried + self.dropout(self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0])
        output = self.ffn_shortcut(carried)
        if self.mlp is not None and self.post_attention_layernorm is not None:
            output = output + self.dropout(self.mlp(self.post_attention_layernorm(carried)))
        return output


def norm_of(config: OneshotConfig, width: int) -> LlamaRMSNorm:
    """Return an RMSNorm whose epsilon suits a mean over `width` instead of `norm_width` squares."""
    return OneshotRMSNorm(width, eps=config.rms_norm_eps * config.norm_width / width)


# the linears of every kind of rank in a layer: the sublayer, what they read through, and their names
RANKED = {
    "query_key_rank": ("self_attn", "qk_read", ("q_proj", "k_proj")),
    "output_rank": ("self_attn", "o_read", ("o_proj",)),
    "gate_rank": ("mlp", "gate_read", ("gate_proj",)),
    "up_rank": ("mlp", "up_read", ("up_proj",)),
}


def is_plain(module: nn.Module) -> bool:
    """Return whether a linear or a table is torch's own, with numbers as its weight; quantisers and adapters change it.

    compressed-tensors keeps torch's linear. Its scheme still rounds what the linear reads, also after the first pass.
    """
    weight = getattr(module, "weight", None)
    if type(module) not in (nn.Linear, OneshotTable) or type(weight) is not nn.Parameter:
        return False
    is_number = weight.is_floating_point() and weight.element_size() > 1
    return is_number and not hasattr(module, "quantization_scheme")


def refuse_other_linear(name: str, coordinates: OneshotCoordinates, linear: nn.Module) -> None:
    """Raise `ValueError` if a linear of low rank cannot be made whole."""
    if not is_plain(linear):
        raise ValueError(
            f"{name} is quantised or has an adapter, so it cannot be expanded; open a result that was made without "
            "--quantise, and call expand_() before a quantiser or an adapter changes the model."
        )
    if any(weight.is_meta for weight in (coordinates.weight, *linear.parameters(recurse=False))):
        raise ValueError("Weights that are off-loaded cannot be expanded; open the model without off-loading.")


@torch.no_grad()
def whole_linear(coordinates: OneshotCoordinates, linear: nn.Linear) -> nn.Linear:
    """Return the whole linear that a linear of low rank stands for."""
    weight = coordinates(linear.weight, expand=True)
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    whole.weight, whole.bias = nn.Parameter(weight, linear.weight.requires_grad), linear.bias
    return whole


class OneshotTable(nn.Embedding):
    """Rows of the vocabulary, which the tied output head also reads."""

    def forward(self, x: torch.Tensor, *, to_logits: bool = False) -> torch.Tensor:
        """Tokens -> their rows; `to_logits`: states `(…, rank)` -> the logits of all rows."""
        # named, because tools that trace compile `forward` anew, outside its class, where super() finds none
        return nn.functional.linear(x, self.weight) if to_logits else nn.Embedding.forward(self, x)


class OneshotEmbedding(nn.Module):
    """Ranges of the vocabulary, each a table of its own rank, with a map to the full width where that is more.

    `places` says where in all tables each token is. Tables and maps are only read by calling them, because off-loading
    moves the weights of a module at its call.
    """

    def __init__(self, ranges: list[dict[str, int]], width: int) -> None:
        super().__init__()
        ranks = [part["rank"] for part in ranges]
        self.rows = [part["rows"] for part in ranges]
        self.tables: Any = nn.ModuleList(
            [OneshotTable(rows, rank) for rows, rank in zip(self.rows, ranks, strict=True)]
        )
        self.maps: Any = nn.ModuleList([coordinates_of(width, rank if rank < width else 0) for rank in ranks])
        self.places: torch.Tensor
        self.register_buffer("places", torch.arange(sum(self.rows)))

    def forward(self, x: torch.Tensor, *, to_logits: bool = False) -> torch.Tensor:
        """Tokens -> their embeddings `(…, width)`; `to_logits`: states `(…, width)` -> the tied head's logits."""
        if to_logits:
            return self._logits(x)
        start, places = 0, self.places[x]
        embedded: Any = None
        for rows, table, to_width in zip(self.rows, self.tables, self.maps, strict=True):
            number = places - start
            found = table(number.clamp(0, rows - 1))
            if isinstance(to_width, OneshotCoordinates):
                found = to_width(found, expand=True)
            # a later range takes its tokens from the earlier ones
            embedded = found if embedded is None else torch.where((number >= 0).unsqueeze(-1), found, embedded)
            start += rows
        return embedded

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        read = (
            table(coordinates(states), to_logits=True)
            for table, coordinates in zip(self.tables, self.maps, strict=True)
        )
        return torch.cat(tuple(read), dim=-1).index_select(-1, self.places)

    def grow_(self, more: int) -> None:
        """Append rows to the last range; they are the mean of its rows."""
        old = self.tables[-1]
        table = OneshotTable(
            len(old.weight) + more, old.embedding_dim, device=old.weight.device, dtype=old.weight.dtype
        )
        mean = old.weight.data.mean(0, keepdim=True)
        table.weight.data = torch.cat((old.weight.data, mean.expand(more, -1)))
        table.requires_grad_(old.weight.requires_grad)
        self.tables[-1] = table
        self.rows[-1] += more
        self.places = torch.cat((self.places, torch.arange(more).to(self.places) + len(self.places)))


class OneshotHead(OneshotEmbedding):
    """An output head of ranges of the vocabulary, beside another embedding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """States `(…, width)` -> the logits of all tokens."""
        return self._logits(x)


class OneshotTiedHead(nn.Module):
    """The output head of a model whose embedding is a `OneshotEmbedding`; without weights of its own."""

    def __init__(self, model: "OneshotModel") -> None:
        super().__init__()
        self._model = (model,)  # in a tuple: not a submodule, or its weights would be stored twice

    def __deepcopy__(self, memo: dict[int, Any]) -> "OneshotTiedHead":
        """Return a head of the model's copy if that was made before, else of the same model."""
        return OneshotTiedHead(memo.get(id(self._model[0]), self._model[0]))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # looked up at every call, because a training library may put a copy in the embedding's place
        return self._model[0].embed_tokens(hidden_states, to_logits=True)


STACK_ARGUMENTS = tuple(inspect.signature(LlamaModel.forward).parameters)[1:]  # without `self`


def embedded_inputs(model: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Return the arguments of the stack with embedded tokens, which have learned positions or lost their mean."""
    arguments = dict(zip(STACK_ARGUMENTS, positional, strict=False)) | named
    tokens, embeds = arguments.pop("input_ids", None), arguments.pop("inputs_embeds", None)
    if embeds is None:
        embeds = model.embed_tokens(tokens)
    if model.embed_positions is not None:
        numbers = arguments.get("position_ids")
        if numbers is None:
            cache, mask = cache_name(arguments), arguments.get("attention_mask")
            past = 0 if cache is None else arguments[cache].get_seq_length()
            if isinstance(mask, torch.Tensor) and mask.dim() == 2:  # padding has no places, as in OPT's own class
                numbers = (mask.long().cumsum(1) - 1).clamp_min(0)[:, past : past + embeds.shape[1]]
            else:
                numbers = past + torch.arange(embeds.shape[1], device=embeds.device).unsqueeze(0)
        embeds = embeds + model.embed_positions(numbers)
    if model.config.centred_embedding:
        embeds = embeds - embeds.float().mean(-1, keepdim=True).to(embeds.dtype)
    return (), arguments | {"inputs_embeds": embeds}


def mapped_output(model: Any, _: tuple[Any, ...], output: Any) -> Any:
    """Return the output of the stack with the last states as the tied output head reads them."""
    if isinstance(output, tuple):  # return_dict=False, as vLLM calls it
        return model.head_map(output[0]), *output[1:]
    output.last_hidden_state = model.head_map(output.last_hidden_state)
    return output


class OneshotResult:
    """Give results a vocabulary that grows, also where the config lists `ranges`, values, and an order of weights."""

    ranges = "embedding", "output_head"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Also give first values to the modules of this file; transformers' functions leave what a file holds."""
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, OneshotCoordinates):
            config: Any = self.config  # type: ignore[attr-defined]
            init.normal_(module.weight, std=getattr(config, "initializer_range", None) or 0.02)  # as in transformers
            count_(module.columns)
        elif isinstance(module, OneshotEmbedding):
            count_(module.places)
        elif isinstance(module, OneshotAttention) and module.rotary_selected:
            count_(module.rotary_pairs)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """Give the vocabulary another size; ranges of the vocabulary only grow, at the end of the last one."""
        model: Any = self
        listed = {name: getattr(model.config, name) for name in self.ranges if getattr(model.config, name) is not None}
        if not listed:
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)  # type: ignore
        size, step = model.config.vocab_size, pad_to_multiple_of or 1
        more = -(-(size if new_num_tokens is None else new_num_tokens) // step) * step - size
        if more < 0:
            raise ValueError(
                f"The model has ranges of the vocabulary, which only grow: give at least {size} "
                "tokens, or compress with --set embedding=none."
            )
        if more:
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
            if isinstance(embedding, OneshotEmbedding):
                embedding.grow_(more)
            else:
                model.set_input_embeddings(model._get_resized_embeddings(embedding, size + more, None, mean_resizing))
            if isinstance(head, OneshotHead):
                head.grow_(more)
            elif isinstance(head, nn.Linear):
                model.set_output_embeddings(model._get_resized_lm_head(head, size + more, mean_resizing=mean_resizing))
            for name, (*before, last) in listed.items():
                setattr(model.config, name, [*before, last | {"rows": last["rows"] + more}])
            model.config.vocab_size = model.vocab_size = model.base_model.vocab_size = size + more
        return model.get_input_embeddings()

    @torch.no_grad()
    def lay_out_(self) -> None:
        """Store linears with more outputs than inputs by columns: a CPU then decodes a token faster in float32.

        Answers, names, shapes, memory, saved copies and quantised linears stay. Libraries that shard parameters refuse
        this order.
        """
        model: Any = self
        tied = getattr(model.get_input_embeddings(), "weight", None)  # a head that is this table is saved by rows alone
        for module in model.modules():
            weight: Any = getattr(module, "weight", None)
            if weight is tied or not is_plain(module):
                continue
            if weight.is_meta:
                raise ValueError("Weights that are off-loaded have no order; open the model without off-loading.")
            if len(weight) > weight.shape[1]:
                weight.data = weight.data.t().contiguous().t()


class OneshotModel(OneshotResult, LlamaModel):
    """The stack without its output head."""

    config_class = OneshotConfig
    _no_split_modules = ["OneshotDecoderLayer", "OneshotEmbedding"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": OneshotDecoderLayer, "attentions": OneshotAttention}  # noqa: RUF012

    def __init__(self, config: OneshotConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        assert config.layers is not None
        first, last = config.layers[0]["hidden_size"], config.layers[-1]["output_size"]
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens: Any
        if config.embedding is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, first, self.padding_idx)
        else:
            self.embed_tokens = OneshotEmbedding(config.embedding, first)
        self.embed_positions = nn.Embedding(config.num_positions, first) if config.num_positions else None
        self.layers = nn.ModuleList([OneshotDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = norm_of(config, last)
        self.head_map = nn.Linear(last, first, bias=False) if config.head_map else nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(of_equal_layers(config))
        self.gradient_checkpointing = False
        # hooks around the stock class's `forward`: llm-compressor traces that, and nothing that an own one would call
        if config.num_positions or config.centred_embedding:
            self.register_forward_pre_hook(embedded_inputs, with_kwargs=True)
        if config.head_map:
            self.register_forward_hook(mapped_output)
        self.post_init()


class OneshotForCausalLM(OneshotResult, LlamaForCausalLM):
    """The model with its output head."""

    config_class = OneshotConfig
    _no_split_modules = ["OneshotDecoderLayer", "OneshotEmbedding", "OneshotHead"]  # noqa: RUF012

    def __init__(self, config: OneshotConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        if config.embedding is not None:  # some quantisers state it, because neither end has a weight of its own
            config.tie_word_embeddings = False
        self.model = OneshotModel(config)
        self.vocab_size = config.vocab_size
        assert config.layers is not None
        width = config.layers[0 if config.head_map else -1]["hidden_size" if config.head_map else "output_size"]
        self.lm_head: nn.Module
        if config.output_head is not None:
            self.lm_head = OneshotHead(config.output_head, width)
        elif config.embedding is None or config.own_head:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=config.head_bias)
        else:
            self.lm_head = OneshotTiedHead(self.model)
        self.post_init()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Return transformers' manager of continuous batching. Raises `ValueError` if layers differ in their caches."""
        assert self.config.layers is not None
        size, first = self.config.head_dim, self.config.layers[0]
        own = first | {"query_key_size": size, "value_size": size}
        names = ("num_attention_heads", "num_key_value_heads", "query_key_size", "value_size")
        refuse_pages(all(sizes[name] == own[name] for sizes in self.config.layers for name in names))
        return super().init_continuous_batching(*args, **kwargs)

    def smoothing_pairs(self) -> list[tuple[str, list[str]]]:
        """Return what AWQ and SmoothQuant may scale here: a norm or linear, and the linears that alone read its output.

        Linears of low rank read coordinates of an output, whose factors are others.
        """
        pairs = []
        for number, sizes in enumerate(self.config.layers or ()):
            layer = f"model.layers.{number}"
            norm, mlp_norm = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
            q, k, v, o = (f"{layer}.self_attn.{name}_proj" for name in "qkvo")
            gate, up, down = (f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down"))
            heads = sizes["num_attention_heads"]
            if heads and not sizes["query_key_rank"]:
                pairs.append((norm, [q, k, v]))
            if heads and heads == sizes["num_key_value_heads"] and not sizes["output_rank"]:
                pairs.append((v, [o]))
            if sizes["intermediate_size"] and not sizes["gate_rank"] and not sizes["up_rank"]:
                pairs.append((mlp_norm, [gate, up] if sizes["gated"] else [up]))
            if sizes["intermediate_size"] and sizes["gated"]:  # an activation between them is not linear
                pairs.append((up, [down]))
        return pairs

    def expand_(self, above: float = 0.9) -> None:
        """Make linears whole whose low rank takes more than this share of a whole linear's products.

        They are then as fast as in the dense model, and take its memory, also in a saved copy. 0 expands all linears.
        Raises `ValueError` before any change if one of them is quantised, has an adapter or is off-loaded.
        """
        assert self.config.layers is not None
        found = []
        for number, sizes in enumerate(self.config.layers):
            for kind, (part, read, names) in RANKED.items():
                if not sizes[kind]:
                    continue
                place, rank = f"model.layers.{number}.{part}", sizes[kind]
                sublayer: Any = self.get_submodule(place)
                coordinates, linears = getattr(sublayer, read), [getattr(sublayer, name) for name in names]
                rows, width = sum(linear.out_features for linear in linears), sum(coordinates.sizes)
                if rank * (rows + width - rank) > above * rows * width:
                    for name, linear in zip(names, linears, strict=True):
                        refuse_other_linear(f"{place}.{name}", coordinates, linear)
                    found.append((number, kind, sublayer))
        self.config.layers = [dict(sizes) for sizes in self.config.layers]
        for number, kind, sublayer in found:
            _, read, names = RANKED[kind]
            for name in names:
                setattr(sublayer, name, whole_linear(getattr(sublayer, read), getattr(sublayer, name)))
            setattr(sublayer, read, nn.Identity())
            self.config.layers[number][kind] = 0
