"""Heads of a stack whose layers share a table of relative positions (T5).

The table has a column for every head and is added to the scores of every layer, so all layers of a stack keep the same
heads. They are chosen by statistics that are summed over the layers, in one dense pass over the text. Cross-attention
has no table: each layer chooses its own heads when it is compressed.
"""

import torch

from oneshot.architecture import ModelShape
from oneshot.checkpoint import Model
from oneshot.compression.fold import augmented_weight, row_energy
from oneshot.compression.overflow import naming_the_layer
from oneshot.compression.statistics import GramAccumulator, MomentAccumulator
from oneshot.machine import Machine
from oneshot.machine.prefetch import prefetch
from oneshot.machine.transfer import Uploader, pinned
from oneshot.method import SelectorName
from oneshot.planning import Plan
from oneshot.selection import SELECTORS, Evidence, SharedSelector
from oneshot.stream import States
from oneshot.text import Text


def find_shared_heads(
    model: Model, text: Text, plan: Plan, selector: SelectorName, machine: Machine, *, seed: int
) -> dict[str, torch.Tensor]:
    """Return the heads that stay in the self-attention of every stack, ascending int64, by the stack's prefix.

    Args:
        selector: the name of a `SharedSelector` (`Grid.settle` refuses others).
    """
    shape, family = model.shape, model.family
    states, upload = States(model, machine, text), Uploader(machine.device)
    choices: dict[str, SharedChoice] = {}
    read = prefetch(lambda layer: pinned(model.read_layer(layer), machine.device), shape.num_hidden_layers)
    for number, read_tensors in enumerate(read):
        stack = family.stack_of(number)
        if number == stack.first_layer > 0:
            states.settle()
            states.enter_decoder()
        tensors = upload(read_tensors)
        layer, index = states.layer(number, tensors), stack.index_of("heads")
        attention = stack.attention
        columns = shape.num_attention_heads * shape.head_dim
        gram = GramAccumulator(columns, output_size=None, device=machine.device)
        moments = MomentAccumulator(columns, device=machine.device)
        for x, _ in states.read():
            inner = layer.inner(index, x)
            gram.update_(inner)
            moments.update_(inner)
        with naming_the_layer(number, lambda tensors=tensors: tensors):  # type: ignore[misc]
            statistics = gram.finish(workers=machine.workers)
        evidence = Evidence(
            consumer=augmented_weight(tensors, attention.out).to(machine.device),
            producer_energy=row_energy(tensors, attention.v).to(machine.device),
            gram=statistics.gram,
            generator=torch.Generator().manual_seed(seed + number),
            moments=moments.finish(machine.workers),
        )
        choices.setdefault(stack.layers, SharedChoice(selector, shape)).add(evidence)
        states.defer(lambda x, _, layer=layer: layer.run_all(x))  # type: ignore[misc]
    states.close()
    kept = plan.layers[plan.kept_layers[0]].num_attention_heads
    return {
        name: machine.workers.share(number, lambda choice=choice: choice.heads(kept))  # type: ignore[misc]
        for number, (name, choice) in enumerate(choices.items())
    }


class SharedChoice:
    """Sum what the heads of several layers are worth, and choose those that stay.

    `id`: the pivots of heads whose columns are those of all layers, one below the other, so that output-weighted Grams
    add up (STAT section 3.2). Other selectors: the largest sums of their scores.
    """

    def __init__(self, selector: SelectorName, shape: ModelShape) -> None:
        chosen = SELECTORS[selector]
        assert isinstance(chosen, SharedSelector)
        self._selector, self._num_heads = chosen, shape.num_attention_heads
        self._sum: torch.Tensor | float = 0.0

    def add(self, evidence: Evidence) -> None:
        """Add the evidence of a layer."""
        self._sum = self._sum + self._selector.shared(evidence)

    def heads(self, kept: int) -> torch.Tensor:
        """Return the heads that stay, ascending int64 `(kept,)`."""
        assert isinstance(self._sum, torch.Tensor)
        return self._selector.blocks_of_shared(self._sum, self._num_heads, kept)
