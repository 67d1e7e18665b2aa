"""Single layers of the model: transformers' own layer class with real weights, without the rest of the model."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from oneshot.checkpoint import Model, stock_classes
from oneshot.checkpoint.model import one_layer_config
from oneshot.errors import CalibrationError
from oneshot.families import Attention, FeedForward, ModelShape, Norm, Stack
from oneshot.machine import Machine
from oneshot.machine.transfer import uploaded
from oneshot.stream.output_head import LastStates, OutputHead
from oneshot.text import Batch

Tensors = dict[str, torch.Tensor]


class LayerBuilder:
    """Build layers of a model from their tensors, whatever FFN width and heads these have.

    Args:
        sequence_length: tokens in every sequence that the layers will see; in the longest one if they do not rotate.
    """

    def __init__(self, model: Model, machine: Machine, sequence_length: int) -> None:
        self._model, self._machine, self._sequence_length = model, machine, sequence_length
        self._templates: dict[ModelShape, _Template] = {}

    def layer(self, tensors: Tensors, stack: Stack | None = None, memory: "Memory | None" = None) -> "Layer":
        """Return a layer with these weights, in the compute dtype on the compute device.

        Args:
            stack: of the layer; None: the model's first one. memory: what its cross-attention reads.
        """
        stack = stack or self._model.family.stack
        template = self._template(self._held(stack, stack.attention, tensors))
        module = copy.deepcopy(template.layers[stack.layers])
        for attention in stack.attentions[1:]:  # meanwhile it may have other heads than the first
            other = self._template(self._held(stack, attention, tensors)).layers[stack.layers]
            module.set_submodule(attention.module, copy.deepcopy(other.get_submodule(attention.module)))
        return Layer(self._with_weights(module, tensors), stack, template.arguments, memory)

    def _held(self, stack: Stack, attention: Attention, tensors: Tensors) -> ModelShape:
        """Return the shape of a model whose layers are as wide as these tensors."""
        head_dim = self._model.shape.head_dim
        return replace(
            self._model.shape,
            intermediate_size=tensors[f"{stack.ffn.down}.weight"].shape[1],
            num_attention_heads=tensors[f"{attention.out}.weight"].shape[1] // head_dim,
            num_key_value_heads=tensors[f"{attention.k}.weight"].shape[0] // head_dim,
        )

    def embed(self, embedding: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the states before the first layer, `(sequences, length, D)`, on the compute device.

        Raises as `sum_embeddings`.
        """
        total = self.sum_embeddings(embedding, batch)
        return total if self.embedding_norm is None else self.embedding_norm(total)

    def sum_embeddings(self, embedding: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the sum of the embeddings of tokens, learned positions and token types, `(sequences, length, D)`.

        Raises `CalibrationError` for tokens and positions that have no row.
        """
        machine, positions, token_ids = self._machine, self._positions, batch.token_ids
        if int(token_ids.max()) >= len(embedding):
            raise CalibrationError(
                f"The tokenizer gives token {int(token_ids.max())} but the embedding has {len(embedding)} rows; "
                "give the tokenizer that belongs to the model."
            )
        total = uploaded(functional.embedding(token_ids, embedding), machine.device).to(machine.dtype)
        if self._project_in is not None:
            total = self._project_in(total)
        if positions is not None:
            if token_ids.shape[1] > len(positions):
                raise CalibrationError(
                    f"--sequence-length {token_ids.shape[1]} is beyond the model's {len(positions)} positions; "
                    "give a smaller one."
                )
            total = total + uploaded(positions[: token_ids.shape[1]], machine.device).to(machine.dtype)
        types = self._token_types
        if types is not None:
            chosen = torch.zeros_like(token_ids) if batch.token_types is None else batch.token_types
            total = total + uploaded(functional.embedding(chosen, types), machine.device).to(machine.dtype)
        return total

    @cached_property
    def _positions(self) -> torch.Tensor | None:
        return self._model.read_positions()

    @cached_property
    def _project_in(self) -> nn.Module | None:
        name = self._model.family.stack.project_in
        return None if name is None else self._linear(name)

    @cached_property
    def _token_types(self) -> torch.Tensor | None:
        return self._model.read_token_types()

    @cached_property
    def embedding_norm(self) -> nn.Module | None:
        """Return the norm that follows the embeddings, in the compute dtype on the compute device; None without one."""
        template = self._template(self._model.shape).embedding_norm
        if template is None:
            return None
        return self._with_weights(copy.deepcopy(template), self._model.read_embedding_norm())

    def _with_weights(self, module: nn.Module, tensors: Tensors) -> nn.Module:
        """Return the module with weights, in the compute dtype on the compute device."""
        machine = self._machine
        weights = {name: uploaded(value, machine.device).to(machine.dtype) for name, value in tensors.items()}
        module.load_state_dict(weights, assign=True)
        return module.requires_grad_(False)

    def _linear(self, name: str) -> nn.Module:
        """Return a linear without a bias that is outside the layers."""
        weight = self._model.read_linear(name)
        outputs, inputs = weight.shape
        return self._with_weights(nn.Linear(inputs, outputs, bias=False, device="meta"), {"weight": weight})

    def output(self) -> OutputHead | LastStates:
        """Return what compares the outputs of two models after the last layer."""
        return LastStates() if self._model.family.head is None else self.output_head()

    def output_head(self) -> OutputHead:
        """Return the output head and what the last states pass before it, in the compute dtype and device."""
        stack = self._model.family.last_stack
        before = [] if stack.final_norm is None else [self.final_norm(stack)]
        before += [] if stack.project_out is None else [self._linear(stack.project_out)]
        head = uploaded(self._model.read_head(), self._machine.device).to(self._machine.dtype)
        return OutputHead(nn.Sequential(*before), head)

    def final_norm(self, stack: Stack) -> nn.Module:
        """Return the norm after a stack's last layer, in the compute dtype on the compute device."""
        template = self._template(self._model.shape).final_norms[stack.layers]
        return self._with_weights(copy.deepcopy(template), self._model.read_final_norm(stack))

    def load_classes(self) -> None:
        """Import and build what a run will need of transformers, so that its memory is measured beforehand."""
        self._template(self._model.shape)

    def _template(self, shape: ModelShape) -> "_Template":
        if shape not in self._templates:
            config = self._model.family.resize(self._model.checkpoint.config, shape)
            self._templates[shape] = _Template(config, self._model, self._machine, self._sequence_length)
        return self._templates[shape]


class _Template:
    """A layer and a final norm of each stack without weights, and the arguments that attention is called with."""

    def __init__(self, config: dict[str, Any], model: Model, machine: Machine, sequence_length: int) -> None:
        from transformers.masking_utils import create_sliding_window_causal_mask

        family, stack = model.family, model.family.stack
        config_class, model_class = stock_classes(config)
        hf_config = config_class.from_dict(one_layer_config(config, family))
        with torch.device("meta"):
            whole = model_class._from_config(hf_config, dtype=machine.dtype, attn_implementation="sdpa")
        self.embedding_norm: nn.Module | None = None
        if stack.embedding_norm is not None:
            self.embedding_norm = whole.get_submodule(stack.embedding_norm.name).requires_grad_(False)
        self.layers: dict[str, nn.Module] = {}
        self.final_norms: dict[str, nn.Module] = {}
        for each in family.stacks:
            self.layers[each.layers] = whole.get_submodule(each.layers)[0].eval().requires_grad_(False)
            if each.final_norm is not None:
                norm = whole.get_submodule(each.final_norm.name).requires_grad_(False)
                self.final_norms[each.layers] = norm
        self.arguments: dict[str, Any] = {}
        if stack.attention.relative_bias is not None:
            return  # each layer computes its positions from the table, and scores are causal where the module says so
        positions = torch.arange(sequence_length, device=machine.device).unsqueeze(0)
        example = torch.zeros(1, sequence_length, hf_config.hidden_size, dtype=machine.dtype, device=machine.device)
        window = getattr(hf_config, "sliding_window", None)
        mask = None  # scaled dot product attention is causal by itself where the module says so
        if window is not None and window < sequence_length:
            mask = create_sliding_window_causal_mask(
                config=whole.config,
                inputs_embeds=example,
                attention_mask=None,
                past_key_values=None,
                position_ids=positions,
            )
        self.arguments = {"attention_mask": mask}
        if stack.rotary:
            around = whole.get_submodule(stack.layers.rpartition(".")[0])
            rotary = type(around.rotary_emb)(whole.config).to(machine.device)
            self.arguments |= {"position_embeddings": rotary(example, positions), "position_ids": positions}


@dataclass
class Memory:
    """The encoder's output for the present batch, which cross-attention reads, `(sequences, source length, D)`."""

    states: torch.Tensor


class Layer:
    """One layer, callable by its sublayers.

    A sublayer adds `writer(inner(x))` to the residual stream `x`. Its norm comes before the sublayer or after the sum.
    `memory`: of a decoder's layer; None for others.
    """

    def __init__(
        self, module: nn.Module, stack: Stack, arguments: dict[str, Any], memory: Memory | None = None
    ) -> None:
        self._module, self._stack, self._arguments, self._memory = module, stack, arguments, memory

    def reading(self, memory: Memory | None) -> "Layer":
        """Return the same layer with another memory."""
        return self if memory is self._memory else Layer(self._module, self._stack, self._arguments, memory)

    def inner(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the activations that the sublayer's writer reads, as rows `(tokens, n)`."""
        mixer, normed = self._stack.sublayers[index].mixer, self.normed(index, x)
        if isinstance(mixer, FeedForward):
            return self._neurons(mixer, normed).flatten(0, -2)
        read: list[torch.Tensor] = []
        attention = self._part(mixer.module)
        if not _contains_writer(mixer):
            return attention(normed, **self._arguments_of(mixer))[0].flatten(0, -2)
        handle = self._part(mixer.out).register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        try:
            attention(hidden_states=normed, **self._arguments_of(mixer))
        finally:
            handle.remove()
        return read[0].flatten(0, -2)

    def sum(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return `x + writer(inner(x))`, `(sequences, length, D)`."""
        mixer = self._stack.sublayers[index].mixer
        if isinstance(mixer, Attention) and _contains_writer(mixer):
            attention, arguments = self._part(mixer.module), self._arguments_of(mixer)
            output, *_ = attention(hidden_states=self.normed(index, x), **arguments)
            return x + output
        return x + self.write(index, self.inner(index, x)).view_as(x)

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the sublayer, `(sequences, length, D)`."""
        return self.leave(index, self.sum(index, x))

    def leave(self, index: int, total: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the sublayer from the sum, which a norm may follow."""
        norm = self._norm(index)
        return self._part(norm.name)(total) if norm.place == "after" else total

    def run_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the whole layer."""
        for index in range(len(self._stack.sublayers)):
            x = self.run(index, x)
        return x

    def write(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the writer's output for rows of its activations, `(tokens, D)`."""
        return self._part(self._stack.sublayers[index].writer)(rows)

    def queries_keys(self, index: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries `(tokens, H·h)` and keys `(tokens, G·h)` before their norms and rotation.

        The keys of cross-attention are of the source's tokens.
        """
        mixer = self._stack.sublayers[index].mixer
        assert isinstance(mixer, Attention)
        normed = self.normed(index, x).flatten(0, -2)
        read = normed if not mixer.memory else self._memory_states().flatten(0, -2)
        return self._part(mixer.q)(normed), self._part(mixer.k)(read)

    def values(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return values `(tokens, G·h)` before the softmax weighs them."""
        mixer = self._stack.sublayers[index].mixer
        assert isinstance(mixer, Attention)
        return self._part(mixer.v)(self.normed(index, x).flatten(0, -2))

    def gates(self, index: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what an FFN with a gate reads, `(tokens, D)`, and the gate's activations, `(tokens, n)`."""
        mixer = self._stack.sublayers[index].mixer
        assert isinstance(mixer, FeedForward)
        assert mixer.gate is not None
        normed = self.normed(index, x).flatten(0, -2)
        return normed, self._part(mixer.activation)(self._part(mixer.gate)(normed))

    def neuron_factors(self, index: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of an FFN's neurons, `(tokens, n)`: the gate's activations, and what it multiplies."""
        mixer = self._stack.sublayers[index].mixer
        assert isinstance(mixer, FeedForward)
        inputs, gates = self.gates(index, x)
        return gates, self._part(mixer.up)(inputs)

    def replace_norms(self, replacement: Callable[[int, Any], nn.Module]) -> None:
        """Replace the norm of every sublayer by `replacement(index, norm)`."""
        for index in range(len(self._stack.sublayers)):
            name = self._norm(index).name
            self._module.set_submodule(name, replacement(index, self._part(name)))

    def normed(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return what the sublayer's linears read."""
        norm = self._norm(index)
        return self._part(norm.name)(x) if norm.place == "before" else x

    def _arguments_of(self, mixer: Attention) -> dict[str, Any]:
        return self._arguments | ({"key_value_states": self._memory_states()} if mixer.memory else {})

    def _memory_states(self) -> torch.Tensor:
        assert self._memory is not None
        return self._memory.states

    def _neurons(self, mixer: FeedForward, normed: torch.Tensor) -> torch.Tensor:
        activation = self._part(mixer.activation)
        if mixer.gate is None:
            return activation(self._part(mixer.up)(normed))
        return activation(self._part(mixer.gate)(normed)).mul_(self._part(mixer.up)(normed))

    def _norm(self, index: int) -> Norm:
        return self._stack.sublayers[index].norm

    def _part(self, name: str) -> Any:
        return self._module.get_submodule(name)


def _contains_writer(mixer: Attention) -> bool:
    """Return whether the attention module applies its output linear itself."""
    return mixer.out.startswith(f"{mixer.module}.")
