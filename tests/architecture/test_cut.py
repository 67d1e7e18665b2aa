"""One cut of axes, wherever a tensor has them, against plain indexing."""

import torch

from oneshot.architecture import cut


def test_a_cut_takes_the_same_indices_in_every_tensor_that_has_the_axis() -> None:
    axes = {
        "queries": ("heads key", "stream"),
        "writer": ("stream", "heads key"),
        "table": ("buckets", "heads"),
        "both": ("2 heads", "stream"),
        "keys": ("groups key", "stream"),
        "norm": ("key",),
        "absent": ("heads",),
    }
    shapes = {"queries": (12, 5), "writer": (5, 12), "table": (7, 4), "both": (8, 5), "keys": (6, 5), "norm": (3,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    heads, groups = torch.tensor([0, 2, 3]), torch.tensor([1])
    found = cut(tensors, axes, {"heads": heads, "groups": groups}, {"key": 3})
    columns = [0, 1, 2, 6, 7, 8, 9, 10, 11]
    expected = {
        "queries": before["queries"][columns],
        "writer": before["writer"][:, columns],
        "table": before["table"][:, [0, 2, 3]],
        "both": before["both"][[0, 2, 3, 4, 6, 7]],
        "keys": before["keys"][3:],
    }
    assert list(found) == list(tensors)
    assert found["norm"] is tensors["norm"]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items()), "the input stays as it was"


def test_every_expert_keeps_neurons_of_its_own() -> None:
    axes = {
        "gate_up": ("experts", "2 neurons", "stream"),
        "bias": ("experts", "2 neurons"),
        "down": ("experts", "stream", "neurons"),
        "router": ("experts", "stream"),
    }
    shapes = {"gate_up": (3, 8, 5), "bias": (3, 8), "down": (3, 5, 4), "router": (3, 5)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    kept = torch.tensor([[0, 1], [1, 3], [0, 3]])
    found = cut(tensors, axes, {"neurons": kept})
    for expert, own in enumerate(kept.tolist()):
        both = [*own, *(4 + neuron for neuron in own)]
        assert torch.equal(found["gate_up"][expert], tensors["gate_up"][expert][both])
        assert torch.equal(found["bias"][expert], tensors["bias"][expert][both])
        assert torch.equal(found["down"][expert], tensors["down"][expert][:, own])
    assert found["router"] is tensors["router"]
