"""One layer with its weights, callable by its sublayers."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from oneshot.architecture import Attention, Carried, Experts, FeedForward, Stack, Sublayer, split
from oneshot.architecture.token_inputs import TokenInputs as Inputs
from oneshot.stream.input_squares import InputSquares
from oneshot.stream.memory import Memory
from oneshot.stream.routing import Routing, route, written_by, written_part


class _Reached(Exception):  # noqa: N818
    """The stock layer has come to a module, which reads these states."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states


SHARED = "shared_kv_states"  # the stock layer's argument


@contextmanager
def outputs_of(parts: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the outputs of modules, and of mixtures, by their names, while they run inside the block."""
    outputs: dict[str, torch.Tensor] = {}

    def collect(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _, __, output: outputs.update({name: written_part(output)})

    with ExitStack() as hooks:
        for name, part in parts.items():
            hooks.enter_context(part.register_forward_hook(collect(name)))
        yield outputs


class Layer:
    """One layer, callable by its sublayers.

    A sublayer adds `writer(inner(x))` to the residual stream `x`. Norms may come before the sublayer, between its
    writer and the sum, and after the sum. In a parallel layer all sublayers read the same `x`: the stream stays `x`
    until the last of them, and moves by all of them at once.
    `memory`: of layers that read more than the stream; None for others. `token_inputs`: what each distinct token of
    the text reads in this layer, `(tokens, width)`; None without.
    """

    def __init__(
        self,
        module: nn.Module,
        stack: Stack,
        arguments: dict[str, Any],
        memory: Memory | None = None,
        token_inputs: torch.Tensor | None = None,
    ) -> None:
        self._module, self._stack, self._arguments, self._memory = module, stack, arguments, memory
        self._token_inputs = token_inputs

    @property
    def module(self) -> nn.Module:
        """Return the module of the stock class."""
        return self._module

    def reading(self, memory: Memory | None) -> "Layer":
        """Return the same layer with another memory."""
        if memory is self._memory:
            return self
        return Layer(self._module, self._stack, self._arguments, memory, self._token_inputs)

    def inner(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the activations that the sublayer's writer reads, as rows `(tokens, n)`."""
        mixer, normed = self._stack.sublayers[index].mixer, self.normed(index, x)
        if isinstance(mixer, FeedForward):
            return self._neurons(mixer, normed).flatten(0, -2)
        assert isinstance(mixer, Attention)
        attention = self._part(mixer.module)
        if not mixer.contains_writer:
            return attention(normed, **self._arguments_of(mixer))[0].flatten(0, -2)
        read = self._reaching(mixer.out, lambda: attention(hidden_states=normed, **self._arguments_of(mixer)))
        return read.flatten(0, -2)

    def base(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return what the sublayer's output is added to: `x`, in a parallel layer after the sublayers before it."""
        return self.sum(index - 1, x) if self._stack.parallel and index > 0 else x

    def sum(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return `base(x) + added(writer(inner(x)))`, `(sequences, length, D)`."""
        mixer, base = self._stack.sublayers[index].mixer, self.base(index, x)
        if isinstance(mixer, Experts):
            return base + self.added(index, self._mixture(mixer, index, x))
        if isinstance(mixer, Carried):
            return self._until(self._stack.sublayers[index + 1], x)
        if isinstance(mixer, Attention) and mixer.contains_writer:
            attention, arguments = self._part(mixer.module), self._arguments_of(mixer)
            output, *_ = attention(hidden_states=self.normed(index, x), **arguments)
            return base + self.added(index, output)
        return base + self.added(index, self.write(index, self.inner(index, x)).view_as(x))

    def route(self, index: int, x: torch.Tensor) -> Routing:
        """Return where the stock router sends the tokens of a mixture of experts, and what the mixture writes."""
        mixer = self._stack.sublayers[index].mixer
        assert isinstance(mixer, Experts)
        router, experts = self._part(mixer.router), self._part(mixer.experts)
        return route(partial(self._mixture, mixer, index), router, experts, x, alternating=mixer.alternating)

    def _mixture(self, mixer: Experts, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return what a mixture writes for the stream `x`, with what a module beside it writes, if there is one."""
        normed, branches = self.normed(index, x), mixer.branches
        if branches is None:
            written = written_by(self._part(mixer.module), normed)
            return written if mixer.beside is None else written + self._part(mixer.beside)(normed)
        rows = x.flatten(0, -2)
        _, gates, chosen = self._part(branches.router)(rows)
        mixed = self._part(mixer.experts)(self._part(branches.experts_before)(rows), chosen, gates)
        beside = self._part(branches.shared_after)(self._part(str(mixer.shared_expert))(normed))
        return beside + self.after_experts(mixer, mixed).view_as(x)

    def after_experts(self, mixer: Experts, mixed: torch.Tensor) -> torch.Tensor:
        """Return what the output of experts `(tokens, D)` adds to the mixture's: a norm of its own may follow it."""
        return mixed if mixer.branches is None else self._part(mixer.branches.after)(mixed)

    def shared_neurons(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what the down projection of a mixture's shared expert reads for inputs of the mixture, as rows."""
        shared = self._stack.shared_expert
        assert shared is not None
        return self._neurons(shared, rows)

    def added(self, index: int, written: torch.Tensor) -> torch.Tensor:
        """Return what the stream gets of the writer's output `(…, D)`: a norm and a factor may follow the writer."""
        norm, scale = self._stack.sublayers[index].inside, self._stack.residual_scale
        added = written if norm is None else self._part(norm.name)(written)
        return added if scale == 1 else added * scale

    def before_sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the writer's outputs for which the stream gets `rows (tokens, D)`, if no norm follows the writer."""
        scale = self._stack.residual_scale
        return rows if scale == 1 else rows / scale

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the sublayer, `(sequences, length, D)`."""
        return x if self._stack.waits(index) else self.leave(index, self.sum(index, x))

    def moved(self, index: int, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Return the same from the `sum` of a batch `x`."""
        return x if self._stack.waits(index) else self.leave(index, total)

    def leave(self, index: int, total: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the sublayer from the sum.

        A norm may follow the sum, and the last sublayer what the layer reads of its tokens, and its factor.
        """
        norm, factor, inputs = self._stack.sublayers[index].after, self._stack.layer_scale, self._stack.token_inputs
        left = total if norm is None else self._part(norm.name)(total)
        if index < len(self._stack.sublayers) - 1:
            return left
        left = left if inputs is None else left + self._of_tokens(inputs, left)
        return left if factor is None else left * self._module.get_buffer(factor)

    def _of_tokens(self, inputs: Inputs, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer adds to the stream after its last sublayer, by what it reads of its tokens."""
        assert self._token_inputs is not None
        assert self._memory is not None
        gate = self._part(inputs.activation)(self._part(inputs.gate)(x))
        written: torch.Tensor = self._part(inputs.out)(gate * self._token_inputs[self._memory.places])
        normed: torch.Tensor = self._part(inputs.after)(written)
        return normed

    def run_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the whole layer."""
        for index in range(len(self._stack.sublayers)):
            x = self.run(index, x)
        return x

    def write(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the writer's output for rows of its activations, `(tokens, D)`."""
        return self._part(self._stack.sublayers[index].writer)(rows)

    def outputs_of(self, *linears: str) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Collect the outputs of linears, and of mixtures, by their names, while the layer runs inside the block."""
        return outputs_of({name: self._part(name) for name in linears})

    @contextmanager
    def summing_inputs(self) -> Iterator[InputSquares]:
        """Sum the squares of what every linear and every expert reads, while the layer runs inside the block."""
        squares = InputSquares()
        with squares.listening(self._module, self._stack):
            yield squares

    def queries_keys(self, index: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries `(tokens, H·h)` and keys `(tokens, G·h)` before their norms and rotation.

        The keys of cross-attention are of the source's tokens.
        """
        mixer = self._attention(index)
        normed = self.normed(index, x).flatten(0, -2)
        read = normed if not mixer.memory else self._memory_states().flatten(0, -2)
        return self._part(mixer.q)(normed), self._part(mixer.k)(read)

    def values(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return values `(tokens, G·h)` before the softmax weighs them."""
        mixer = self._attention(index)
        return self._part(mixer.v)(self.normed(index, x).flatten(0, -2))

    def gates(self, index: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what an FFN with a gate reads, `(tokens, D)`, and the gate's activations, `(tokens, n)`."""
        mixer = self._ffn(index)
        normed = self.normed(index, x).flatten(0, -2)
        return normed, self._gated(mixer, normed)

    def neuron_factors(self, index: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of an FFN's neurons, `(tokens, n)`: the gate's activations, and what it multiplies."""
        mixer = self._ffn(index)
        inputs, gates = self.gates(index, x)
        return gates, self._part(mixer.up)(inputs)

    def replace_norms(self, replacement: Callable[[int, Any], nn.Module]) -> None:
        """Replace the norm of every sublayer by `replacement(index, norm)`."""
        for index in range(len(self._stack.sublayers)):
            name = self._stack.sublayers[index].norm.name
            self._module.set_submodule(name, replacement(index, self._part(name)))

    def normed(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return what the sublayer's linears read."""
        norm = self._stack.sublayers[index].before
        return x if norm is None else self._part(norm.name)(x)

    def _attention(self, index: int) -> Attention:
        mixer = self._stack.sublayers[index].mixer
        assert isinstance(mixer, Attention)
        return mixer

    def _ffn(self, index: int) -> FeedForward:
        mixer = self._stack.sublayers[index].mixer
        assert isinstance(mixer, FeedForward)
        return mixer

    def _until(self, sublayer: Sublayer, x: torch.Tensor) -> torch.Tensor:
        """Return the states that the norm before a sublayer reads when the stock layer runs."""
        arguments = _shortened(self._arguments, x.shape[1])
        return self._reaching(sublayer.norm.name, lambda: self._module(x, **arguments, **self._lent()))

    def _reaching(self, part: str, run: Callable[[], object]) -> torch.Tensor:
        """Return what a part of the layer reads in a run of stock code, which stops there."""

        def stop(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            raise _Reached(inputs[0])

        try:
            with self._part(part).register_forward_pre_hook(stop):
                run()
        except _Reached as reached:
            return reached.states
        raise AssertionError(f"the stock layer calls {part}")

    @cached_property
    def _shares_keys(self) -> bool:
        return SHARED in inspect.signature(self._module.forward).parameters

    def _lent(self) -> dict[str, Any]:
        """Return where the stock layer writes and reads keys and values that layers share, if its class has that."""
        if not self._shares_keys:
            return {}
        known = None if self._memory is None else self._memory.lent
        return {SHARED: {} if known is None else known}  # some releases always write there

    def _arguments_of(self, mixer: Attention) -> dict[str, Any]:
        return self._arguments | ({"key_value_states": self._memory_states()} if mixer.memory else {})

    def _memory_states(self) -> torch.Tensor:
        assert self._memory is not None
        assert self._memory.states is not None
        return self._memory.states

    def _neurons(self, mixer: FeedForward, normed: torch.Tensor) -> torch.Tensor:
        if mixer.gate is None:
            return self._activation(mixer)(self._part(mixer.up)(normed))
        gated, up = self._gated(mixer, normed), self._part(mixer.up)(normed)
        return gated * up if torch.is_grad_enabled() else gated.mul_(up)  # a graph may need what the activation wrote

    def _gated(self, mixer: FeedForward, normed: torch.Tensor) -> torch.Tensor:
        """Return the activations of the gate."""
        assert mixer.gate is not None
        gate = self._part(mixer.gate)(normed)
        return self._activation(mixer)(gate if mixer.gate_scale == 1 else gate * mixer.gate_scale)

    def _activation(self, mixer: FeedForward) -> Callable[[torch.Tensor], torch.Tensor]:
        function: Callable[[torch.Tensor], torch.Tensor] = (
            self._part(mixer.activation) if isinstance(mixer.activation, str) else mixer.activation
        )
        return function

    def tensor(self, name: str) -> torch.Tensor:
        """Return a parameter or a buffer as the stock class has it, also in its dtype."""
        module, _, own = name.rpartition(".")
        found: torch.Tensor = getattr(self._part(module), own)
        return found

    def _part(self, name: str) -> Any:
        return self._module.get_submodule(name)


def _shortened(arguments: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the arguments of a layer for sequences that are shorter than those that the arguments were made for."""
    positions, mask = arguments.get("position_embeddings"), arguments.get("attention_mask")
    if positions is None or positions[0].shape[1] == length:
        return arguments
    shorter = {"position_embeddings": tuple(one[:, :length] for one in positions)}
    return arguments | shorter | ({} if mask is None else {"attention_mask": mask[..., :length, :length]})


def with_parts(module: nn.Module, stack: Stack) -> nn.Module:
    """Return a layer's module where linears that it has as one are also there by themselves, as views."""
    fused = {f"{name}.{part}" for name in stack.fused for part in ("weight", "bias")}
    if not fused:
        return module
    weights = dict(module.named_parameters())
    for name, view in split(weights, stack).items():
        linear, _, part = name.rpartition(".")
        if name in weights:
            continue
        path, _, own = linear.rpartition(".")
        if part == "weight":
            outputs, inputs = view.shape
            module.get_submodule(path).add_module(own, nn.Linear(inputs, outputs, bias=False, device="meta"))
        setattr(module.get_submodule(linear), part, nn.Parameter(view, requires_grad=False))
    return module


class DensePass:
    """A deferred sublayer step of the dense stream; it keeps what it adds to, `before`, and the `sum`."""

    def __init__(self, index: int, layer: Layer) -> None:
        self._index, self._layer = index, layer
        self.before = self.sum = torch.empty(0)

    def __call__(self, x: torch.Tensor, _: bool) -> torch.Tensor:
        self.before, self.sum = self._layer.base(self._index, x), self._layer.sum(self._index, x)
        return self._layer.moved(self._index, x, self.sum)
