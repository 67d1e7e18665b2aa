"""Importance matrices: the same names and values as llama-imatrix's on the same tokens."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import LLAMA_PROGRAMS, program
from engines import BY_LAYER, CONTEXT, SIZES
from factories import MakeConfig, build_model, silence, topics

from oneshot.checkpoint import IMPORTANCE_NAME
from oneshot.export.tensor_types import TYPES_NAME
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer
from oneshot.text.token_files import save_token_ids

CHUNKS = 8
CASES = {
    "llama, sublayers left out": {"depth": "sublayers", "round_to": 4, "sparsity": 0.3},
    "qwen2, tied": {"family": "qwen2", "tied": True},
    "qwen3, equal layers": {"family": "qwen3", "head_dim": 32, "allocation": "uniform"},
    "gemma3": {"family": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32, "tied": True},
}
OF_MODEL = ("family", "tied", "head_dim", "query_pre_attn_scalar")


@pytest.mark.parametrize("name", CASES)
def test_importance_is_llama_imatrixs(
    name: str, save_model: Callable[..., Path], make_config: MakeConfig, tmp_path: Path
) -> None:
    options = dict(CASES[name])
    built = {key: options.pop(key) for key in OF_MODEL if key in options}
    model = build_model(**SIZES, **built)
    if "depth" in options:
        silence(model, attention=[1], ffn=[0, 3])
    source = save_model(model)
    text, tokens = tmp_path / "text.txt", tmp_path / "tokens.safetensors"
    text.write_text(topics(20, 40))
    ids = torch.tensor(load_tokenizer(source)(text.read_text(), verbose=False).input_ids[: CHUNKS * CONTEXT])
    save_token_ids(ids.view(CHUNKS, CONTEXT), tokens)
    sizes = {"num_sequences": CHUNKS, "sequence_length": CONTEXT, "calibration": str(tokens)}
    compress(make_config(source, form="gguf", output=str(tmp_path / "out"), **BY_LAYER | options | sizes))
    command = [program(LLAMA_PROGRAMS / "llama-imatrix"), "-m", tmp_path / "out" / "model.gguf", "-f", text]
    command += [
        "-c",
        CONTEXT,
        "--chunks",
        CHUNKS,
        "--process-output",
        "-t",
        1,
        "-fa",
        "off",
        "-o",
        tmp_path / "im.gguf",
    ]
    subprocess.run([str(one) for one in command], check=True, capture_output=True)
    theirs, ours = (gguf.GGUFReader(path) for path in (tmp_path / "im.gguf", tmp_path / "out" / IMPORTANCE_NAME))
    for key in ("imatrix.chunk_count", "imatrix.chunk_size", "general.type"):
        assert ours.fields[key].contents() == theirs.fields[key].contents()
    expected = {tensor.name: tensor for tensor in theirs.tensors}
    assert {tensor.name for tensor in ours.tensors} == expected.keys()
    for tensor in ours.tensors:
        assert tensor.data.shape == expected[tensor.name].data.shape
        np.testing.assert_allclose(tensor.data, expected[tensor.name].data, rtol=2e-3, err_msg=tensor.name)


def test_types_of_tensors_are_what_llama_quantize_makes_of_them(
    save_model: Callable[..., Path], make_config: MakeConfig, tmp_path: Path
) -> None:
    """Also in blocks of 256, with our importance and our types. Error feedback moves each value by a step or so."""
    pytest.importorskip("libgguf")
    source = save_model(build_model(**SIZES | {"width": 512}))
    options = {"form": "gguf", "sparsity": 0.0}
    compress(make_config(source, output=str(tmp_path / "plain"), **options))
    compress(make_config(source, output=str(tmp_path / "own"), bits=4.6, **options))
    own, plain, path = tmp_path / "own", tmp_path / "plain", tmp_path / "theirs.gguf"
    command = [program(LLAMA_PROGRAMS / "llama-quantize"), "--imatrix", own / IMPORTANCE_NAME]
    command += ["--tensor-type-file", own / TYPES_NAME, plain / "model.gguf", path, "Q8_0"]
    subprocess.run([str(one) for one in command], check=True, capture_output=True)
    ours = {tensor.name: tensor for tensor in gguf.GGUFReader(own / "model.gguf").tensors}
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    whole = {tensor.name: tensor for tensor in gguf.GGUFReader(plain / "model.gguf").tensors}
    assert {gguf.GGML_QUANT_SIZES[tensor.tensor_type][0] for tensor in ours.values()} >= {32, 256}
    layers = {name for name in ours if name.startswith("blk.")}  # the tables have options of their own
    assert {name: ours[name].tensor_type for name in layers} == {name: theirs[name].tensor_type for name in layers}
    for name in layers:
        assert ours[name].data.shape == theirs[name].data.shape
        values = [gguf.dequantize(one[name].data, one[name].tensor_type) for one in (ours, theirs, whole)]
        lost, lost_by_theirs = (np.linalg.norm(one - values[2]) for one in values[:2])
        assert lost <= 1.6 * lost_by_theirs, name
