"""Checkpoints and texts that were made to harm or broke by chance: each gives one sentence, or the right result."""

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, build_model, topics
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import Checkpoint, open_model
from oneshot.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from oneshot.checkpoint.safe_files import MAX_JSON_BYTES, MAX_JSON_DEPTH
from oneshot.cli.compress import main
from oneshot.errors import CalibrationError, CheckpointError, OneshotError
from oneshot.export import write_companions
from oneshot.text import iter_documents

Compress = Callable[..., str]
EMBEDDING = "model.embed_tokens.weight"
FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def refused(tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> Compress:
    """Run the whole command line; it must fail with one line and leave nothing. Returns the line."""

    def run(checkpoint: Path, calibration: Path = text_file) -> str:
        output = tmp_path / "results" / "out"
        capsys.readouterr()
        assert main([*arguments(checkpoint, output, calibration), "--quiet"]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert len(captured.err.splitlines()) == 1
        assert "Traceback" not in captured.err
        assert not output.parent.exists() or not list(output.parent.iterdir())
        return captured.err

    return run


def arguments(checkpoint: Path, output: Path, text: Path) -> list[str]:
    options = ["--sparsity=0.2", "--num-sequences=4", "--sequence-length=16", "--device=cpu"]
    return [str(checkpoint), f"--output={output}", f"--calibration={text}", *options]


def message_of(folder: Path) -> str:
    """Return the message of the error that opening the folder raises; it is one line."""
    with pytest.raises(CheckpointError) as caught:
        open_model(str(folder), folder)
    message = str(caught.value)
    assert message.isprintable()
    assert message.endswith(".")
    return message


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_config(folder: Path, **changes: Any) -> None:
    edit_json(folder / "config.json", lambda config: config.update(changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE_NAME)
    edit(tensors)
    save_file(tensors, folder / SINGLE_NAME)


def replace_by_link(path: Path, target: Path | str) -> None:
    path.unlink()
    path.symlink_to(target)


# The index and the shards


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (None, "no weight_map"),
        ({}, "no weight_map"),
        (["a.safetensors"], "no weight_map"),
        ("a.safetensors", "no weight_map"),
        ({"a": 5}, "lies in 5"),
        ({"a": None}, "lies in None"),
        ({"a": ["b.safetensors"]}, "is not a safetensors file of this folder"),
        ({"a": "../x.safetensors"}, "is not a safetensors file of this folder"),
        ({"a": "/etc/x.safetensors"}, "is not a safetensors file of this folder"),
        ({"a": "sub/x.safetensors"}, "is not a safetensors file of this folder"),
        ({"a": ".."}, "is not a safetensors file of this folder"),
        ({"a": ""}, "is not a safetensors file of this folder"),
        ({"a": "pytorch_model.bin"}, "is not a safetensors file of this folder"),
        ({"a": "x\0.safetensors"}, "is not a safetensors file of this folder"),
        ({"a": "n" * 5000 + ".safetensors"}, "nnn"),
        ({"a\n\x1b[2J": 5}, "a\\n\\x1b[2J"),
    ],
)
def test_an_index_without_valid_shards(weight_map: Any, reason: str, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint(shard_size="20KB")
    (folder / INDEX_NAME).write_text(json.dumps({} if weight_map is None else {"weight_map": weight_map}))
    (folder.parent / "x.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    assert reason in message_of(folder)


@pytest.mark.parametrize("kind", ["folder", "pipe", "broken", "loop", "outside"])
@pytest.mark.parametrize("name", ["config.json", SINGLE_NAME, INDEX_NAME, "tokenizer.json", "vocab.txt", "LICENSE"])
def test_a_path_that_is_not_a_regular_file_of_the_folder(
    kind: str, name: str, own_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Reading a pipe would block; a file outside the folder would be published with the result."""
    folder = own_checkpoint(shard_size="20KB" if name == INDEX_NAME else "5GB")
    path, outside = folder / name, tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("{}")
    if kind == "folder":
        path.mkdir()
        if name in ("vocab.txt", "LICENSE", "tokenizer.json"):
            open_model(str(folder), folder)  # nobody reads such a folder
            return
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"broken": tmp_path / "gone", "loop": path, "outside": outside}[kind])
    reason = {
        "folder": "is not a regular file",
        "pipe": "is not a regular file",
        "broken": "leads nowhere",
        "loop": "leads nowhere",
        "outside": f"leads to {outside}, outside the checkpoint",
    }[kind]
    message = message_of(folder)
    assert message.startswith(str(path))
    assert reason in message


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_shard_that_is_not_a_file(kind: str, own_checkpoint: MakeCheckpoint, refused: Compress) -> None:
    folder = own_checkpoint(shard_size="20KB")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.unlink()
    if kind == "folder":
        shard.mkdir()
    else:
        os.mkfifo(shard)
    assert f"{shard} is not a regular file" in refused(folder)


def test_a_private_file_is_not_published(own_checkpoint: MakeCheckpoint, tmp_path: Path, refused: Compress) -> None:
    folder, secret = own_checkpoint(), tmp_path / "id_rsa"
    secret.write_text("secret")
    replace_by_link(folder / "tokenizer_config.json", secret)
    assert f"leads to {secret}, outside the checkpoint" in refused(folder)
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        write_companions(folder, target, {}, dtype=None)
    assert all("secret" not in path.read_text() for path in target.iterdir())


def as_hub_cache(folder: Path, repository: Path) -> Path:
    """Return a snapshot as in the hub's cache: links to the files, which lie in `blobs`."""
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / f"hash{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash{number}")
    return snapshot


def test_links_of_the_hub_cache_are_followed(make_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path) -> None:
    folder = make_checkpoint(shard_size="20KB")
    snapshot = as_hub_cache(folder, tmp_path / "models--org--tiny")
    (tmp_path / "my-model").symlink_to(snapshot)
    outputs = [tmp_path / "plain", tmp_path / "cached", tmp_path / "linked"]
    for checkpoint, output in zip((folder, snapshot, tmp_path / "my-model"), outputs, strict=True):
        assert main([*arguments(checkpoint, output, text_file), "--quiet"]) == 0
    plain, cached, linked = (
        {path.name: path.read_bytes() for path in output.iterdir() if path.suffix == ".safetensors"}
        for output in outputs
    )
    assert plain == cached == linked
    assert (outputs[1] / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (outputs[1] / "tokenizer.json").is_symlink()


def test_a_false_hub_cache(own_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Links to another folder of the repository are refused, and also `blobs` that is itself a link."""
    repository, secret = tmp_path / "models--org--tiny", tmp_path / "secret"
    secret.write_text("{}")
    snapshot = as_hub_cache(own_checkpoint(), repository)
    (repository / "refs").mkdir()
    (repository / "refs" / "a").write_text("{}")
    (snapshot / "LICENSE").symlink_to("../../refs/a")
    assert "outside the checkpoint" in message_of(snapshot)
    replace_by_link(snapshot / "LICENSE", "../../blobs/../../secret")
    assert "outside the checkpoint" in message_of(snapshot)
    (snapshot / "LICENSE").unlink()
    open_model(str(snapshot), tmp_path)
    (repository / "blobs").rename(tmp_path / "elsewhere")
    (repository / "blobs").symlink_to(tmp_path / "elsewhere")
    assert "outside the checkpoint" in message_of(snapshot)


def test_a_link_within_the_folder_is_followed(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    (folder / SINGLE_NAME).rename(folder / "weights")
    (folder / SINGLE_NAME).symlink_to("weights")
    assert open_model(str(folder), folder).shape.hidden_size == 32


def test_a_tensor_in_two_shards(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint(shard_size="20KB")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(second).items()))
    save_file(load_file(first) | {name: tensor + 1}, first)
    message = message_of(folder)
    assert name in message
    assert first.name in message
    assert second.name in message


def test_the_single_file_comes_before_an_index_as_in_transformers(own_checkpoint: MakeCheckpoint) -> None:
    from transformers import AutoModelForCausalLM

    folder = own_checkpoint()
    other = {name: tensor + 1 for name, tensor in load_file(folder / SINGLE_NAME).items()}
    save_file(other, folder / "other.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(other, "other.safetensors")}))
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(Checkpoint(folder).read_one(EMBEDDING), loaded[EMBEDDING])


def test_an_adapter_is_refused(own_checkpoint: MakeCheckpoint) -> None:
    """transformers would load the model that the adapter names, which is another one."""
    folder = own_checkpoint()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}')
    assert "holds an adapter" in message_of(folder)


# Headers, shapes and dtypes


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
        assert name in message_of(folder)
        (folder / SINGLE_NAME).write_bytes(original)


def test_a_tensor_that_the_model_does_not_have(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    edit_tensors(folder, lambda tensors: tensors.update(extra=torch.ones(2)))
    assert "extra has shape (2,)" in message_of(folder)


def test_a_missing_head_if_the_config_does_not_tie_it(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    edit_tensors(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    assert "lm_head.weight" in message_of(folder)
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


# config.json

SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize("value", [0, -1, True, False, 2.0, "32", [], {}, 2**31, 10**30, None])
@pytest.mark.parametrize("key", SIZES)
def test_invalid_sizes(key: str, value: Any, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    edit_config(folder, **{key: value})
    assert key in message_of(folder)


def test_a_thousand_million_layers_take_no_memory(own_checkpoint: MakeCheckpoint, refused: Compress) -> None:
    folder = own_checkpoint()
    open_model(str(folder), folder)  # so that the memory of a good checkpoint is in use already
    edit_config(folder, num_hidden_layers=10**9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "states 1000000000 layers" in refused(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_key_value_heads": 3}, ("3 key-value heads", "do not divide 4")),
        ({"num_attention_heads": 5, "head_dim": None}, ("5 attention heads", "hidden size 32")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads 0",)),
        ({"head_dim": 7}, ("heads of size 7", "rotary")),
        ({"head_dim": 0}, ("head_dim 0",)),
        ({"head_dim": 16}, ("self_attn",)),
        ({"vocab_size": 500}, ("lm_head.weight", "(400, 32)", "(500, 32)")),
        ({"rms_norm_eps": None}, ("rms_norm_eps None",)),
        ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps '1e-6'",)),
        ({"rms_norm_eps": -1.0}, ("rms_norm_eps -1.0",)),
        ({"sliding_window": "wide"}, ("sliding_window 'wide'",)),
        ({"model_type": "no-such-type"}, ("'no-such-type' is not supported",)),
        ({"model_type": 5}, ("model_type 5",)),
        ({"model_type": ["llama"]}, ("model_type ['llama']",)),
        ({"model_type": None}, ("model_type None",)),
        ({"hidden_act": "no-such-function"}, ("no-such-function",)),
        ({"dtype": "os"}, ("does not describe a llama model",)),
        ({"rope_scaling": {"rope_type": "no-such-type", "factor": 2.0}}, ("does not describe a llama model",)),
        ({"quantization_config": {}}, ("quantised",)),
        ({"num_labels": 10**9}, ("num_labels",)),
        ({"attn_implementation": "evil/kernel"}, ("attn_implementation", "never run")),
        ({"_attn_implementation": {"": "evil/kernel"}}, ("_attn_implementation", "never run")),
    ],
)
def test_invalid_configs(changes: dict[str, Any], names: tuple[str, ...], own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    edit_config(folder, **changes)
    message = message_of(folder)
    for name in names:
        assert name in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": "llama\xff"}', "not valid JSON"),
        (b'"llama"', "not a JSON object"),
        (b"5", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a":' * 200_000, "not valid JSON"),
        (b'{"a":' * (MAX_JSON_DEPTH + 1) + b"{}" + b"}" * (MAX_JSON_DEPTH + 1), "nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"rms_norm_eps": NaN}', "NaN is not a finite number"),
        (b'{"rms_norm_eps": -Infinity}', "-Infinity is not a finite number"),
        (b'{"rms_norm_eps": 1e999}', "1e999 is not a finite number"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
def test_invalid_json(name: str, content: bytes, reason: str, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint(shard_size="20KB")
    (folder / name).write_bytes(content)
    message = message_of(folder)
    assert message.startswith(str(folder / name))
    assert reason in message


def test_json_that_is_too_large_is_not_read(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    os.truncate(folder / "config.json", MAX_JSON_BYTES + 1)  # a hole: nothing is written
    assert "is larger than 100 MiB" in message_of(folder)


@pytest.mark.parametrize("checkpoint", ["n" * 5000, "~no-such-user/model", "/" + "n" * 300])
def test_names_that_the_system_refuses(checkpoint: str, refused: Compress) -> None:
    assert checkpoint[:200] in refused(Path(checkpoint))


@pytest.mark.parametrize("output", ["n" * 300, "~no-such-user/out", "zero\0byte"])
def test_output_names_that_the_system_refuses(
    output: str, make_checkpoint: MakeCheckpoint, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(make_checkpoint()), f"--output={output}", "--sparsity=0.2", f"--calibration={text_file}"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --output ")


# Tokenizers


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"version": "1.0", "model": null}', b"[" * 100_000])
def test_damaged_tokenizers(content: bytes, own_checkpoint: MakeCheckpoint, refused: Compress) -> None:
    folder = own_checkpoint()
    (folder / "tokenizer.json").write_bytes(content)
    assert f"The tokenizer in {folder} cannot be read" in refused(folder)


def test_a_tokenizer_that_cannot_take_the_text(own_checkpoint: MakeCheckpoint, refused: Compress) -> None:
    """A Unigram model without a token for unknown letters."""
    folder = own_checkpoint()

    def edit(content: dict[str, Any]) -> None:
        content["model"] = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}
        content["pre_tokenizer"] = None
        content["added_tokens"] = []

    edit_json(folder / "tokenizer.json", edit)
    assert "The tokenizer cannot take the text" in refused(folder)


# Names of every kind

NAMES = [
    "with space",
    "q'uo\"te`s",
    "li\nne",
    "ünï-語",
    "[red] *b* <script>x & |",
    "e\x1b[31m",
    "a[1]*?",
]


class _Text(HTMLParser):
    """Collect the texts of a page by element."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self._within: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._within.append(tag)
        self.texts.setdefault(tag, "")

    def handle_endtag(self, tag: str) -> None:
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._within:
            self.texts[self._within[-1]] += data


@pytest.mark.parametrize("name", NAMES)
def test_names_of_folders_and_files(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(shutil.copytree(make_checkpoint(), tmp_path / name))
    text = tmp_path / f"{name}.jsonl"
    text.write_text(json.dumps({"text": text_file.read_text()}) + "\n")
    output = tmp_path / "results" / name
    assert main(arguments(folder, output, text)) == 0, capsys.readouterr().err
    assert [path.name for path in output.parent.iterdir()] == [name]
    report = json.loads((output / "oneshot_report.json").read_text())
    assert report["config"]["checkpoint"] == str(folder)
    assert report["config"]["output"] == str(output)
    page = _Text()
    page.feed((output / "report.html").read_text(encoding="utf-8"))
    assert page.texts["title"] == f"{name}, compressed"
    assert "script" not in page.texts
    card = (output / "README.md").read_text(encoding="utf-8")
    headings = [line for line in card.splitlines() if line.startswith("# ")]
    shown = {"li\nne": "li\\\\nne", "e\x1b[31m": "e\\\\x1b\\[31m"}
    escaped = "".join(f"\\{letter}" if letter in "\\`*[]<>&|" else letter for letter in name)
    assert headings == [f"# Compressed from {shown.get(name, escaped)}"]
    AutoModelForCausalLM.from_pretrained(output)


def test_names_that_are_not_unicode(
    make_checkpoint: MakeCheckpoint, own_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path, refused: Compress
) -> None:
    folder = own_checkpoint().rename(tmp_path / "n\udcff")
    assert "n\\udcff cannot be read" in refused(folder)
    text, output = tmp_path / "t\udcff.txt", tmp_path / "out"
    shutil.copy(text_file, text)
    assert main([*arguments(make_checkpoint(), output, text), "--quiet"]) == 0
    assert json.loads((output / "oneshot_report.json").read_text())["config"]["text"]["calibration"] == str(text)
    assert "t\\udcff.txt" in (output / "report.html").read_text(encoding="utf-8")
    assert "t\\udcff.txt`" in (output / "README.md").read_text(encoding="utf-8")


# Calibration text

ROWS: list[tuple[str, bytes, list[str] | str]] = [
    ("rows.jsonl", b'{"text": "a"}\n\n  \n{"text": ""}\n{"text": null}\n{"text": "b"}\n', ["a", "b"]),
    ("columns.jsonl", b'{"id": 1}\n{"text": "a", "id": "x"}\n{"other": [1]}\n', ["a"]),
    ("one-column.jsonl", b'{"n": 1}\n{"n": 2, "body": "a"}\n', ["a"]),
    ("array.json", b'\n [{"text": "a"},\n {"text": "b"}]', ["a", "b"]),
    ("mark.jsonl", b'\xef\xbb\xbf{"text": "a"}\n', ["a"]),
    ("half-a-pair.jsonl", b'{"text": "a \\ud83d b"}\n', ["a ??? b"]),
    ("date.jsonl", b'{"text": "2020-01-01"}\n', ["2020-01-01"]),
    ("zero.txt", b"a\0b", ["a\0b"]),
    ("numbers.jsonl", b'{"text": "a"}\n{"text": 5}\n', "holds 5 where text"),
    ("lists.jsonl", b'{"text": ["a", "b"]}\n', "holds \\['a', 'b'\\] where text"),
    ("long-list.jsonl", b'{"text": [' + b"1," * 100_000 + b"1]}\n", "holds \\[1, 1, .*\\.\\.\\.\\] where text"),
    ("broken.jsonl", b'{"text": "a"}\n{"text": \n{"text": "b"}\n', "Line 2 of .*broken.jsonl"),
    ("latin.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "Line 2 of .*utf-8"),
    ("latin.txt", b"\xff\xfe", "not UTF-8"),
    ("deep.jsonl", b"[" * 100_000, "Line 1 of"),
    ("no-objects.jsonl", b"1\n2\n", "Record 1 of .* is 1"),
    ("blank.jsonl", b" \n \n", "holds no rows"),
    ("empty-array.json", b"[]", "holds no rows"),
    ("empty.jsonl", b"", "is empty"),
    ("damaged.parquet", b"PAR1" + bytes(100) + b"PAR1", "cannot be read as parquet"),
]


@pytest.mark.parametrize(("name", "content", "expected"), ROWS, ids=[name for name, _, _ in ROWS])
def test_rows_of_every_kind(name: str, content: bytes, expected: list[str] | str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if isinstance(expected, list):
        assert [text.replace("\ufffd", "?") for text in iter_documents(str(path), seed=None)] == expected
        return
    with pytest.raises(CalibrationError, match=expected) as caught:
        list(iter_documents(str(path), seed=None))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["a[1].parquet", "a*?.parquet", "li\nne.parquet", "a::b {1}#%20.parquet"])
def test_names_of_parquet_files_are_not_patterns(name: str, tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"text": "a"}, {"text": None}, {"text": "b"}]).to_parquet(tmp_path / "plain.parquet")
    (tmp_path / "plain.parquet").rename(tmp_path / name)
    assert list(iter_documents(str(tmp_path / name), seed=None)) == ["a", "b"]


def test_a_folder_and_a_pipe_are_not_text(make_checkpoint: MakeCheckpoint, tmp_path: Path, refused: Compress) -> None:
    (tmp_path / "folder.txt").mkdir()
    assert "folder.txt is a folder" in refused(make_checkpoint(), tmp_path / "folder.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    assert "pipe.txt does not exist" in refused(make_checkpoint(), tmp_path / "pipe.txt")
    assert "cannot be read" in refused(make_checkpoint(), Path("n" * 5000 + ".txt"))


def test_a_long_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneshot.text.files.LONGEST_DOCUMENT", 1000)
    path, text = tmp_path / "long.txt", topics(0, 2)[:2500].replace("\n", " ")
    path.write_text(text)
    pieces = list(iter_documents(str(path), seed=None))
    assert [len(piece) for piece in pieces] == [1000, 1000, len(text) - 2000]
    assert "".join(pieces) == text


def test_a_long_line(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path, output = tmp_path / "long.txt", tmp_path / "out"
    path.write_text("word" * 100_000)
    assert main([*arguments(make_checkpoint(), output, path), "--quiet"]) == 0


def test_rows_end_to_end(make_checkpoint: MakeCheckpoint, tmp_path: Path, refused: Compress) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": 5}\n')
    assert f"{path} holds 5 where text should be" in refused(make_checkpoint(), path)


# Outputs


@pytest.mark.parametrize("place", ["file", "file/out", "folder"])
def test_outputs_that_exist_as_something_else(
    place: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main([*arguments(make_checkpoint(), tmp_path / place, text_file), "--quiet"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / place} ")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_in_a_folder_without_write_permission(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    assert main([*arguments(make_checkpoint(), tmp_path / "out", text_file), "--quiet"]) == 1
    tmp_path.chmod(0o700)
    assert "cannot be written" in capsys.readouterr().err


# Fuzz


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer in two shards with an index; it is so small that a changed byte often matters."""
    folder = tmp_path_factory.mktemp("fuzz") / "tiny"
    build_model(hidden=8, width=8, heads=2, groups=1, layers=1).save_pretrained(folder, max_shard_size="14KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def restored(tiny: Path) -> Iterator[Path]:
    contents = {path: path.read_bytes() for path in tiny.iterdir()}
    yield tiny
    for path, content in contents.items():
        path.write_bytes(content)


def opens_or_is_refused(folder: Path) -> bool:
    """Return whether the folder opens and every tensor can be read. No other error than `OneshotError` is caught."""
    try:
        checkpoint = open_model(str(folder), folder).checkpoint
        tensors = checkpoint.read(checkpoint.tensor_names)
    except OneshotError:
        return False
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == checkpoint.shapes
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    return True


HEADER_VALUES = st.one_of(
    st.sampled_from(["F64", "F32", "BF16", "I8", "F8_E4M3", "F4", "BOOL", "C64"]),
    st.lists(st.integers(-1, 2**64), max_size=3),
    st.lists(st.integers(0, 600), min_size=2, max_size=2),
    st.integers(),
    st.none(),
)


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Draw a way to damage a file: bytes replaced, cut off or inserted, or an entry of its JSON header replaced."""
    kind = draw(st.sampled_from(("flip", "cut", "insert", "header")))
    where, payload = draw(st.floats(0, 1)), draw(st.binary(min_size=1, max_size=12))
    near_start = draw(st.booleans())
    key, entry, value = (
        draw(st.integers(0, 20)),
        draw(st.sampled_from(("dtype", "shape", "data_offsets"))),
        draw(HEADER_VALUES),
    )

    def mutate(content: bytes) -> bytes:
        size = min(len(content), 1200) if near_start else len(content)
        at = int(where * size)
        if kind == "cut":
            return content[:at]
        if kind == "insert":
            return content[:at] + payload + content[at:]
        if kind == "flip" or content[:1] == b"{":
            return content[:at] + payload + content[at + len(payload) :]
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        names = sorted(header)
        header[names[key % len(names)]][entry] = value
        changed = json.dumps(header).encode()
        return struct.pack("<Q", len(changed)) + changed + content[8 + length :]

    return mutate


@FUZZ
@given(data=st.data())
def test_damaged_files_are_read_or_refused(data: st.DataObject, restored: Path) -> None:
    """Bytes of shards, index and config; a checkpoint that still opens has finite tensors of the stated shapes."""
    names = sorted(path.name for path in restored.iterdir())
    path = restored / data.draw(st.sampled_from(names))
    content = path.read_bytes()
    path.write_bytes(data.draw(mutations())(content))
    try:
        opens_or_is_refused(restored)
    finally:
        path.write_bytes(content)


INDEX_PATHS = st.one_of(
    st.sampled_from(["..", "", ".", "config.json", "/dev/zero", "/dev/stdin", "../tiny/config.json", "a\0b"]),
    st.text(max_size=8),
    st.integers(),
    st.none(),
)


@FUZZ
@given(
    changes=st.dictionaries(st.integers(0, 20), INDEX_PATHS, max_size=3), extra=st.dictionaries(st.text(), INDEX_PATHS)
)
def test_damaged_indexes_are_read_or_refused(changes: dict[int, Any], extra: dict[str, Any], restored: Path) -> None:
    path = restored / INDEX_NAME
    content = path.read_text()
    index = json.loads(content)
    names = sorted(index["weight_map"])
    index["weight_map"] |= {names[number % len(names)]: place for number, place in changes.items()} | extra
    path.write_text(json.dumps(index))
    try:
        assert opens_or_is_refused(restored) == (not changes and not extra)
    finally:
        path.write_text(content)


CONFIG_KEYS = (
    *SIZES,
    "attention_bias",
    "attn_implementation",
    "compression_config",
    "dtype",
    "head_dim",
    "hidden_act",
    "id2label",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_experts",
    "num_key_value_heads",
    "num_labels",
    "num_local_experts",
    "output_attentions",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "text_config",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
)
JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 64),
        st.sampled_from([2**31, 2**63, 10**9, 10**30]),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
        st.sampled_from(["llama", "opt", "silu", "float16", "yarn", "llama3", "full_attention", "evil/kernel"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "0"]), inner, max_size=3),
    ),
    max_leaves=5,
)


@FUZZ
@given(
    changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON_VALUES, max_size=2),
    removed=st.sets(st.sampled_from(CONFIG_KEYS), max_size=1),
)
def test_damaged_configs_are_read_or_refused(changes: dict[str, Any], removed: set[str], restored: Path) -> None:
    path = restored / "config.json"
    content = path.read_text()
    config = json.loads(content) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in removed}))
    try:
        opens_or_is_refused(restored)
    finally:
        path.write_text(content)


def test_the_undamaged_checkpoint_opens(restored: Path) -> None:
    """The fuzz would pass on a reader that refuses everything."""
    assert opens_or_is_refused(restored)
