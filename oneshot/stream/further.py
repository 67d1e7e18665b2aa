"""The inputs of a layer that predicts tokens after the next one."""

from dataclasses import replace

import torch
from torch.nn import functional

from oneshot.checkpoint import FurtherLayer, Model
from oneshot.machine.transfer import uploaded
from oneshot.stream.states import States
from oneshot.text import Batch


def enter_further(states: States, model: Model, layer: FurtherLayer, index: int) -> None:
    """Move both streams to the input of layer `index`, as transformers' `MtpLayer` makes it.

    A position reads the embedding of the token that is `index + 1` later, beside the states that the layer before has
    written, after its norm. The last positions read the last token.

    Args:
        states: after the model's last layer, or after the layer before.
        model: the whole model, whose embedding is read.
    """
    builder, machine = states.builder, states.machine
    last_norm, names, beside = builder.final_norm(states.stack), layer.names, model.checkpoint.beside
    assert beside is not None
    of_embedding, of_states = (
        builder.norm_as_final({"weight": beside.read_one(f"{name}.weight")})
        for name in (names.embedding_norm, names.states_norm)
    )
    projection = uploaded(beside.read_one(f"{names.projection}.weight"), machine.device).to(machine.dtype)
    embedding = model.read_embedding()

    def entered(x: torch.Tensor, batch: Batch) -> torch.Tensor:
        later = min(index + 1, batch.token_ids.shape[1] - 1)
        tokens = torch.cat((batch.token_ids[:, later:], batch.token_ids[:, -1:].expand(-1, later)), 1)
        embedded = builder.embed(embedding, replace(batch, token_ids=tokens))
        return functional.linear(torch.cat((of_embedding(embedded), of_states(last_norm(x))), -1), projection)

    states.enter(layer.model, entered)
