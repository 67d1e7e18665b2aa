"""Headers, shapes and dtypes of safetensors files that no checkpoint has, each refused in one sentence."""

import re
import struct
from pathlib import Path

import pytest
import torch
from damage import EMBEDDING, edit_config, edit_tensors, message_of
from factories import MakeCheckpoint
from families.cases import CASES
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import open_model
from oneshot.checkpoint.reader import SINGLE_NAME


def with_header(folder: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    stated = len(header) if length is None else length
    (folder / SINGLE_NAME).write_bytes(struct.pack("<Q", stated) + header + data)


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (b"{}", b"", 2**63),
        (b"{}", b"", 200 * 2**20),
        (b"{}", b"", 1000),
        (b"", b"", 0),
        (b"[" * 100_000, b"", None),
        (b'{"a":' * 50_000, b"", None),
        (b'{"\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4), None),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', bytes(4), None),
        (b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}', b"", None),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,400]}}', bytes(4), None),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            bytes(4),
            None,
        ),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            bytes(8),
            None,
        ),
    ],
)
def test_invalid_headers(header: bytes, data: bytes, length: int | None, own_checkpoint: MakeCheckpoint) -> None:
    """Sizes beyond the file, overlaps, and a name that occurs twice."""
    folder = own_checkpoint()
    with_header(folder, header, data, length)
    message = message_of(folder)
    assert str(folder / SINGLE_NAME) in message
    assert "damaged or truncated" in message


def test_a_checkpoint_without_tensors(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    with_header(folder, b"{}")
    assert "no tensors" in message_of(folder)


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("change", ["shorter", "narrower", "flat", "missing"])
def test_tensors_outside_the_layers_with_another_shape(
    change: str, family: str, own_checkpoint: MakeCheckpoint
) -> None:
    folder = own_checkpoint(family=family, groups=4 if family == "opt" else 2)
    outside = [name for name in load_file(folder / SINGLE_NAME) if ".layers." not in name]
    assert len(outside) == (3 if family == "llama" else 5)
    original = (folder / SINGLE_NAME).read_bytes()
    for name in outside:

        def edit(tensors: dict[str, torch.Tensor], name: str = name) -> None:
            tensor = tensors.pop(name)
            if change != "missing":
                tensors[name] = {
                    "shorter": tensor[:-1],
                    "narrower": tensor[..., :-1],
                    "flat": tensor.flatten()[0],
                }[change].clone()

        edit_tensors(folder, edit)
        told = message_of(folder)
        assert name in told
        assert "None" not in told
        assert ("The checkpoint lacks" in told) == (change == "missing")
        (folder / SINGLE_NAME).write_bytes(original)


def test_a_tensor_that_the_model_does_not_have(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    edit_tensors(folder, lambda tensors: tensors.update(extra=torch.ones(2)))
    assert "The checkpoint has extra (2,), which config.json of a llama model does not ask for" in message_of(folder)


@pytest.mark.parametrize("name", CASES)
def test_biases_beside_those_of_the_class(name: str, tmp_path: Path) -> None:
    """transformers ignores biases that its class lacks, and starts those with zeros that the files lack."""
    case = CASES[name]
    case.build(**case.options).save_pretrained(tmp_path)
    model, path = open_model(str(tmp_path), tmp_path), tmp_path / SINGLE_NAME
    tensors, original = load_file(path), path.read_bytes()
    linears: dict[str, list[str]] = {}  # stored names in all layers
    for in_class in model.checkpoint.shapes:
        stored = model.checkpoint.stored(in_class)
        is_linear = in_class.endswith(".weight") and tensors[stored].ndim == 2 and ".experts." not in in_class
        if is_linear and model.family.is_in_layers(in_class):
            linears.setdefault(re.sub(r"[.]\d+[.]", ".", in_class, count=1), []).append(stored)
    assert linears
    for weights in linears.values():
        biases = {weight.removesuffix("weight") + "bias": torch.ones(len(tensors[weight])) for weight in weights}
        is_missing = biases.keys() <= tensors.keys()
        others = {stored: tensor for stored, tensor in tensors.items() if stored not in biases}
        save_file(others if is_missing else others | biases, path, {"format": "pt"})
        told = message_of(tmp_path)
        if not is_missing and model.family.decoder is None:  # files of GPTQ hold zeros beside every linear
            save_file(others | {bias: torch.zeros_like(ones) for bias, ones in biases.items()}, path, {"format": "pt"})
            opened = open_model(str(tmp_path), tmp_path)
            assert (opened.shape, opened.checkpoint.shapes) == (model.shape, model.checkpoint.shapes)
        assert ("The checkpoint lacks" if is_missing else "The checkpoint has") in told
        assert ".bias (" in told
        path.write_bytes(original)


def test_a_missing_head_if_the_config_does_not_tie_it(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    edit_tensors(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    told = message_of(folder)
    assert told.startswith(
        "The checkpoint lacks lm_head.weight (400, 32), which config.json of a llama model asks for; "
    )
    assert told.endswith(", or set tie_word_embeddings to true in config.json if the head is the embedding.")
    edit_config(folder, tie_word_embeddings=True)
    assert open_model(str(folder), folder).shape.tied


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", EMBEDDING, "model.norm.weight"])
def test_quantised_weights(dtype: torch.dtype, name: str, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    message = message_of(folder)
    assert name in message
    assert "give the unquantised checkpoint" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floating_weights_are_read(dtype: torch.dtype, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    edit_tensors(folder, lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
    assert open_model(str(folder), folder).checkpoint.read_one(EMBEDDING).dtype == dtype
