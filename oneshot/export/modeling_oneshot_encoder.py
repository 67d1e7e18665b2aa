"""The per-layer form of a compressed encoder: a BERT or a DistilBERT whose every layer has sizes of its own.

This file is shipped with every such checkpoint; `AutoModel.from_pretrained(…, trust_remote_code=True)` runs it, and so
do the auto classes of the heads. It needs torch and transformers and nothing else. Tensors have BERT's names; only the
heads of a DistilBERT keep their own.
"""

from typing import Any

from transformers.utils.versions import require_version

require_version("transformers>=5.5", "Update it: pip install -U transformers")  # older ones fail below without a reason

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertForQuestionAnswering, BertForTokenClassification
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, MaskedLMOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import (
    BertOnlyMLMHead,
    BertPooler,
    BertPreTrainedModel,
    eager_attention_forward,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs


@strict
class OneshotEncoderConfig(BertConfig):
    """A BERT config, and the sizes of every layer.

    `hidden_size`, `num_attention_heads` and `intermediate_size` are the dense model's. `layers` has a dictionary for
    each layer with the fields of `LayerShape` in the package oneshot. `head_dim` is the size of the dense model's
    heads, which scales scores. `dense_type`: whose heads follow the encoder, "bert" or "distilbert". `has_pooler`: the
    plain model ends with BERT's pooler. `type_vocab_size` is 0 without token types. `head`: "tied" or "mapped" for a
    decoder that is the embedding, else "none". `further_parameters`: of what lies outside the layers and embeddings.

    `subspaces`: states are coordinates within a subspace of their own at every norm (SP3 equations 5 to 8). The norms
    have no weights and divide by the dense model's width. A shortcut is then in every sublayer.
    """

    model_type = "oneshot-encoder"

    layers: list[dict] | None = None
    head_dim: int = 64
    dense_type: str = "bert"
    has_pooler: bool = True
    head: str = "none"
    further_parameters: int = 0
    subspaces: bool = False


class OneshotSubspaceNorm(nn.Module):
    """`n ÷ √(‖n‖²/D + ε)`: a LayerNorm over D coordinates as it is in the coordinates `n` of a subspace."""

    def __init__(self, dense_width: int, eps: float) -> None:
        super().__init__()
        self.dense_width, self.eps = dense_width, eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        states = hidden_states.float()
        mean_square = states.square().sum(-1, keepdim=True) / self.dense_width
        return (states * torch.rsqrt(mean_square + self.eps)).to(hidden_states.dtype)


class OneshotConstant(nn.Module):
    """The bias that is left of a linear whose inputs are all removed."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.bias.expand(*hidden_states.shape[:-1], -1)


def norm_of(config: OneshotEncoderConfig, width: int) -> nn.Module:
    """Return the norm at a position of this width."""
    if config.subspaces:
        return OneshotSubspaceNorm(config.hidden_size, config.layer_norm_eps)
    return nn.LayerNorm(width, eps=config.layer_norm_eps)


class OneshotEncoderEmbeddings(nn.Module):
    """The sum of the embeddings of tokens, token types and positions, and its norm."""

    def __init__(self, config: OneshotEncoderConfig, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        types = config.type_vocab_size
        self.token_type_embeddings = nn.Embedding(types, width) if types else None
        self.LayerNorm = norm_of(config, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        total = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = total.shape[:2]
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(batch, length, dtype=torch.long, device=total.device)
            total = total + self.token_type_embeddings(token_type_ids)
        if position_ids is None:
            position_ids = torch.arange(length, device=total.device).unsqueeze(0)
        return self.dropout(self.LayerNorm(total + self.position_embeddings(position_ids)))


class OneshotSelfAttention(nn.Module):
    """Attention over all tokens, with heads, query and key size and value size of its own."""

    def __init__(self, config: OneshotEncoderConfig, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.is_causal = config, False
        self.query_key_size, self.value_size = sizes["query_key_size"], sizes["value_size"]
        self.scaling = config.head_dim**-0.5
        width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        self.query = nn.Linear(width, heads * self.query_key_size)
        self.key = nn.Linear(width, heads * self.query_key_size)
        self.value = nn.Linear(width, heads * self.value_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = hidden_states.shape[:-1]
        queries = self.query(hidden_states).view(*shape, -1, self.query_key_size).transpose(1, 2)
        keys = self.key(hidden_states).view(*shape, -1, self.query_key_size).transpose(1, 2)
        values = self.value(hidden_states).view(*shape, -1, self.value_size).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout.p if self.training else 0.0
        output, weights = attend(
            self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return output.reshape(*shape, -1).contiguous(), weights


class OneshotEncoderOutput(nn.Module):
    """`norm(residual + dense(x))`; without columns of `dense` only its bias is added."""

    def __init__(self, config: OneshotEncoderConfig, columns: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dense: nn.Module = nn.Linear(columns, width) if columns else OneshotConstant(width)
        self.LayerNorm = norm_of(config, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + residual)


class OneshotEncoderAttention(nn.Module):
    """Attention and its output; without heads or values nothing attends."""

    def __init__(self, config: OneshotEncoderConfig, sizes: dict[str, Any]) -> None:
        super().__init__()
        columns = sizes["num_attention_heads"] * sizes["value_size"]
        self.self = OneshotSelfAttention(config, sizes) if columns else None
        dropout = config.hidden_dropout_prob if config.dense_type == "bert" else 0.0  # DistilBERT has none here
        self.output = OneshotEncoderOutput(config, columns, sizes["middle_size"], dropout)

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        attended = hidden_states
        if self.self is not None:
            attended, _ = self.self(hidden_states, attention_mask, **kwargs)
        return self.output(attended, residual)


class OneshotIntermediate(nn.Module):
    """The first half of an FFN."""

    def __init__(self, config: OneshotEncoderConfig, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.dense = nn.Linear(sizes["middle_size"], sizes["intermediate_size"])
        self.intermediate_act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class OneshotEncoderLayer(GradientCheckpointingLayer):
    """`x = norm(W x + attention(x))`, then `norm(V x + ffn(x))`; W and V only where the states change coordinates."""

    def __init__(self, config: OneshotEncoderConfig, sizes: dict[str, Any]) -> None:
        super().__init__()
        hidden, middle, output = sizes["hidden_size"], sizes["middle_size"], sizes["output_size"]
        width = sizes["intermediate_size"]
        self.attention = OneshotEncoderAttention(config, sizes)
        self.intermediate = OneshotIntermediate(config, sizes) if width else nn.Identity()
        self.output = OneshotEncoderOutput(config, width, output, config.hidden_dropout_prob)
        self.attention_shortcut = (
            nn.Linear(hidden, middle, bias=False) if sizes["attention_shortcut"] else nn.Identity()
        )
        self.ffn_shortcut = nn.Linear(middle, output, bias=False) if sizes["ffn_shortcut"] else nn.Identity()

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        residual = self.attention_shortcut(hidden_states)
        hidden_states = self.attention(hidden_states, residual, attention_mask, **kwargs)
        return self.output(self.intermediate(hidden_states), self.ffn_shortcut(hidden_states))


class OneshotEncoderStack(nn.Module):
    """The layers, one after the other."""

    def __init__(self, config: OneshotEncoderConfig, layers: list[dict[str, Any]]) -> None:
        super().__init__()
        self.layer = nn.ModuleList([OneshotEncoderLayer(config, sizes) for sizes in layers])

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        return hidden_states


class OneshotEncoderPreTrainedModel(BertPreTrainedModel):
    """The base of all classes of this file."""

    config_class = OneshotEncoderConfig
    bert: Any
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["OneshotEncoderEmbeddings", "OneshotEncoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": OneshotEncoderLayer, "attentions": OneshotSelfAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Also give first values to what is not BERT's; transformers' functions leave what a file holds."""
        super()._init_weights(module)
        if isinstance(module, OneshotConstant):
            init.zeros_(module.bias)
        elif isinstance(module, OneshotEncoderForMaskedLM) and module.mapped:
            init.zeros_(module.row_means)


class OneshotEncoderModel(OneshotEncoderPreTrainedModel):
    """The encoder without a head.

    Its last hidden states have the dense model's width: if a layer has a shortcut, the states have coordinates of their
    own after it, and `output_map` leads back. Only then have the other entries of `hidden_states` their own widths.
    """

    def __init__(self, config: OneshotEncoderConfig, add_pooling_layer: bool | None = None) -> None:
        super().__init__(config)
        assert config.layers is not None
        self.embeddings = OneshotEncoderEmbeddings(config, config.layers[0]["hidden_size"])
        self.encoder = OneshotEncoderStack(config, config.layers)
        leads_back = any(sizes["attention_shortcut"] or sizes["ffn_shortcut"] for sizes in config.layers)
        last = config.layers[-1]["output_size"]
        self.output_map = nn.Linear(last, config.hidden_size) if leads_back else nn.Identity()
        pools = config.has_pooler if add_pooling_layer is None else add_pooling_layer
        self.pooler = BertPooler(config) if pools else None
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling | tuple:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Either input_ids or inputs_embeds must be given, and not both.")
        states = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=states, attention_mask=attention_mask)
        states = self.output_map(self.encoder(states, mask, **kwargs))
        pooled = None if self.pooler is None else self.pooler(states)
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)


class OneshotEncoderForMaskedLM(OneshotEncoderPreTrainedModel, BertForMaskedLM):
    """The encoder with a head that predicts tokens.

    A decoder that is tied to an embedding in a subspace, `E = stored U₀ᵀ + row_means 1ᵀ`, reads `U₀ᵀ h`.
    """

    def __init__(self, config: OneshotEncoderConfig) -> None:
        BertPreTrainedModel.__init__(self, config)
        assert config.layers is not None
        self.bert = OneshotEncoderModel(config, add_pooling_layer=False)
        width, first = config.hidden_size, config.layers[0]["hidden_size"]
        self.mapped = config.head == "mapped"
        if self.mapped:
            self.head_map = nn.Linear(width, first, bias=False)
            self.row_means = nn.Parameter(torch.zeros(config.vocab_size))
        decoder = nn.Linear(first if self.mapped else width, config.vocab_size)
        embedding = "bert.embeddings.word_embeddings.weight"
        if config.dense_type == "distilbert":
            self.activation = ACT2FN[config.hidden_act]
            self.vocab_transform = nn.Linear(width, width)
            self.vocab_layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
            self.vocab_projector = decoder
            self._tied_weights_keys = {"vocab_projector.weight": embedding}
        else:
            self.cls = BertOnlyMLMHead(config)
            self.cls.predictions.decoder = decoder
            self._tied_weights_keys = {
                "cls.predictions.decoder.weight": embedding,
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            }
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.vocab_projector if self.config.dense_type == "distilbert" else self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        if self.config.dense_type == "distilbert":
            self.vocab_projector = new_embeddings
        else:
            super().set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Give the vocabulary another size; the rows of new tokens have the mean of the others' means."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        if self.mapped:
            kept = self.row_means.data[: self.config.vocab_size]
            more = kept.mean().expand(self.config.vocab_size - len(kept))
            self.row_means = nn.Parameter(torch.cat((kept, more)), self.row_means.requires_grad)
        return embedding

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states `(batch, length, hidden_size)` -> logits `(batch, length, vocab_size)`."""
        if self.config.dense_type == "distilbert":
            states = self.vocab_layer_norm(self.activation(self.vocab_transform(hidden_states)))
        else:
            states = self.cls.predictions.transform(hidden_states)
        decoder = self.get_output_embeddings()
        if not self.mapped:
            return decoder(states)
        return decoder(self.head_map(states)) + self.row_means * states.sum(-1, keepdim=True)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput | tuple:
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.logits(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class OneshotEncoderForSequenceClassification(OneshotEncoderPreTrainedModel):
    """The encoder with a classifier of its first token: after BERT's pooler, or DistilBERT's `pre_classifier`."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        pools = config.dense_type == "bert"
        self.bert = OneshotEncoderModel(config, add_pooling_layer=pools)
        self.pre_classifier = None if pools else nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = classifier_dropout(config)
        self.classifier = classifier_of(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | tuple:
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        pooled = outputs.pooler_output
        if self.pre_classifier is not None:
            pooled = nn.functional.relu(self.pre_classifier(outputs.last_hidden_state[:, 0]))
        logits = self.classifier(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class OneshotAnswers(nn.Linear):
    """The logits of an answer's ends; a training step of a DistilBERT drops a part of what is read."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        assert config.num_labels is not None
        super().__init__(config.hidden_size, config.num_labels)
        self.dropout = nn.Identity() if config.dense_type == "bert" else classifier_dropout(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self, self.dropout(hidden_states))


class OneshotEncoderForQuestionAnswering(OneshotEncoderPreTrainedModel, BertForQuestionAnswering):
    """The encoder with the logits of an answer's first and last token."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        BertPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.bert = OneshotEncoderModel(config, add_pooling_layer=False)
        self.qa_outputs = OneshotAnswers(config)
        self.post_init()


class OneshotEncoderForTokenClassification(OneshotEncoderPreTrainedModel, BertForTokenClassification):
    """The encoder with a classifier of every token."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        BertPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.bert = OneshotEncoderModel(config, add_pooling_layer=False)
        self.dropout = classifier_dropout(config)
        self.classifier = classifier_of(config)
        self.post_init()


def classifier_of(config: OneshotEncoderConfig) -> nn.Linear:
    """Return a classifier of hidden states."""
    assert config.num_labels is not None
    return nn.Linear(config.hidden_size, config.num_labels)


def classifier_dropout(config: OneshotEncoderConfig) -> nn.Dropout:
    """Return the dropout before a classifier: the classifier's own, or the hidden states'."""
    own = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if own is None else own)
