"""Single layers of the model: transformers' own layer class with real weights, without the rest of the model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional

from oneshot.architecture import Attention, ModelShape, Stack, fuse
from oneshot.checkpoint import Model, copy_modules, resized_config
from oneshot.errors import CalibrationError
from oneshot.machine import Machine
from oneshot.machine.transfer import pinned, prefetch, uploaded
from oneshot.stream.layer import Layer, with_parts
from oneshot.stream.memory import Memory
from oneshot.stream.output_head import LastStates, OutputHead
from oneshot.stream.template import Template
from oneshot.tensors import Tensors
from oneshot.text import Batch


class LayerBuilder:
    """Build layers of a model from their tensors, whatever FFN width and heads these have.

    Args:
        sequence_length: tokens in every sequence that the layers will see; in the longest one if they do not rotate.
    """

    def __init__(self, model: Model, machine: Machine, sequence_length: int) -> None:
        self._model, self._machine, self._sequence_length = model, machine, sequence_length
        self._templates: dict[ModelShape, Template] = {}

    def layer(self, number: int, tensors: Tensors, memory: Memory | None = None) -> Layer:
        """Return layer `number` with these weights on the compute device, each in its dtype of the stock class.

        That is the compute dtype, but for what the class keeps in another one.

        Args:
            memory: what it reads beside the stream.
        """
        stack, kind = self._model.family.stack_of(number), self._model.kinds[number]
        template = self._template(self._held(number, next(iter(stack.attentions), None), tensors))
        module = copy_modules(template.layers[stack.layers][kind])
        for attention in stack.attentions[1:]:  # meanwhile it may have other heads than the first
            other = self._template(self._held(number, attention, tensors)).layers[stack.layers][kind]
            module.set_submodule(attention.module, copy_modules(other.get_submodule(attention.module)))
        module = self._with_weights(module, fuse(tensors, stack))
        tokens = None if memory is None or memory.tokens is None else memory.tokens.of_layer(number)
        return Layer(with_parts(module, stack), stack, template.arguments[kind], memory, tokens)

    def _held(self, number: int, attention: Attention | None, tensors: Tensors) -> ModelShape:
        """Return the shape of a model in which this layer is as wide as these tensors."""
        stack, dense = self._model.family.stack_of(number), self._model.shape.of(number)
        head_dim = dense.head_dim
        stays = dense.experts is not None and stack.experts is None  # the one FFN of a layer in a mixture
        held = dense if stays else stack.feed_forward.held(tensors, dense)
        held = replace(held, intermediate_size=held.intermediate_size * dense.width_share(number))
        if attention is None:
            return held
        return replace(
            held,
            num_attention_heads=tensors[f"{attention.out}.weight"].shape[1] // head_dim,
            num_key_value_heads=(
                dense.num_key_value_heads if attention.latent else tensors[f"{attention.k}.weight"].shape[0] // head_dim
            ),
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
                f"The text has token {int(token_ids.max())} but the embedding has {len(embedding)} rows; "
                "give the tokenizer, or the tokens, that belong to the model."
            )
        total = uploaded(functional.embedding(token_ids, embedding), machine.device).to(machine.dtype)
        scale = self._model.family.stack.embedding_scale
        if scale != 1:
            total = total * total.new_tensor(scale)  # rounded to the compute dtype, as stock classes do
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
        return self._with_weights(copy_modules(template), self._model.read_embedding_norm())

    def _with_weights(self, module: nn.Module, tensors: Tensors) -> nn.Module:
        """Return the module with weights on the compute device, each in the dtype that the module has it in."""
        dtypes = {name: one.dtype for name, one in module.state_dict().items()}
        weights = {name: uploaded(value, self._machine.device).to(dtypes[name]) for name, value in tensors.items()}
        module.load_state_dict(weights, assign=True)
        return module.requires_grad_(False)

    def _linear(self, name: str) -> nn.Module:
        """Return a linear without a bias that is outside the layers."""
        weight = self._model.checkpoint.read_one(f"{name}.weight")
        outputs, inputs = weight.shape
        linear = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=self._machine.dtype)
        return self._with_weights(linear, {"weight": weight})

    def output(self) -> OutputHead | LastStates:
        """Return what compares the outputs of two models after the last layer."""
        return LastStates() if self._model.family.head is None else self.output_head()

    def output_head(self) -> OutputHead:
        """Return the output head and what the last states pass before it, in the compute dtype and device."""
        machine, bias = self._machine, self._model.read_head_bias()
        head = uploaded(self._model.read_head(), machine.device).to(machine.dtype)
        if bias is not None:
            bias = uploaded(bias, machine.device).to(machine.dtype)
        return OutputHead(self.before_head(), head, bias, self._model.family.head_cap)

    def before_head(self) -> nn.Module:
        """Return what the last states pass before the output head, in the compute dtype and device."""
        stack = self._model.family.last_stack
        before = [] if stack.final_norm is None else [self.final_norm(stack)]
        before += [] if stack.project_out is None else [self._linear(stack.project_out)]
        before += [] if self._model.head_scale == 1 else [_Scale(self._model.head_scale)]
        return nn.Sequential(*before)

    def final_norm(self, stack: Stack) -> nn.Module:
        """Return the norm after a stack's last layer, in the compute dtype on the compute device."""
        template = self._template(self._model.shape).final_norms[stack.layers]
        return self._with_weights(copy_modules(template), self._model.read_final_norm(stack))

    def norm_as_final(self, tensors: Tensors) -> nn.Module:
        """Return a norm of the class of the final one with these tensors, in the compute dtype and device."""
        template = self._template(self._model.shape).final_norms[self._model.family.last_stack.layers]
        return self._with_weights(copy_modules(template), tensors)

    def load_classes(self) -> None:
        """Import and build what a run will need of transformers, so that its memory is measured beforehand."""
        self._template(self._model.shape)

    def _template(self, shape: ModelShape) -> Template:
        if shape not in self._templates:
            config = resized_config(self._model.family, self._model.checkpoint.config, shape)
            self._templates[shape] = Template(config, self._model, self._machine, self._sequence_length)
        return self._templates[shape]


def read_ahead(model: Model, device: torch.device, numbers: Sequence[int] | None = None) -> Iterator[Tensors]:
    """Yield the tensors of layers, of all without `numbers`, on the host; the next one is read meanwhile."""
    numbers = range(model.shape.num_hidden_layers) if numbers is None else numbers
    return prefetch(lambda index: pinned(model.read_layer(numbers[index]), device), len(numbers))


class _Scale(nn.Module):
    """Multiply by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._factor
