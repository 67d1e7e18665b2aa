"""The per-layer form of a compressed encoder: a BERT or a DistilBERT whose every layer has sizes of its own.

This file is shipped with every per-layer encoder; `AutoModel….from_pretrained(…, trust_remote_code=True)` runs it. It
needs torch and transformers and nothing else. Tensors have BERT's names; heads have those of the dense model.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward


@strict
class OneshotEncoderConfig(PreTrainedConfig):
    """The dense encoder's sizes, and those of every layer.

    `layers` has a dictionary for each layer with the fields of `LayerShape` in the package oneshot. `hidden_size`,
    `intermediate_size`, `num_attention_heads` and `head_dim` are the dense model's. `dense_type`: "bert" or
    "distilbert". `subspaces`: the states between the sublayers are coordinates in subspaces of their own, and norms
    have no weights. `head`: "tied" or "mapped" for a decoder that is the embedding, else "none". `type_vocab_size` is 0
    without token types.
    """

    model_type = "oneshot-encoder"

    dense_type: str = "bert"
    layers: list[dict] | None = None
    subspaces: bool = False
    head: str = "none"
    has_pooler: bool = False
    further_parameters: int = 0
    vocab_size: int = 30522
    type_vocab_size: int = 2
    max_position_embeddings: int = 512
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    head_dim: int = 64
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True


class OneshotEncoderNorm(nn.Module):
    """A norm of coordinates in a subspace: it divides by their root mean square over the dense width."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        super().__init__()
        self.width, self.eps = config.hidden_size, config.layer_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().sum(-1, keepdim=True) / self.width + self.eps).rsqrt()


def as_asked(output: Any, return_dict: bool | None) -> Any:
    """Return an output, or its values as a tuple if that was asked for."""
    return output.to_tuple() if return_dict is False else output


def norm_of(config: OneshotEncoderConfig) -> nn.Module:
    """Return the norm after a sum: a LayerNorm, or one without weights in a subspace."""
    if config.subspaces:
        return OneshotEncoderNorm(config)
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class OneshotEncoderEmbeddings(nn.Module):
    """Tokens, positions and, in a BERT, token types."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        super().__init__()
        assert config.layers is not None
        width = config.layers[0]["hidden_size"]
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = norm_of(config)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        total = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if hasattr(self, "token_type_embeddings"):
            if token_type_ids is None:
                token_type_ids = torch.zeros(total.shape[:2], dtype=torch.long, device=total.device)
            total = total + self.token_type_embeddings(token_type_ids)
        if position_ids is None:
            position_ids = torch.arange(total.shape[1], device=total.device).unsqueeze(0)
        return self.LayerNorm(total + self.position_embeddings(position_ids))


class OneshotEncoderSelfAttention(nn.Module):
    """Attention with its own numbers and sizes of heads; scores are scaled by the dense model's size."""

    def __init__(self, config: OneshotEncoderConfig, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.is_causal, self.scaling = config, False, config.head_dim**-0.5
        self.heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
        self.query = nn.Linear(width, self.heads * sizes["query_key_size"])
        self.key = nn.Linear(width, self.heads * sizes["query_key_size"])
        self.value = nn.Linear(width, self.heads * sizes["value_size"])

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any) -> tuple[Any, Any]:
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, is_causal=False, **kwargs
        )
        return output.flatten(2), weights


class OneshotEncoderOutput(nn.Module):
    """The linear that writes to the residual stream, and the norm after the sum."""

    def __init__(self, config: OneshotEncoderConfig, size: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(size, width)
        self.LayerNorm = norm_of(config)


class OneshotEncoderLayer(nn.Module):
    """One layer with sizes of its own. A sublayer without heads or neurons only adds its writer's bias."""

    def __init__(self, config: OneshotEncoderConfig, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.attention: Any = nn.Module()
        self.intermediate: Any = nn.Module()
        self.attention.self = OneshotEncoderSelfAttention(config, sizes)
        heads = sizes["num_attention_heads"] * sizes["value_size"]
        self.attention.output = OneshotEncoderOutput(config, heads, sizes["middle_size"])
        self.intermediate.dense = nn.Linear(sizes["middle_size"], sizes["intermediate_size"])
        self.activation = ACT2FN[config.hidden_act]
        self.output = OneshotEncoderOutput(config, sizes["intermediate_size"], sizes["output_size"])
        self.attention_shortcut: nn.Module = nn.Identity()
        self.ffn_shortcut: nn.Module = nn.Identity()
        if sizes["attention_shortcut"]:
            self.attention_shortcut = nn.Linear(sizes["hidden_size"], sizes["middle_size"], bias=False)
        if sizes["ffn_shortcut"]:
            self.ffn_shortcut = nn.Linear(sizes["middle_size"], sizes["output_size"], bias=False)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any) -> tuple[Any, Any]:
        heads, weights = self.attention.self(x, attention_mask, **kwargs)
        written = self.attention.output
        x = written.LayerNorm(self.attention_shortcut(x) + written.dense(heads))
        neurons = self.activation(self.intermediate.dense(x))
        return self.output.LayerNorm(self.ffn_shortcut(x) + self.output.dense(neurons)), weights


class OneshotEncoderPreTrainedModel(PreTrainedModel):
    """What all classes share. `base_model_prefix` is BERT's."""

    config_class = OneshotEncoderConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["OneshotEncoderEmbeddings", "OneshotEncoderLayer"]  # noqa: RUF012


class OneshotEncoderModel(OneshotEncoderPreTrainedModel):
    """The encoder without a head; `last_hidden_state` has the dense model's width."""

    def __init__(self, config: OneshotEncoderConfig, add_pooling_layer: bool | None = None) -> None:
        super().__init__(config)
        assert config.layers is not None
        self.embeddings = OneshotEncoderEmbeddings(config)
        self.encoder: Any = nn.Module()
        self.pooler: Any = None
        self.encoder.layer = nn.ModuleList(OneshotEncoderLayer(config, sizes) for sizes in config.layers)
        if config.has_pooler:
            self.pooler = nn.Module()
            self.pooler.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output_map: nn.Module = nn.Identity()
        if config.subspaces:
            self.output_map = nn.Linear(config.layers[-1]["output_size"], config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: Any) -> None:
        self.embeddings.word_embeddings = value

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling | tuple:
        """Hidden states of inner layers are coordinates of their own width if the model has subspaces."""
        x = self.embeddings(input_ids, inputs_embeds, token_type_ids, position_ids)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask)
        states, attentions = [x], []
        for layer in self.encoder.layer:
            x, weights = layer(x, mask, **kwargs)
            states.append(x)
            attentions.append(weights)
        last = self.output_map(x)
        pooled = None if self.pooler is None else torch.tanh(self.pooler.dense(last[:, 0]))
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_weights = self.config.output_attentions if output_attentions is None else output_attentions
        output = BaseModelOutputWithPooling(
            last_hidden_state=last,
            pooler_output=pooled,
            hidden_states=(*states[:-1], last) if wants_states else None,
            attentions=tuple(weights for weights in attentions if weights is not None) if wants_weights else None,
        )
        return as_asked(output, return_dict)


def label_loss(config: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a classification as transformers' own classes choose it."""
    kind = config.problem_type
    if kind is None:
        integers = labels.dtype in (torch.long, torch.int)
        kind = "regression" if config.num_labels == 1 else "single_label" if integers else "multi_label"
    if kind == "regression":
        return nn.functional.mse_loss(logits.squeeze(), labels.squeeze())
    if kind.startswith("multi_label"):
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return nn.functional.cross_entropy(logits.view(-1, config.num_labels), labels.view(-1))


def labels_of(config: OneshotEncoderConfig) -> int:
    """Return the number of labels."""
    assert config.num_labels is not None
    return config.num_labels


class OneshotEncoderWithHead(OneshotEncoderPreTrainedModel):
    """An encoder below a head."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        super().__init__(config)
        self.bert = OneshotEncoderModel(config)


class TiedDecoder(nn.Module):
    """A decoder tied to the embedding: only its bias is stored, and in a subspace a map and the rows' means."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))


class OneshotEncoderForMaskedLM(OneshotEncoderWithHead):
    """An encoder that predicts masked tokens."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        super().__init__(config)
        assert config.layers is not None
        width, self.tied = config.hidden_size, config.head != "none"
        decoder: nn.Module = TiedDecoder(config) if self.tied else nn.Linear(width, config.vocab_size)
        self.activation = ACT2FN[config.hidden_act]
        if config.dense_type == "distilbert":
            self.vocab_transform = nn.Linear(width, width)
            self.vocab_layer_norm = nn.LayerNorm(width, eps=1e-12)
            self.vocab_projector = decoder
        else:
            self.cls: Any = nn.Module()
            self.cls.predictions = decoder if self.tied else nn.Module()
            self.cls.predictions.transform = nn.Module()
            self.cls.predictions.transform.dense = nn.Linear(width, width)
            self.cls.predictions.transform.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
            if not self.tied:
                self.cls.predictions.decoder = decoder
                self.cls.predictions.bias = nn.Parameter(torch.zeros(config.vocab_size))
        if config.head == "mapped":
            self.head_map = nn.Linear(width, config.layers[0]["hidden_size"], bias=False)
            self.row_means = nn.Parameter(torch.zeros(config.vocab_size))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput | tuple:
        output = self.bert(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        decoder: Any
        if self.config.dense_type == "distilbert":
            x = self.vocab_layer_norm(self.activation(self.vocab_transform(output.last_hidden_state)))
            decoder = self.vocab_projector
        else:
            head = self.cls.predictions
            x = head.transform.LayerNorm(self.activation(head.transform.dense(output.last_hidden_state)))
            decoder = head if self.tied else head.decoder
        if not self.tied:
            logits = decoder(x)
        else:
            rows = self.bert.embeddings.word_embeddings.weight
            inside = self.head_map(x) if self.config.head == "mapped" else x
            logits = nn.functional.linear(inside, rows, decoder.bias)
            if self.config.head == "mapped":
                logits = logits + x.sum(-1, keepdim=True) * self.row_means
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.view(-1, self.config.vocab_size), labels.view(-1))
        return as_asked(MaskedLMOutput(loss, logits, output.hidden_states, output.attentions), return_dict)


class OneshotEncoderForSequenceClassification(OneshotEncoderWithHead):
    """An encoder that classifies a text or a pair by its first token."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        super().__init__(config)
        if config.dense_type == "distilbert":
            self.pre_classifier = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, labels_of(config))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | tuple:
        output = self.bert(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        pooled = output.pooler_output
        if self.config.dense_type == "distilbert":
            pooled = torch.relu(self.pre_classifier(output.last_hidden_state[:, 0]))
        logits = self.classifier(pooled)
        loss = None if labels is None else label_loss(self.config, logits, labels)
        return as_asked(SequenceClassifierOutput(loss, logits, output.hidden_states, output.attentions), return_dict)


class OneshotEncoderForTokenClassification(OneshotEncoderWithHead):
    """An encoder that classifies every token."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, labels_of(config))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput | tuple:
        output = self.bert(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits = self.classifier(output.last_hidden_state)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.view(-1, self.config.num_labels), labels.view(-1))
        return as_asked(TokenClassifierOutput(loss, logits, output.hidden_states, output.attentions), return_dict)


class OneshotEncoderForQuestionAnswering(OneshotEncoderWithHead):
    """An encoder that finds the first and the last token of an answer."""

    def __init__(self, config: OneshotEncoderConfig) -> None:
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, labels_of(config))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput | tuple:
        output = self.bert(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        start, end = (part.contiguous() for part in self.qa_outputs(output.last_hidden_state).unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            outside = start.shape[1]  # answers beyond the text do not count
            losses = [
                nn.functional.cross_entropy(logits, place.view(-1).clamp(0, outside), ignore_index=outside)
                for logits, place in ((start, start_positions), (end, end_positions))
            ]
            loss = (losses[0] + losses[1]) / 2
        return as_asked(
            QuestionAnsweringModelOutput(loss, start, end, output.hidden_states, output.attentions), return_dict
        )
