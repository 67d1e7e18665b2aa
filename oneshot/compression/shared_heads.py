"""Heads of a stack whose layers share a table of relative positions (T5).

The table has a column for every head and is added to the scores of every layer, so all layers of a stack keep the same
heads. They are chosen by statistics that are summed over the layers, in one dense pass over the text. Cross-attention
has no table: each layer chooses its own heads when it is compressed.
"""

from functools import partial

import torch

from oneshot.checkpoint import Model
from oneshot.compression.fold import augmented_weight, row_energy
from oneshot.compression.overflow import naming_the_layer
from oneshot.compression.statistics import GramAccumulator, MomentAccumulator
from oneshot.machine import Machine
from oneshot.machine.transfer import Uploader
from oneshot.method import SelectorName
from oneshot.planning import Plan
from oneshot.selection import SELECTORS, Evidence
from oneshot.stream import States, read_ahead
from oneshot.text import Text


def find_shared_heads(
    model: Model, text: Text, plan: Plan, selector: SelectorName, machine: Machine, *, seed: int
) -> dict[str, torch.Tensor]:
    """Return the heads that stay in the self-attention of every stack, ascending int64, by the stack's prefix.

    With `id` they are the pivots of heads that have the columns of all layers, one below the other, so that
    output-weighted Grams add up (STAT section 3.2). Other selectors sum the scores over the layers.

    Args:
        selector: one whose choice layers can share (`Grid.settle` refuses others).
    """
    shape, family, chosen = model.shape, model.family, SELECTORS[selector]
    states, upload = States(model, machine, text), Uploader(machine.device)
    totals: dict[str, torch.Tensor] = {}
    for number, read_tensors in enumerate(read_ahead(model, machine.device)):
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
        own = chosen.shared(evidence)
        totals[stack.layers] = own if stack.layers not in totals else totals[stack.layers] + own
        states.defer(lambda x, _, layer=layer: layer.run_all(x))  # type: ignore[misc]
    states.close()
    kept = plan.layers[plan.kept_layers[0]].num_attention_heads
    jobs = [partial(chosen.blocks_of_shared, total, shape.num_attention_heads, kept) for total in totals.values()]
    return dict(zip(totals, machine.workers.share_all(jobs, [1.0] * len(jobs)), strict=True))
