"""The importance matrix, against what every product with a weight reads while the whole stock model runs in float64."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model, calibration_tokens, cpu_machine, silence
from families.cases import CASES
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from oneshot.checkpoint import IMPORTANCE_NAME, Model, open_model
from oneshot.cli.main import main
from oneshot.errors import CheckpointError
from oneshot.evaluation import load_model
from oneshot.export import open_folder
from oneshot.export.imatrix import as_converted, tensor_names
from oneshot.pipeline import compress
from oneshot.profiling import measure_importance
from oneshot.stream import InputSquares
from oneshot.text import Text

TOKEN_IDS = torch.randint(2, 400, (3, 24), generator=torch.Generator().manual_seed(1))
# of each kind: plain, a fused linear, transposed ones, heads fused in turns, latent attention, carried mixers, what
# layers read of tokens, experts beside a shared one, experts in turns with biases
KINDS = (
    "llama",
    "phi3",
    "gpt2",
    "falcon",
    "deepseek_v3",
    "qwen3_5_text",
    "gemma4_text",
    "qwen2_moe",
    "gpt_oss",
)
DECODERS = [name for name, case in CASES.items() if case.packed and "self text" not in case.refused]
NO_ARCHITECTURE = ("cwm", "helium", "ministral", "opt")
# deepseek's, which llama.cpp absorbs; a head of its own, which llama.cpp's lfm2moe cannot have
NO_TENSOR = {"lfm2_moe": "lm_head"}
ABSORBED = "self_attn.kv_b_proj"


class Reads(TorchFunctionMode):
    """Sum the squares of what is multiplied by each weight, by the weight's place in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[int, Any] = defaultdict(float)
        self.counts: dict[int, int] = defaultdict(int)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = {functional.linear: (0, 1), torch.Tensor.matmul: (0, 1), torch.matmul: (0, 1), torch.addmm: (1, 2)}
        if function in places:
            rows, weight = (args[place] for place in places[function])
            if weight.ndim == 2 and weight.shape[0 if function != functional.linear else 1] == rows.shape[-1]:
                self.sums[weight.data_ptr()] += rows.flatten(0, -2).square().sum(0)
                self.counts[weight.data_ptr()] += rows[..., 0].numel()
        return function(*args, **(kwargs or {}))

    def of(self, weight: torch.Tensor, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums `(n,)` of a weight, or `(E, n)` of experts, and the tokens in them."""
        parts = weight.unbind() if weight.ndim == 3 else (weight,)
        nothing = torch.zeros(inputs, dtype=torch.float64)
        sums = [torch.as_tensor(self.sums.get(one.data_ptr(), nothing)) for one in parts]
        counts = torch.tensor([self.counts.get(one.data_ptr(), 0) for one in parts])
        return (torch.stack(sums) if weight.ndim == 3 else sums[0]), counts


def whole_reads(model: Any, token_ids: torch.Tensor) -> Reads:
    """Return what the weights of a model read of a text, in one pass of its own."""
    with torch.no_grad(), Reads() as reads:
        model(token_ids, use_cache=False)
    return reads


def stock_model(folder: Path) -> Any:
    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def assert_equal_reads(squares: InputSquares, reads: Reads, model: Any) -> None:
    """Compare all sums with a whole model's; every weight of a layer that multiplies has some."""
    weights = dict(model.named_parameters())
    for name, sums in squares.sums.items():
        weight = weights.get(f"{name}.weight", weights.get(name))
        assert weight is not None, name
        expected, counts = reads.of(weight, sums.shape[-1])
        torch.testing.assert_close(
            sums, expected.double(), rtol=2e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert squares.counts[name].tolist() == counts.tolist(), name
    found = {weights.get(f"{name}.weight", weights.get(name)) for name in squares.sums}
    in_layers = {name for name in weights if any(part.isdigit() for part in name.split("."))}
    assert {
        name for name in in_layers if weights[name].data_ptr() in reads.sums and weights[name] not in found
    } == set()


def measured(folder: Path, scratch: Path) -> tuple[Model, InputSquares]:
    with torch.inference_mode():
        model = open_model(str(folder), scratch)
        return model, measure_importance(model, Text(TOKEN_IDS, "a test"), cpu_machine(scratch, batch_size=2))


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.grid]) for name in DECODERS],
)
def test_sums_and_names_of_a_family(family: str, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint(**CASES[family].options)
    model, squares = measured(folder, tmp_path)
    stock = stock_model(folder)
    assert_equal_reads(squares, whole_reads(stock, TOKEN_IDS), stock)
    if family in NO_ARCHITECTURE:
        with pytest.raises(CheckpointError, match=f"no architecture for {family}"):
            tensor_names(model)
        return
    names = tensor_names(model)
    lacking = {name for name in squares.sums if not names.of(name)}
    assert {name for name in lacking if not name.endswith((ABSORBED, NO_TENSOR.get(family, ABSORBED)))} == set()
    tensors = [tensor for name in squares.sums for tensor in names.of(name)]
    assert len(tensors) == len(set(tensors))
    has_head = not model.shape.tied and model.family.head is not None
    assert ("output.weight" in tensors) == (has_head and family not in NO_TENSOR)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return the metadata and the tensors of a file."""
    import gguf

    reader = gguf.GGUFReader(path)
    return (
        {name: field.contents() for name, field in reader.fields.items()},
        {tensor.name: np.array(tensor.data) for tensor in reader.tensors},
    )


def test_the_command_writes_llama_cpps_file(make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path) -> None:
    """Its counts are one for each tensor, and for experts one for each of them, in the shapes of llama-imatrix."""
    folder, path = make_checkpoint(**CASES["qwen2_moe"].options), tmp_path / "im.gguf"
    text = [f"--calibration={text_file}", "--num-sequences=3", "--sequence-length=16", "--device=cpu"]
    assert main(["imatrix", str(folder), f"--output={path}", *text, "--quiet"]) == 0
    fields, tensors = read(path)
    assert fields["general.type"] == "imatrix"
    assert fields["imatrix.datasets"] == [str(text_file)]
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (3, 16)
    assert {values.dtype for values in tensors.values()} == {np.dtype(np.float32)}
    assert tensors["blk.0.attn_k.weight.in_sum2"].shape == (32,)
    assert tensors["blk.0.attn_k.weight.counts"].tolist() == [48]
    of_experts = tensors["blk.0.ffn_gate_exps.weight.counts"]
    assert of_experts.shape == (4, 1)
    assert of_experts.sum() == 2 * 48
    assert tensors["blk.0.ffn_down_exps.weight.in_sum2"].shape == (4, 32)
    assert (tensors["blk.0.ffn_up_exps.weight.in_sum2"] == tensors["blk.0.ffn_gate_exps.weight.in_sum2"]).all()
    assert list(tensors) == sorted(tensors, key=lambda name: (name.rpartition(".")[0], name.endswith("counts")))


def test_experts_without_tokens_are_told(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tokens cannot reach more than four experts of eight."""
    folder, path = make_checkpoint(**CASES["qwen2_moe"].options | {"num_experts": 8}), tmp_path / "im.gguf"
    text = [f"--calibration={text_file}", "--num-sequences=1", "--sequence-length=2", "--device=cpu"]
    assert main(["imatrix", str(folder), f"--output={path}", *text, "--quiet"]) == 0
    counts = read(path)[1]["blk.0.ffn_up_exps.weight.counts"].flatten()
    without = [str(number) for number, count in enumerate(counts) if count == 0]
    told = f"{len(without)} of 8 experts in blk.0.ffn_up_exps.weight got no token of the text ({', '.join(without)})"
    assert told in caplog.text
    assert len(without) >= 4


def test_a_gguf_result_has_its_own_importance(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, save_model: Any
) -> None:
    """Of the smaller model as the file has it: other widths in every layer, and an FFN left out."""
    model = build_model(layers=3)
    silence(model, ffn=[1])
    config = make_config(save_model(model), form="gguf", sparsity=0.3, depth="sublayers", embedding="none")
    compress(config)
    _, tensors = read(Path(config.output) / IMPORTANCE_NAME)
    own = json.loads((Path(config.output) / "config.json").read_text())
    widths = [layer["intermediate_size"] for layer in own["layers"]]
    assert 0 in widths
    opened = load_model(open_folder(config.output, tmp_path), device=torch.device("cpu"), dtype=torch.float64)
    reads = whole_reads(opened, calibration_tokens(config))
    for name, module in (
        ("attn_q", "self_attn.q_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_down", "mlp.down_proj"),
    ):
        for layer, width in enumerate(widths):
            sums, counts = (tensors[f"blk.{layer}.{name}.weight.{part}"] for part in ("in_sum2", "counts"))
            assert counts.tolist() == [config.text.num_tokens]
            if name == "ffn_down" and not width:
                assert sums.tolist() == [0]
                continue
            expected, _ = reads.of(opened.get_parameter(f"model.layers.{layer}.{module}.weight"), len(sums))
            np.testing.assert_allclose(sums, expected, rtol=1e-4)


def test_a_conversion_without_a_text_reads_none(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """The default text is on the Hub, which a conversion never asked."""
    config = make_config(make_checkpoint(), form="gguf", sparsity=0.0)
    compress(replace(config, text=replace(config.text, calibration="c4")))
    assert not (Path(config.output) / IMPORTANCE_NAME).exists()


def test_heads_of_values_are_in_the_order_of_llama_cpps_converter() -> None:
    """Two heads of keys with three heads of values of size 2 each: the first of both come first."""
    config = {"linear_num_key_heads": 2, "linear_value_head_dim": 2}
    sums = as_converted("qwen35", "blk.0.ssm_out.weight", torch.arange(12.0), config)
    assert sums.tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    factors = {"attention_in_multiplier": 0.5}
    assert as_converted("falcon-h1", "blk.0.attn_q.weight", torch.ones(2), factors).tolist() == [4, 4]


def test_what_cannot_be_written_is_refused(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there.gguf"
    there.touch()
    cases = {
        str(tmp_path): "is a folder; name a file",
        str(there): "exists already; choose another --output or add --overwrite",
        str(tmp_path / "no" / "im.gguf"): "is not a folder; name a file in one that exists",
    }
    for output, sentence in cases.items():
        assert main(["imatrix", str(make_checkpoint()), f"--output={output}", f"--calibration={text_file}"]) == 1
        assert sentence in capsys.readouterr().err
    for folder, sentence in ((make_checkpoint(**CASES["opt"].options), "no architecture for opt"),):
        assert main(["imatrix", str(folder), f"--output={tmp_path / 'x.gguf'}", f"--calibration={text_file}"]) == 1
        assert sentence in capsys.readouterr().err
    assert there.stat().st_size == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.gguf"]
