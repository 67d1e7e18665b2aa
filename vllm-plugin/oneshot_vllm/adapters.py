"""Adapters must have the sizes of a result's linears: vLLM cuts a larger one without a message."""

from typing import Any

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA

Factors = torch.Tensor | list[torch.Tensor | None]  # of one linear, or of the parts of a merged one


class Adaptable(nn.Module):
    """A part of a layer whose linears may get adapters; vLLM then puts a module of its own in a linear's place."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, BaseLayerWithLoRA):
            compare_sizes_(value, name)


def compare_sizes_(place: Any, name: str) -> None:
    """Let a module that takes adapters compare their sizes with its linear's before.

    An adapter is then refused by `ValueError` if it is of other sizes, as the dense model's would be.
    """
    load, linear = place.set_lora, place.base_layer

    def compared(index: int, lora_a: Factors, lora_b: Factors) -> None:
        merged = isinstance(lora_a, list)
        firsts, seconds = (lora_a, lora_b) if merged else ([lora_a], [lora_b])
        sizes = linear.output_sizes if merged else [linear.output_size]
        for first, second, outputs in zip(firsts, seconds, sizes, strict=True):
            if first is None or second is None:
                continue
            found, wanted = (first.shape[-1], second.shape[0]), (linear.input_size, outputs)
            if found != wanted:
                raise ValueError(
                    f"The adapter has {found[0]} inputs and {found[1]} outputs for {name}, where the result has "
                    f"{wanted[0]} and {wanted[1]}; train an adapter on the result itself."
                )
        load(index, lora_a, lora_b)

    place.set_lora = compared
