"""The form gguf, against a computation of llama.cpp's graph in this file, and against transformers' tokenizer."""

import itertools
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import Fails, MakeCheckpoint, MakeConfig, build_model, silence, topics
from families.cases import CASES

from oneshot import OneshotError
from oneshot.checkpoint.layout import lay_out
from oneshot.checkpoint.weight_files import WeightFiles
from oneshot.errors import CheckpointError, PlanError
from oneshot.evaluation import evaluate, load_model
from oneshot.export import gguf as form
from oneshot.export import gguf_tensors, open_folder
from oneshot.export.gguf_vocabulary import CONTRACTIONS, REST, WORDS, Vocabulary, split_rules
from oneshot.pipeline import compress, predict

CPU = torch.device("cpu")
TOKEN_IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(1))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "untied": ({}, "deci"),
    "tied": ({"tied": True}, "deci"),
    "biases": ({"attention_bias": True, "mlp_bias": True}, "deci"),
    "qwen2": ({"family": "qwen2"}, "deci"),
    "llama3-positions": ({"rope_parameters": LLAMA3}, "deci"),
    "uniform": ({}, "llama"),
    "uniform-qwen2": ({"family": "qwen2"}, "qwen2"),
    "uniform-qwen3": ({"family": "qwen3", "head_dim": 8, "tied": True}, "qwen3"),
}


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the metadata and the tensors of a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = torch.from_numpy(np.array(values, dtype=np.float64))
    return fields, tensors


def graph(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits as llama.cpp computes them; the pairs that positions turn are neighbours in llama and deci."""
    fields, tensors = read(path)
    arch = fields["general.architecture"]
    heads, groups = fields[f"{arch}.attention.head_count"], fields[f"{arch}.attention.head_count_kv"]
    size, epsilon = fields[f"{arch}.attention.key_length"], fields[f"{arch}.attention.layer_norm_rms_epsilon"]
    count = fields[f"{arch}.block_count"]
    widths = fields[f"{arch}.feed_forward_length"]
    heads, groups, widths = (one if isinstance(one, list) else [one] * count for one in (heads, groups, widths))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * tensors[f"{name}.weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    frequencies = fields[f"{arch}.rope.freq_base"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    if "rope_freqs.weight" in tensors:
        frequencies = frequencies / tensors["rope_freqs.weight"]
    angles = torch.arange(ids.shape[1], dtype=torch.float64).unsqueeze(1) * frequencies

    def turn(x: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos(), angles.sin()
        if arch in ("llama", "deci"):
            first, second = x[..., ::2], x[..., 1::2]
            return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
        first, second = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

    x = tensors["token_embd.weight"][ids]
    for block in range(count):
        at, before = f"blk.{block}", x
        if heads[block]:
            inside = norm(x, f"{at}.attn_norm")
            q, k, v = (linear(inside, f"{at}.attn_{part}").unflatten(-1, (-1, size)).transpose(1, 2) for part in "qkv")
            if f"{at}.attn_q_norm.weight" in tensors:
                q, k = norm(q, f"{at}.attn_q_norm"), norm(k, f"{at}.attn_k_norm")
            k, v = (one.repeat_interleave(heads[block] // groups[block], dim=1) for one in (turn(k), v))
            attended = torch.nn.functional.scaled_dot_product_attention(turn(q), k, v, is_causal=True)
            x = x + linear(attended.transpose(1, 2).flatten(2), f"{at}.attn_output")
        if not widths[block]:  # llama.cpp goes on with what was before attention
            x = before
            continue
        inside = norm(x, f"{at}.ffn_norm")
        gated = torch.nn.functional.silu(linear(inside, f"{at}.ffn_gate")) * linear(inside, f"{at}.ffn_up")
        x = x + linear(gated, f"{at}.ffn_down")
    head = "output" if "output.weight" in tensors else "token_embd"
    return linear(norm(x, "output_norm"), head)


@pytest.mark.parametrize(("options", "architecture"), MODELS.values(), ids=MODELS)
def test_llama_cpps_graph_gives_the_logits_of_the_per_layer_form(
    options: dict[str, Any],
    architecture: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(layers=3, **options)
    settings: dict[str, Any] = {"embedding": "none"}
    if architecture == "deci":
        settings |= {"heads": "id", "head_unit": "kv-group", "sparsity": 0.3}
    else:
        settings["allocation"] = "uniform"
    reports = {
        name: compress(make_config(folder, form=name, output=str(tmp_path / name), **settings))
        for name in ("gguf", "per-layer")
    }
    assert reports["gguf"].stored_parameters == reports["per-layer"].stored_parameters
    path = tmp_path / "gguf" / "model.gguf"
    fields, _ = read(path)
    assert fields["general.architecture"] == architecture
    with torch.inference_mode():
        wanted = load_model(tmp_path / "per-layer", device=CPU, dtype=torch.float32)(TOKEN_IDS).logits.double()
    torch.testing.assert_close(graph(path, TOKEN_IDS), wanted, rtol=1e-4, atol=2e-5)
    for number, place in enumerate((path, path.parent)):  # what evaluate and chat open
        (scratch := tmp_path / f"scratch-{number}").mkdir()
        with torch.inference_mode():
            opened = load_model(open_folder(str(place), scratch), device=CPU, dtype=torch.float32)
            torch.testing.assert_close(opened(TOKEN_IDS).logits.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "fills"),
    [
        ({"heads": "id", "head_unit": "kv-group", "sparsity": 0.3}, False),
        ({"hidden": "pca", "hidden_size": 24}, False),
        ({}, True),
    ],
    ids=["fewer heads", "smaller hidden size", "fewer neurons"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_architecture_of_equal_layers_holds_their_sizes(
    family: str, settings: dict[str, Any], fills: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """llama.cpp's `qwen2` wants heads that fill the hidden size (src/models/qwen2.cpp of llama-cpp-python 0.3.36)."""
    folder = make_checkpoint(family=family, **({"head_dim": 8} if family == "qwen3" else {}))
    config = make_config(folder, form="gguf", recipe="magnitude", allocation="uniform", **settings)
    compress(config)
    fields, tensors = read(Path(config.output) / "model.gguf")
    assert fields["general.architecture"] == ("deci" if family == "qwen2" and not fills else family)
    queries, hidden = tensors["blk.0.attn_q.weight"].shape
    assert (queries == hidden) == fills


@pytest.mark.parametrize("family", form.ARCHITECTURES)
def test_factors_of_positions_are_only_written_where_llama_cpp_reads_them(
    family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Of these architectures only `llama` and `deci` have them (src/models of llama-cpp-python 0.3.36).

    The loaders of the others make no `rope_freqs`, and refuse a file with a tensor that they do not make.
    """
    folder = make_checkpoint(**CASES[family].options | {"rope_parameters": LLAMA3})
    config = make_config(folder, form="gguf", sparsity=0.0)
    if family == "qwen3":
        with pytest.raises(OneshotError, match=r"positions \(the type llama3, which llama.cpp's qwen3 does not have\)"):
            predict(config)
        return
    compress(config)
    path = Path(config.output) / "model.gguf"
    fields, tensors = read(path)
    assert fields["general.architecture"] == ("deci" if family == "qwen2" else "llama")
    assert "rope_freqs.weight" in tensors
    with torch.inference_mode():
        wanted = load_model(folder, device=CPU, dtype=torch.float32)(TOKEN_IDS).logits.double()
    torch.testing.assert_close(graph(path, TOKEN_IDS), wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_attention_and_ffns_are_left_out(
    options: dict[str, Any], save_model: Callable[..., Path], make_config: MakeConfig, tmp_path: Path
) -> None:
    """Compare with the dense model, whose idle sublayers add nothing; the first attention stays."""
    model = build_model(layers=4, **options)
    silence(model, attention=[0, 2], ffn=[1, 3])
    gone = {"self_attn": model.model.layers[2].self_attn, "mlp": model.model.layers[1].mlp}
    sizes = {name: sum(one.numel() for one in part.parameters()) + 32 for name, part in gone.items()}  # and a norm
    wanted = sum(one.numel() for one in model.parameters()) - sizes["self_attn"] - 2 * sizes["mlp"]
    settings: dict[str, Any] = {"depth": "sublayers", "ffn": "none", "correction": "none", "parameters": wanted}
    config = make_config(save_model(model), form="gguf", **settings)
    report = compress(config)
    path = Path(config.output) / "model.gguf"
    fields, _ = read(path)
    assert fields["deci.attention.head_count"] == [4, 4, 0, 4]
    assert fields["deci.attention.head_count_kv"] == [2, 2, 0, 2]
    assert fields["deci.feed_forward_length"] == [64, 1, 64, 1]
    assert [layer["intermediate_size"] for layer in report.plan["layers"]] == [64, 0, 64, 0]
    biases = 2 * (2 + 32) if options.get("mlp_bias") else 0
    assert report.stored_parameters["compressed"] == wanted + 2 * 4 * 32 + biases  # neurons of zeros and their norms
    (scratch := tmp_path / "scratch").mkdir()
    opened = load_model(open_folder(str(path), scratch), device=CPU, dtype=torch.float32)
    with torch.inference_mode():
        wanted_logits = model(TOKEN_IDS).logits.double()
        torch.testing.assert_close(graph(path, TOKEN_IDS), wanted_logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(opened(TOKEN_IDS).logits.double(), wanted_logits, rtol=1e-4, atol=1e-4)


def test_beside_it_lie_tokenizer_card_and_report(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(layers=3), form="gguf")
    compress(config)
    folder = Path(config.output)
    assert not list(folder.glob("*.safetensors"))
    assert {"config.json", "tokenizer.json", "README.md", "oneshot_report.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert "llama-server" in (folder / "README.md").read_text()
    fields, _ = read(folder / "model.gguf")
    assert len(set(fields["deci.feed_forward_length"])) > 1


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_the_stored_dtype(dtype: str, kind: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    import gguf

    config = make_config(make_checkpoint(layers=3, attention_bias=True), form="gguf", save_dtype=dtype)
    compress(config)
    reader = gguf.GGUFReader(Path(config.output) / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {own for name, own in kinds.items() if name.endswith(".weight") and "norm" not in name} == {kind}
    assert {own for name, own in kinds.items() if "norm" in name or name.endswith(".bias")} == {"F32"}


def test_q8_0_is_the_quantised_file_of_the_inputs_dtype(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Compare with blocks that this test scales and rounds by itself; rows of broken blocks are float16."""
    import gguf

    folder = make_checkpoint(layers=3, attention_bias=True, dtype=torch.bfloat16)
    for dtype in ("q8_0", "keep"):
        compress(make_config(folder, form="gguf", save_dtype=dtype, round_to=8, output=str(tmp_path / dtype)))
    reader = gguf.GGUFReader(tmp_path / "q8_0" / "model.gguf")
    fields, unquantised = read(tmp_path / "keep" / "model.gguf")
    kinds = set()
    for tensor in reader.tensors:
        values = unquantised[tensor.name].numpy().astype(np.float32)
        kind, columns = tensor.tensor_type.name, values.shape[-1]
        kinds.add(kind)
        assert kind == ("F32" if values.ndim == 1 else "F16" if columns % 32 else "Q8_0")
        if kind != "Q8_0":
            assert np.array_equal(tensor.data, values.astype(tensor.data.dtype))
            continue
        blocks = values.reshape(-1, 32)
        scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        scaled = blocks * (np.float32(1) / scales)
        integers = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)  # as C's roundf
        stored = np.frombuffer(tensor.data.tobytes(), np.uint8).reshape(-1, 34)
        assert np.array_equal(stored[:, :2].copy().view(np.float16), scales.astype(np.float16))
        assert np.array_equal(stored[:, 2:].view(np.int8), integers)
    assert kinds == {"F32", "F16", "Q8_0"}
    assert reader.fields["general.file_type"].contents() == 7
    assert fields["general.file_type"] == 32
    config = json.loads((tmp_path / "q8_0" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_panels_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(37, 64)).astype(np.float32)
    whole = gguf_tensors.quantised("table", values)
    monkeypatch.setattr(gguf_tensors, "PANEL_VALUES", 5 * 64)
    assert np.array_equal(gguf_tensors.quantised("table", values), whole)


def test_beside_a_tensor_only_its_quantised_bytes_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    files = WeightFiles(lay_out([{"weight": values}], tmp_path, 2**62))
    files.write(0, {"weight": values})
    (place,) = files.layout.places
    monkeypatch.setattr(gguf_tensors, "PANEL_VALUES", 2**16)
    gguf_tensors.quantised("table", np.ones((1, 32), np.float32))  # imports
    tracemalloc.start()
    written = gguf_tensors.read_stored(place, "Q8_0", None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written.nbytes == values.numel() // 32 * 34
    assert peak < place.num_bytes + written.nbytes + 2 * 2**20


def test_the_size_of_q8_0_is_predicted(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(layers=3), form="gguf", save_dtype="q8_0", allocation="uniform", round_to=32)
    predicted = predict(config).result_bytes
    compress(config)
    import gguf

    reader = gguf.GGUFReader(Path(config.output) / "model.gguf")
    written = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert predicted == pytest.approx(written, rel=0.03)  # norms take four bytes
    assert "q8_0" in (Path(config.output) / "README.md").read_text()


def test_q8_0_needs_this_form(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    with pytest.raises(OneshotError, match=r"is a type of GGUF files .* leave it out"):
        make_config(make_checkpoint(), save_dtype="q8_0")


def test_an_interrupted_run_continues_from_the_parts(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(layers=3)
    whole = make_config(folder, form="gguf", output=str(tmp_path / "whole"))
    compress(whole)
    config = make_config(folder, form="gguf", output=str(tmp_path / "killed"))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(form, "make_durable", killed)
        with pytest.raises(KeyboardInterrupt):
            compress(config)
    assert (tmp_path / "killed.incomplete").exists()
    assert not (tmp_path / "killed").exists()
    compress(make_config(folder, form="gguf", output=str(tmp_path / "killed"), resume=True))
    assert (tmp_path / "killed" / "model.gguf").read_bytes() == (tmp_path / "whole" / "model.gguf").read_bytes()


def test_the_tokenizer_is_complete(tokenizer_folder: Path, tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer_folder, 402)
    tokens, types = vocabulary._tokens()
    assert (vocabulary.model, vocabulary.rules) == ("gpt2", "gpt-2")
    assert tokens[:400] == tokenizer.convert_ids_to_tokens(list(range(400)))
    assert tokens[400:] == ["[PAD400]", "[PAD401]"]
    assert types[:3] == [3, 3, 1]  # control, control, normal
    assert types[-1] == 5  # unused


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "both", "chat_template.json"])
def test_the_chat_template_is_the_one_that_transformers_takes(
    place: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Beside a template of its own for tools. Of `chat_template.json` it takes none, which is of processors."""
    import gguf
    from transformers import AutoTokenizer

    folder = tmp_path / "folder"
    shutil.copytree(tokenizer_folder, folder)
    (folder / "chat_template.jinja").unlink()
    if place == "chat_template.json":
        (folder / place).write_text('{"chat_template": "of the processor"}')
    if place in ("chat_template.jinja", "both"):
        (folder / "chat_template.jinja").write_text("of the file")
    if place in ("tokenizer_config.json", "both"):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "of the config"}))
    if place == "both":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("of tools")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    Vocabulary(folder, 400).write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = {
        name: field.contents()
        for name, field in gguf.GGUFReader(tmp_path / "a.gguf").fields.items()
        if name.startswith("tokenizer.chat_template")
    }
    chosen = AutoTokenizer.from_pretrained(folder)
    if chosen.chat_template is None:
        assert fields == {}
        return
    assert fields["tokenizer.chat_template"] == chosen.get_chat_template()
    tools = fields.get("tokenizer.chat_template.tool_use", fields["tokenizer.chat_template"])
    assert tools == chosen.get_chat_template(tools=[{}])


def test_scored_pieces_merge_in_the_order_of_the_merges(tmp_path: Path) -> None:
    """llama.cpp joins the neighbours whose piece has the highest score; so does this loop."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special[:3], show_progress=False, max_token_length=8)
    words = [word for word in topics(0, 5).split() if word.isascii()]
    tokenizer.train_from_iterator(words, trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = vocabulary | {name: len(vocabulary) + n for n, name in enumerate(special[3:])}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(tmp_path)
    size = len(content["model"]["vocab"])
    written = Vocabulary(tmp_path, size)
    assert (written.model, written.rules) == ("llama", "default")
    assert written._begins_with_space()
    tokens, types = written._tokens()
    assert types.count(6) == 256
    assert types[:3] == [2, 3, 3]
    scores = dict(zip(tokens, written._scores(tokens), strict=True))
    for word in words[::40]:
        pieces = list("▁" + word)
        while True:
            joined = [(scores.get(a + b, -2e6), -at) for at, (a, b) in enumerate(itertools.pairwise(pieces))]
            best = max(joined, default=(-2e6, 0))
            if best[0] <= -1e6:
                break
            pieces[-best[1] : 2 - best[1]] = ["".join(pieces[-best[1] : 2 - best[1]])]
        assert pieces == fast.tokenize(word)


@pytest.mark.parametrize(
    ("pattern", "ignores", "name"),
    [
        (CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST, True, "llama-bpe"),
        (CONTRACTIONS + WORDS + r"\p{N}" + REST, False, "qwen2"),
    ],
)
def test_rules_are_known_by_their_pattern(pattern: str, ignores: bool, name: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    levels = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    assert split_rules({"type": "Sequence", "pretokenizers": [split, levels]}, ignores) == name


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(PlanError, match=r"llama\.cpp's own converter"):
        split_rules({"type": "Whitespace"}, False)


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        ({"family": "opt"}, {}, "RMSNorms"),
        ({"family": "mistral", "sliding_window": 8}, {}, "no sliding attention window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "the type dynamic"),
        ({}, {"query_key_size": 4}, "needs --form per-layer; add it"),
        ({"family": "qwen3", "head_dim": 8, "attention_bias": True}, {}, "no biases beside norms of queries and keys"),
    ],
    ids=["layer-norms", "window", "positions", "inside-heads", "biases"],
)
def test_what_it_cannot_hold_is_refused(
    model: dict[str, Any],
    options: dict[str, Any],
    sentence: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    with pytest.raises(OneshotError, match=sentence):
        compress(make_config(make_checkpoint(**model), form="gguf", **options))


def test_a_file_of_own_sizes_alone_names_the_command_that_measures_it(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """It lies without its config.json, or beside the config.json of another result; the folder is measured."""
    config = make_config(make_checkpoint(layers=3), form="gguf", embedding="none")
    compress(config)
    folder = Path(config.output)
    options: dict[str, Any] = {"sequence_length": 32, "max_windows": 1, "decode_tokens": 0}
    [measured] = evaluate([str(folder)], [config.text.calibration], **options)
    assert measured.file_bytes == (folder / "model.gguf").stat().st_size
    (alone := tmp_path / "alone file.gguf").write_bytes((folder / "model.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=f"run llama-perplexity -m '{alone}' -f YOUR_TEXT"):
        evaluate([str(alone)], [config.text.calibration], **options)
    stated = json.loads((folder / "config.json").read_text())
    stated["layers"][0]["intermediate_size"] += 8
    (folder / "config.json").write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match=f"with llama.cpp alone: llama-perplexity -m {folder}/model.gguf -f"):
        evaluate([str(folder)], [config.text.calibration], **options)


def test_a_file_of_own_sizes_is_not_compressed_again(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, fails: Fails, tmp_path: Path
) -> None:
    """The command that is told starts from the original, and reaches the share that is left of two times the same."""
    source = make_checkpoint(layers=3)
    config = make_config(source, form="gguf", embedding="none", sparsity=0.1, output=str(tmp_path / "first"))
    stored = compress(config).stored_parameters
    share = 1 - (stored["compressed"] / stored["dense"]) ** 2
    command = f"larger share: oneshot compress {source} --form gguf --sparsity {share:.2f}"
    places = [tmp_path / "first", tmp_path / "first" / "model.gguf"]
    for place in places:
        fails(place, command)
    (tmp_path / "first" / "oneshot_report.json").unlink()
    for place in places:
        fails(place, "start from the model it came from with a larger share")
    predict(make_config(source, form="gguf", embedding="none", sparsity=round(share, 2), output=str(tmp_path / "next")))
