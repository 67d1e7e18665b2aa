"""Quantised checkpoints against transformers' own loading with dequantisation, or what they were packed from."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import Checkpoint, open_model
from oneshot.errors import CheckpointError
from oneshot.pipeline import compress, predict

ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
# the format and the weights of a scheme, as llm-compressor states them
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "w8a8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
    "w8a8-tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}),
    "w4a16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}),
    "w4a16-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "w4a16-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "w8a16": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 8]},
    ),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def scales_of(weight: torch.Tensor, weights: dict[str, Any]) -> torch.Tensor:
    """Return scales by which the largest number of every range becomes about the largest quantised one."""
    rows, columns = weight.shape
    largest = {("int", 8): 127.0, ("int", 4): 7.0, ("float", 8): 448.0, ("float", 4): 6.0}
    size = weights.get("group_size") or columns
    height, width = weights.get("block_structure") or (1, size)
    if weights["strategy"] == "tensor":
        height, width = rows, columns
    ranges = weight.abs().float().unflatten(0, (-1, height)).unflatten(2, (-1, width)).amax((1, 3))
    return ranges / largest[weights["type"], weights["num_bits"]]


def quantise(folder: Path, kind: str, **stated: Any) -> dict[str, Any]:
    """Store the layers' linears as compressed-tensors does; return the quantization_config."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    name, weights = KINDS[kind]
    inputs = {"input_activations": ACTIVATIONS} if name == "int-quantized" else {}
    group = {"targets": ["Linear"], "weights": weights, **inputs}
    scheme, path = QuantizationScheme.model_validate(group), folder / "model.safetensors"
    stored = dict[str, torch.Tensor]()
    for own, tensor in load_file(path).items():
        if "proj" not in own:
            stored[own] = tensor
            continue
        scale = scales_of(tensor, weights)
        local = {"weight": tensor, "weight_scale": scale.to(tensor.dtype)}
        if weights.get("symmetric") is False:
            local["weight_zero_point"] = torch.randint(-3, 3, scale.shape, dtype=torch.int8)
        if name.startswith("nvfp4"):
            whole = 448 * 6 / tensor.abs().max().float()
            local |= {"weight_global_scale": whole.reshape(1), "weight_scale": (scale * whole)}
        made = BaseCompressor.get_value_from_registry(name).compress(local, scheme)
        stored |= {own.replace("weight", role): one.contiguous() for role, one in made.items()}
    save_file(stored, path, metadata={"format": "pt"})
    config = {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    edit_config(folder, quantization_config=config | stated)
    return config


def theirs(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    options = {key: stated[key] for key in ("config_groups", "format", "quantization_status", "ignore")}
    config = CompressedTensorsConfig(**options, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_transformers_loads(
    kind: str, own_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix is dequantised in panels of its rows."""
    monkeypatch.setattr("oneshot.checkpoint.compressed_tensors.PANEL", 32)
    pytest.importorskip("compressed_tensors", reason="the extra `compressed`")
    folder = own_checkpoint(dtype=torch.bfloat16)
    quantise(folder, kind)
    checkpoint = open_model(str(folder), folder).checkpoint
    expected = theirs(folder)
    assert checkpoint.shapes.keys() == expected.keys()
    for name in sorted(checkpoint.shapes):
        read = checkpoint.read_one(name)
        assert torch.equal(read, expected[name]), name
        described = checkpoint.without_values().read_one(name)
        assert (described.shape, described.dtype) == (read.shape, read.dtype)


# transformers 5.24 opens no file with zero points (it makes them in another shape), unless it dequantises at once
@pytest.mark.parametrize(
    "kind", [kind for kind, (_, weights) in KINDS.items() if weights.get("symmetric") is not False]
)
def test_a_model_that_has_run_is_dequantised(kind: str, own_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Its scales stay beside weights that they were multiplied with, also where it is saved."""
    pytest.importorskip("compressed_tensors", reason="the extra `compressed`")
    from transformers import AutoModelForCausalLM

    folder = own_checkpoint(dtype=torch.bfloat16)
    quantise(folder, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model(torch.arange(8)[None])
    model.save_pretrained(tmp_path)
    assert any(name.endswith("_scale") for name in load_file(tmp_path / "model.safetensors"))
    checkpoint, quantised = open_model(str(tmp_path), tmp_path).checkpoint, Checkpoint(folder)
    expected = model.state_dict()
    assert checkpoint.shapes.keys() == quantised.shapes.keys()
    assert all(torch.equal(checkpoint.read_one(name), expected[name]) for name in checkpoint.shapes)
    assert all(torch.equal(checkpoint.read_one(name), quantised.read_one(name)) for name in checkpoint.shapes)
    stated = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path, quantization_config=stated | {"quantization_status": "frozen"})
    with pytest.raises(CheckpointError, match="is stored as BF16 beside a scale"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        KINDS["fp8-blocks"],
        KINDS["w4a16-asymmetric"],
        ("pack-quantized", KINDS["w4a16-channel"][1] | {"symmetric": False, "num_bits": 3}),
    ],
)
def test_rows_need_not_fill_blocks_and_words(
    name: str, weights: dict[str, Any], own_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels of 32 of 72 rows have what the whole matrix has."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="the extra `compressed`")
    from compressed_tensors.quantization import QuantizationScheme

    monkeypatch.setattr("oneshot.checkpoint.compressed_tensors.PANEL", 32)
    compressor, folder = compressors.BaseCompressor.get_value_from_registry(name), own_checkpoint()
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    height, width = weights.get("block_structure") or (1, weights.get("group_size") or 32)
    grid = -(-72 // height), 32 // width
    local = {"weight": torch.randn(72, 32), "weight_scale": torch.rand(grid) + 0.1}
    if weights.get("symmetric") is False:
        local["weight_zero_point"] = torch.randint(-3, 3, grid, dtype=torch.int8)
    parts = compressor.compress(local, scheme)
    path, module = folder / "model.safetensors", "model.layers.0.mlp.up_proj"
    others = {own: one for own, one in load_file(path).items() if own != f"{module}.weight"}
    stored = {f"{module}.{role}": one.contiguous() for role, one in parts.items()}
    save_file(others | stored, path, metadata={"format": "pt"})
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    stated = {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}
    edit_config(folder, quantization_config=stated)
    read = Checkpoint(folder).read_one(f"{module}.weight")
    assert torch.equal(read, compressor.decompress(parts, scheme)["weight"])


def to_mxfp4(folder: Path) -> None:
    """Store random numbers of four bits, and exponents, in the place of the experts' matrices."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = experts, outputs, inputs // 32
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8)
    save_file(stored, path, metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


@pytest.fixture
def mxfp4(own_checkpoint: MakeCheckpoint) -> Path:
    """A gpt-oss as it is published."""
    folder = own_checkpoint(**CASES["gpt_oss"].options | {"hidden": 32, "width": 64, "dtype": torch.bfloat16})
    to_mxfp4(folder)
    return folder


def test_mxfp4_is_what_transformers_makes_of_it(mxfp4: Path, make_config: MakeConfig) -> None:
    """Also in a result without removing anything, which states no quantisation; `--dry-run` counts the same."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = AutoModelForCausalLM.from_pretrained(mxfp4, quantization_config=Mxfp4Config(dequantize=True))
    expected = dict(model.state_dict())
    config = make_config(mxfp4, sparsity=0)
    predicted, report = predict(config), compress(config)
    assert predicted.stored_parameters == report.stored_parameters
    result = load_file(Path(config.output) / "model.safetensors")
    assert result.keys() == expected.keys()
    for name in sorted(result):
        assert torch.equal(result[name], expected[name]), name
    assert "quantization_config" not in json.loads((Path(config.output) / "config.json").read_text())
    assert any("mxfp4" in one and "bfloat16" in one for one in report.warnings)
    smaller = compress(make_config(mxfp4, sparsity=0.1, num_sequences=4, output=f"{config.output}-smaller"))
    assert smaller.stored_parameters["compressed"] < report.stored_parameters["compressed"]


@pytest.mark.parametrize(
    ("change", "cause"),
    {
        "shape": r"mlp.experts.down_proj_scales has shape \(4, 32, 1\), which does not fit",
        "missing": r"mlp.experts.down_proj_scales is missing",
        "not finite": "down_proj in .* holds NaN or Inf",
    }.items(),
)
def test_damaged_mxfp4_is_refused(change: str, cause: str, mxfp4: Path) -> None:
    path, name = mxfp4 / "model.safetensors", "model.layers.0.mlp.experts.down_proj_scales"
    stored = load_file(path)
    if change == "shape":
        stored[name] = stored[name][..., :1].contiguous()
    elif change == "missing":
        del stored[name]
    else:
        stored[name][0, 0, 0] = 255
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=cause):
        Checkpoint(mxfp4).read_one("model.layers.0.mlp.experts.down_proj")


def test_packed_weights_are_compressed(own_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """The result has the dtype that the config states, and the run says that the weights were rounded before."""
    pytest.importorskip("compressed_tensors", reason="the extra `compressed`")
    folder = own_checkpoint(dtype=torch.bfloat16)
    quantise(folder, "w4a16")
    read = open_model(str(folder), folder).checkpoint
    meant = read.read(read.shapes)
    config = make_config(folder, sparsity=0)
    predicted, report = predict(config), compress(config)
    result = load_file(Path(config.output) / "model.safetensors")
    assert result.keys() == meant.keys()
    assert all(torch.equal(tensor, result[name]) for name, tensor in meant.items())
    assert "quantization_config" not in json.loads((Path(config.output) / "config.json").read_text())
    assert predicted.stored_parameters == report.stored_parameters
    assert any("compressed-tensors, pack-quantized" in one for one in report.warnings)


@pytest.mark.parametrize(
    ("change", "cause"),
    {
        "scale": r"weight_scale has shape \(64, 1\), which does not fit group scales of 64 × 32 weights",
        "shape": r"weight_shape states \[64, 31\] where \[64, 32\] are stored",
        "no shape": "weight_shape is missing",
        "no scale": r"up_proj\.weight_scale is missing",
        "order": "weight_g_idx states an order of its inputs",
        "no zero point": "weight_zero_point is missing",
        "zero point": r"weight_zero_point has shape \(1, 1\) where \(\d, \d\) is expected",
        "transform": "have a transform_config, which is not read",
        "format": "is stored as marlin-24 of compressed-tensors, which is not read",
        "groups": "2 groups of the quantization_config hold model.layers.0",
        "config": "is not understood by compressed-tensors",
    }.items(),
)
def test_other_compressed_tensors_are_refused(change: str, cause: str, own_checkpoint: MakeCheckpoint) -> None:
    pytest.importorskip("compressed_tensors", reason="the extra `compressed`")
    folder = own_checkpoint(dtype=torch.bfloat16)
    stated, path, module = quantise(folder, "w4a16"), folder / "model.safetensors", "model.layers.0.mlp.up_proj"
    stored, group = load_file(path), dict(stated["config_groups"]["group_0"])
    if change == "scale":
        stored[f"{module}.weight_scale"] = stored[f"{module}.weight_scale"][:, :1].contiguous()
    elif change == "shape":
        stored[f"{module}.weight_shape"] = torch.tensor([64, 31])
    elif change == "no shape":
        del stored[f"{module}.weight_shape"]
    elif change == "no scale":
        del stored[f"{module}.weight_scale"]
    elif change == "order":
        stored[f"{module}.weight_g_idx"] = torch.zeros(32, dtype=torch.int32)
    elif change in ("no zero point", "zero point"):
        stated["config_groups"]["group_0"] = group | {"weights": group["weights"] | {"symmetric": False}}
        if change == "zero point":
            packed = [name for name in stored if name.endswith("weight_scale")]
            stored |= {name.replace("_scale", "_zero_point"): torch.zeros(1, 1, dtype=torch.int32) for name in packed}
    elif change == "transform":
        stated["transform_config"] = {"config_groups": {"u": {}}}
    elif change == "format":
        stated["format"] = "marlin-24"
    elif change == "groups":
        stated["config_groups"]["group_1"] = group
    else:
        stated["config_groups"]["group_0"] = group | {"weights": {"num_bits": "many"}}
    save_file(stored, path, metadata={"format": "pt"})
    edit_config(folder, quantization_config=stated)
    with pytest.raises(CheckpointError, match=cause):
        Checkpoint(folder).read_one(f"{module}.weight")


def test_the_package_is_named_where_it_is_missing(
    own_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_checkpoint()
    path = folder / "model.safetensors"
    scale = {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(64, 1)}
    save_file(load_file(path) | scale, path, metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "compressed-tensors", "format": "int-quantized"})
    monkeypatch.setitem(sys.modules, "compressed_tensors.quantization", None)
    with pytest.raises(CheckpointError, match=r"pip install 'oneshot-llm\[compressed\]'"):
        Checkpoint(folder)


def pack(fields: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack numbers along a dimension into words of 32 bits, the first in the lowest bits."""
    words = fields.unflatten(dim, (-1, 32 // bits)).movedim(dim + 1, -1).tolist()

    def packed(part: Any) -> Any:
        if isinstance(part[0], list):
            return [packed(one) for one in part]
        word = sum(int(number) << bits * place for place, number in enumerate(part))
        return word - 2**32 if word >= 2**31 else word

    return torch.tensor(packed(words), dtype=torch.int32)


def to_words(folder: Path, method: str, **stated: Any) -> dict[str, torch.Tensor]:
    """Store random integers in the place of the layers' linears, as GPTQ or AWQ; return what they stand for."""
    path, bits, size = folder / "model.safetensors", stated["bits"], stated["group_size"]
    dense, generator = load_file(path), torch.Generator().manual_seed(0)
    stored, meant, largest = dict(dense), dict(dense), 2**bits
    for name in [name for name in dense if "proj" in name]:
        outputs, inputs = dense[name].shape
        groups = 1 if size == -1 else inputs // size
        of_input = torch.arange(inputs) // (inputs if size == -1 else size)
        if stated.get("desc_act"):
            of_input = of_input[torch.randperm(inputs, generator=generator)]
        integers = torch.randint(0, largest, (inputs, outputs), generator=generator)
        zeros = torch.randint(0, largest, (groups, outputs), generator=generator)
        scales = (torch.rand(groups, outputs, generator=generator) / 50).half()
        weight = scales.double()[of_input] * (integers - zeros[of_input])
        meant[name] = weight.T.half()
        module = name.removesuffix(".weight")
        del stored[name]
        if method == "awq":
            order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the outputs in the fields of a word
            integers, zeros = (one.unflatten(1, (-1, 8))[..., order].flatten(1) for one in (integers, zeros))
        else:
            stored[f"{module}.g_idx"] = of_input.int()
            stored[f"{module}.bias"] = torch.zeros(outputs).half()  # as in the files of Qwen2
            zeros = (zeros - 1) % largest if stated.get("checkpoint_format") != "gptq_v2" else zeros
        stored[f"{module}.qweight"] = pack(integers, bits, 0 if method == "gptq" else 1)
        stored[f"{module}.qzeros"] = pack(zeros, bits, 1)
        stored[f"{module}.scales"] = scales
    save_file(stored, path, metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": method} | stated)
    return meant


@pytest.mark.parametrize(
    ("method", "stated"),
    [
        ("gptq", {"bits": 4, "group_size": 16, "desc_act": True}),
        ("gptq", {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}),
        ("gptq", {"bits": 2, "group_size": 32}),
        ("awq", {"bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}),
    ],
)
def test_words_of_integers_are_what_they_stand_for(
    method: str, stated: dict[str, Any], own_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix is dequantised in panels of its outputs."""
    monkeypatch.setattr("oneshot.checkpoint.gptq.PANEL", 16)
    folder = own_checkpoint(dtype=torch.float16)
    meant = to_words(folder, method, **stated)
    checkpoint = open_model(str(folder), folder).checkpoint
    assert checkpoint.shapes.keys() == meant.keys()
    for name, tensor in checkpoint.read(checkpoint.shapes).items():
        assert tensor.dtype == torch.float16
        assert torch.equal(tensor, meant[name]), name


def test_awq_is_what_compressed_tensors_makes_of_it(own_checkpoint: MakeCheckpoint) -> None:
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    folder, module = own_checkpoint(dtype=torch.float16), "model.layers.0.mlp.up_proj"
    to_words(folder, "awq", bits=4, group_size=16, version="gemm")
    stored, converter = load_file(folder / "model.safetensors"), converters.AutoAWQConverter(group_size=16)
    parts = (stored[f"{module}.{one}"] for one in ("qweight", "scales", "qzeros"))
    integers, scales, zeros = converter._convert_gemm_module(*parts)
    each = 16
    theirs = (integers.double() - zeros.double().repeat_interleave(each, 1)) * scales.double().repeat_interleave(
        each, 1
    )
    assert torch.equal(Checkpoint(folder).read_one(f"{module}.weight"), theirs.half())


@pytest.mark.parametrize(
    ("change", "cause"),
    {
        "zeros": "has parts of shapes .* which do not fit each other in groups of 16",
        "groups": "g_idx names groups that have no scales",
        "bits": "with 3 bits in groups of 16, which is not read",
        "format": "stored as marlin of gptq",
    }.items(),
)
def test_damaged_words_are_refused(change: str, cause: str, own_checkpoint: MakeCheckpoint) -> None:
    folder, module = own_checkpoint(dtype=torch.float16), "model.layers.0.mlp.up_proj"
    stated: dict[str, Any] = {"bits": 4, "group_size": 16}
    to_words(folder, "gptq", **stated)
    path = folder / "model.safetensors"
    stored = load_file(path)
    if change == "zeros":
        del stored[f"{module}.qzeros"]
    elif change == "groups":
        stored[f"{module}.g_idx"] += 1
    stated |= {"bits": {"bits": 3}, "format": {"checkpoint_format": "marlin"}}.get(change, {})
    save_file(stored, path, metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "gptq"} | stated)
    with pytest.raises(CheckpointError, match=cause):
        Checkpoint(folder).read_one(f"{module}.weight")
