"""Linears that a checkpoint stores as one."""

from dataclasses import replace

import pytest
import torch

from oneshot.architecture import part_of_output, split
from oneshot.families import FAMILIES


@pytest.mark.parametrize(("name", "heads"), [("phi3", 0), ("gpt_neox", 4)])
def test_a_part_of_a_fused_output_is_that_of_the_part(name: str, heads: int) -> None:
    stack, generator = replace(FAMILIES[name].stack, fused_heads=heads), torch.Generator().manual_seed(0)
    queries, keys = 12, 12 if heads else 6
    fused, linears = next(iter(stack.fused.items()))
    whole = torch.randn(queries + 2 * keys, 5, generator=generator)
    inputs = torch.randn(2, 3, 5, generator=generator)
    writers = {f"{sublayer.writer}.weight": torch.empty(5, queries) for sublayer in stack.sublayers}
    own = split({f"{fused}.weight": whole} | writers, stack)
    for linear in linears:
        part = part_of_output(inputs @ whole.T, linear, stack, queries)
        torch.testing.assert_close(part, inputs @ own[f"{linear}.weight"].T)
    written = inputs @ whole[:7].T
    assert part_of_output(written, stack.attention.out, stack, queries) is written
