"""GGUF input: what a file states is what the converted checkpoint computes, or it is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, topics
from hypothesis import given
from hypothesis import strategies as st

from oneshot.checkpoint import locate_checkpoint, open_gguf
from oneshot.checkpoint.gguf_file import GgufFile, GgufModel
from oneshot.checkpoint.gguf_rotary import reason_against_rotary, rotary_factors, rotary_parameters
from oneshot.config import Config
from oneshot.errors import CheckpointError, OneshotError
from oneshot.evaluation.models import load_model
from oneshot.max_loss import compress_within
from oneshot.pipeline import compress, compress_sizes, imatrix, predict, profile
from oneshot.text import load_tokenizer

CPU = torch.device("cpu")
TOKEN_IDS = torch.randint(2, 400, (2, 48), generator=torch.Generator().manual_seed(1))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
POSITIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5},
    "llama3": LLAMA3,
    "llama3-without-mixed-factors": LLAMA3 | {"original_max_position_embeddings": 256, "rope_theta": 1e8},
    "yarn": YARN,
    "yarn-with-its-defaults": YARN | {"beta_fast": 32, "beta_slow": 1, "attention_factor": 0.1 * np.log(4) + 1},
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2", "rope_parameters": YARN},
    "qwen3": {"family": "qwen3", "head_dim": 16, "rope_parameters": YARN},
    "wide heads": {"head_dim": 16},
}


def several(config: Config) -> None:
    compress_sizes(config, [0.05, 0.06])


def within(config: Config) -> None:
    compress_within(config, lambda *_: pytest.fail("it is checked"))


REQUESTS: dict[str, tuple[Callable[[Config], Any], dict[str, Any], str]] = {
    "output": (compress, {"output": "in-the-way"}, "in-the-way exists"),
    "one of several outputs": (several, {"output": "in-the-way"}, "sparsity-0.06 exists"),
    "text": (compress, {"calibration": "missing.txt"}, r"missing\.txt does not exist"),
    "text of a profile": (profile, {"calibration": "missing.txt"}, r"missing\.txt does not exist"),
    "text of an importance matrix": (imatrix, {"calibration": "missing.txt"}, r"missing\.txt does not exist"),
    "size": (compress, {"sparsity": 0.99}, "down to"),
    "text for a budget of seconds": (compress, {"budget": "latency", "calibration": "missing.txt"}, r"missing\.txt"),
    "setting of a loss": (within, {"sparsity": None, "max_loss": 0.1}, "--max-loss is planned by a profile"),
}
Edit = Callable[..., Path]


@pytest.fixture
def edited(as_gguf: Edit, tmp_path: Path) -> Edit:
    """`edited(changed metadata, tensors=…, without=…)` -> a copy of a Llama's file with other content."""

    def make(metadata: dict[str, Any], *, tensors: dict[str, np.ndarray] | None = None, without: str = "") -> Path:
        import gguf

        reader = gguf.GGUFReader(as_gguf())
        path = tmp_path / "edited.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture" and name not in metadata:
                inner = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], inner)
        for name, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            else:
                (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
        for tensor in reader.tensors:
            if tensor.name != without:
                writer.add_tensor(tensor.name, np.array(tensor.data))
        for name, values in (tensors or {}).items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        values: torch.Tensor = load_model(folder, device=CPU, dtype=torch.float32)(TOKEN_IDS).logits
    return values


def assert_same_model(written: Path, original: Path, scratch: Path) -> None:
    """Assert that the weights are equal to the last bit, and what they compute to rounding."""
    from safetensors.torch import load_file

    folder = locate_checkpoint(str(written), scratch)
    found, wanted = (load_file(place / "model.safetensors") for place in (folder, original))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    torch.testing.assert_close(logits(folder), logits(original), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_rotary_positions_survive(
    positions: dict[str, Any], as_gguf: Edit, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    options = {"head_dim": 16, "rope_parameters": positions}
    assert_same_model(as_gguf(**options), make_checkpoint(**{"layers": 1} | options), tmp_path)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_a_model_survives(
    options: dict[str, Any], as_gguf: Edit, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    assert_same_model(as_gguf(**options), make_checkpoint(**{"layers": 1} | options), tmp_path)


def test_a_compressed_result_of_its_own_file_keeps_the_positions(
    as_gguf: Edit, make_config: MakeConfig, tmp_path: Path
) -> None:
    """From a file to a file: the second one has the table of factors that the first one has."""
    first = as_gguf(rope_parameters=LLAMA3)
    compress(make_config(first, form="gguf", allocation="uniform", sparsity=0.05, output=str(tmp_path / "again")))
    files = [GgufFile(path) for path in (first, tmp_path / "again" / "model.gguf")]
    tables = [file.read("rope_freqs.weight") for file in files]
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-6)


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)], ids=["3.1", "3.2"])
def test_the_tables_of_llama_3_are_read_exactly(factor: float, head_dim: int) -> None:
    """The published settings of Llama 3.1 and of the small models of Llama 3.2."""
    rotary = LLAMA3 | {"rope_theta": 500000.0, "factor": factor, "original_max_position_embeddings": 8192}
    table = rotary_factors(rotary, head_dim)
    assert rotary_parameters({"freq_base": 500000.0}, table, head_dim=head_dim, context_length=131072) == rotary


@given(
    theta=st.sampled_from([1e3, 1e4, 5e5]),
    head_dim=st.sampled_from([16, 64, 128]),
    factor=st.sampled_from([2.0, 8.0, 32.0]),
    high=st.sampled_from([2.0, 4.0, 8.0]),
    length=st.integers(64, 16384),
)
def test_a_table_of_factors_is_read_or_refused(
    theta: float, head_dim: int, factor: float, high: float, length: int
) -> None:
    """What is read gives the table again, so it gives the model's positions."""
    rotary = LLAMA3 | {"rope_theta": theta, "factor": factor, "high_freq_factor": high}
    rotary |= {"original_max_position_embeddings": length}
    table = rotary_factors(rotary, head_dim)
    assert table is not None
    try:
        read = rotary_parameters({"freq_base": theta}, table, head_dim=head_dim, context_length=1024)
    except ValueError:
        return
    again = rotary_factors(read, head_dim)
    np.testing.assert_allclose(np.ones_like(table) if again is None else again, table, rtol=2e-4)


@pytest.mark.parametrize(
    ("metadata", "stated"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_attn_factor": 1.2}, "yarn_attn_factor"),
        ({"llama.rope.dimension_count": 4}, r"different sizes \[4, 8\]"),
        ({"llama.attention.scale": 0.5}, "attention.scale"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.feed_forward_length": [64, 32]}, "feed_forward_length"),
        ({"general.alignment": 0}, "cannot be read as GGUF"),
        *(({"general.type": kind}, f"general.type is {kind}") for kind in ("adapter", "mmproj", "imatrix", 7)),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base nan, which is not a number"),
    ],
    ids=str,
)
def test_what_no_config_states_is_refused(metadata: dict[str, Any], stated: str, edited: Edit) -> None:
    with pytest.raises(CheckpointError, match=stated):
        open_gguf(str(edited(metadata)))


def test_factors_that_are_not_llama_3s_are_refused(edited: Edit) -> None:
    table = np.array([1.0, 3.0, 2.0, 5.0], np.float32)
    with pytest.raises(CheckpointError, match="not Llama 3's"):
        open_gguf(str(edited({}, tensors={"rope_freqs.weight": table})))


def test_factors_of_one_change_nothing(edited: Edit) -> None:
    source = open_gguf(str(edited({}, tensors={"rope_freqs.weight": np.ones(4, np.float32)})))
    assert source is not None
    assert source.config["rope_parameters"]["rope_type"] == "default"


def test_an_unknown_tensor_is_refused(edited: Edit) -> None:
    path = edited({}, tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match="attn_sinks"):
        open_gguf(str(path))


def test_a_missing_tensor_is_named(edited: Edit) -> None:
    with pytest.raises(CheckpointError, match=r"lacks the tensor blk\.0\.ffn_up\.weight"):
        open_gguf(str(edited({}, without="blk.0.ffn_up.weight")))


def test_layers_of_different_sizes_are_refused(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    compress(make_config(make_checkpoint(layers=3), form="gguf"))
    with pytest.raises(CheckpointError, match=r"sizes of their own \(architecture deci\).*llama-perplexity"):
        open_gguf(str(tmp_path / "out" / "model.gguf"))


@pytest.mark.parametrize(
    ("rotary", "stated"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "the type dynamic"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (YARN | {"beta_fast": 16}, "beta_fast 16"),
        (YARN | {"truncate": False}, "truncate False"),
        (YARN | {"attention_factor": 1.0}, "attention_factor 1"),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "attention_factor 1"),
        (YARN, None),
        (LLAMA3, None),
    ],
    ids=str,
)
def test_what_a_file_cannot_state(rotary: dict[str, Any], stated: str | None) -> None:
    assert reason_against_rotary(rotary) == stated


def test_the_layout_is_read_as_the_package_gguf_reads_it(tmp_path: Path) -> None:
    """All types that gguf can write, beside vectors; panels of rows and parts of tensors change nothing."""
    import gguf

    kinds = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    values = np.random.default_rng(0).normal(size=(7, 64)).astype(np.float32)
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("some.strings", ["a", "löng", ""])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_bool("some.truth", True)
    for kind in kinds:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.add_tensor("vector", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, reader = GgufModel(path), gguf.GGUFReader(path)
    assert file.metadata["some.strings"] == 3
    assert file.metadata["some.numbers"] == [1, 2, 3]
    assert file.metadata["some.truth"] is True
    assert file.main_kind == "F32"
    for tensor in reader.tensors:
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert file.tensors[tensor.name].kind == tensor.tensor_type.name
        np.testing.assert_array_equal(file.read(tensor.name), wanted)
        np.testing.assert_array_equal(file.read(tensor.name, slice(2, 5)), wanted[2:5])


def test_panels_are_the_whole(as_gguf: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GgufFile(as_gguf("q8_0"))
    whole = file.read("token_embd.weight")
    monkeypatch.setattr("oneshot.checkpoint.gguf_file.PANEL_VALUES", 100)
    np.testing.assert_array_equal(file.read("token_embd.weight"), whole)


def test_a_truncated_or_changed_file_is_refused(as_gguf: Edit, tmp_path: Path) -> None:
    written = as_gguf()
    whole, path = written.read_bytes(), tmp_path / "cut.gguf"
    header = min(tensor.start for tensor in GgufFile(written).tensors.values())
    for length in (0, 3, 4, 20, 24, 100, header // 2, header - 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_gguf(str(path))
    for place, count in ((4, 4), (8, 8), (16, 8), (24, 8)):  # version, tensors, keys, the first string
        path.write_bytes(whole[:place] + b"\xff" * count + whole[place + count :])
        with pytest.raises(CheckpointError):
            open_gguf(str(path))


# What lies beside the file, and what is written


def test_a_tokenizer_beside_the_file_changes_nothing(as_gguf: Edit, tmp_path: Path) -> None:
    """Every result of the form gguf has a tokenizer.json beside it."""
    path = as_gguf()
    assert (path.parent / "tokenizer.json").exists()
    alone = tmp_path / "alone" / "model.gguf"
    alone.parent.mkdir()
    shutil.copy(path, alone)
    folders = [locate_checkpoint(str(file), tmp_path / "scratch") for file in (path, alone)]
    names = [sorted(file.name for file in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert "chat_template.jinja" in names[0]
    for name in names[0]:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    config = json.loads((folders[0] / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "</s>", "</s>")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 does not know today's name
    tokenizers = [load_tokenizer(folder) for folder in (folders[0], path.parent)]
    text = topics(0, 2) + "<|endoftext|>"  # which is not a token of the file
    found, wanted = (tokenizer(text)["input_ids"] for tokenizer in tokenizers)
    assert len(tokenizers[0]) == len(tokenizers[1]) == 400
    assert found == wanted
    config = json.loads((folders[0] / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, 1)


@pytest.mark.parametrize(
    ("stored", "result"),
    [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("q8_0", "bfloat16")],
)
def test_the_result_has_the_files_dtype(stored: str, result: str, as_gguf: Edit, make_config: MakeConfig) -> None:
    """A quantised file gives bfloat16, and the report, the card and the prediction say so."""
    path = as_gguf(stored)
    config = make_config(path, sparsity=0.05)
    predicted = predict(config).result_bytes
    report = compress(config)
    folder = Path(config.output)
    assert json.loads((folder / "config.json").read_text())["dtype"] == result
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(predicted, rel=0.1)
    assert report.config["save_dtype"] == result
    assert f"Weights are stored as `{result}`." in (folder / "README.md").read_text()


def test_a_warning_is_given_once(as_gguf: Edit, make_config: MakeConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Plan before the conversion and after it, and tell once."""
    compress(make_config(as_gguf(), sparsity=0.05, num_sequences=2))
    assert "calibration tokens are few" in caplog.text
    assert len(caplog.messages) == len({*caplog.messages})


@pytest.mark.parametrize(("run", "unfit", "told"), REQUESTS.values(), ids=REQUESTS)
def test_a_request_that_fails_converts_nothing(
    run: Callable[[Config], Any],
    unfit: dict[str, Any],
    told: str,
    as_gguf: Edit,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is said before the error."""
    monkeypatch.setattr("oneshot.checkpoint.locate.convert_gguf", lambda *_: pytest.fail("it is converted"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in-the-way" / "sparsity-0.06").mkdir(parents=True)
    (tmp_path / "in-the-way" / "sparsity-0.06" / "precious").touch()
    config = make_config(as_gguf(), **{"sparsity": 0.05} | unfit)
    with pytest.raises(OneshotError, match=told):
        run(config)
    assert not caplog.records


def test_a_gguf_file_becomes_a_smaller_one(as_gguf: Edit, make_config: MakeConfig, tmp_path: Path) -> None:
    """A prediction reads headers only, so it asks for no tokenizer beside the file."""
    path = Path(shutil.copy(as_gguf(), tmp_path / "alone.gguf"))
    tokenizer = path.with_name("tokenizer.json")
    assert not tokenizer.exists()
    config = make_config(path, sparsity=0.05, form="gguf")
    predicted = predict(config).stored_parameters
    made = compress(config).stored_parameters
    assert made["dense"] == predicted["dense"]
    assert made["compressed"] == pytest.approx(predicted["compressed"], rel=0.01)  # a profile decides the last step


def test_several_weight_files(as_gguf: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_gguf()
    whole = logits(locate_checkpoint(str(path), tmp_path / "whole"))
    monkeypatch.setattr("oneshot.checkpoint.gguf.SHARD_BYTES", 20_000)
    folder = locate_checkpoint(str(path), tmp_path / "parts")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert torch.equal(logits(folder), whole)


def test_equal_numbers_of_all_layers_are_one_number(edited: Edit) -> None:
    source = open_gguf(str(edited({"llama.attention.head_count": [4], "llama.feed_forward_length": [96]})))
    assert source is not None
    assert (source.config["num_attention_heads"], source.config["intermediate_size"]) == (4, 96)


@pytest.mark.parametrize("name", ["eos", "bos", "padding"])
def test_a_special_token_beyond_the_tokens_is_told(name: str, edited: Edit) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{name}_token_id 9999, but it has \d+ tokens"):
        open_gguf(str(edited({f"tokenizer.ggml.{name}_token_id": 9999})))
