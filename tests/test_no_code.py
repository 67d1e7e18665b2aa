"""No code from a checkpoint runs: not from files named by `auto_map`.

That pickles are refused, tests/cli/test_checkpoint_errors.py tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig, build_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from oneshot.api.models import save_model
from oneshot.checkpoint import load_whole, open_model
from oneshot.errors import CalibrationError, CheckpointError
from oneshot.evaluation import evaluate
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer

HOSTILE = """
from pathlib import Path
(Path(__file__).parent / "was-run").touch()
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class HostileConfig(LlamaConfig): pass
class HostileModel(LlamaForCausalLM): pass
class HostileTokenizer(PreTrainedTokenizerFast): pass
"""


def add_auto_map(path: Path, auto_map: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto_map}))


def test_modelling_files_are_never_run(
    own_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # a user who says yes to everything
    marker = tmp_path / "was-run"
    folder = own_checkpoint()
    (folder / "hostile.py").write_text(HOSTILE.format(marker=str(marker)))
    add_auto_map(
        folder / "config.json",
        {"AutoConfig": "hostile.HostileConfig", "AutoModelForCausalLM": "hostile.HostileModel"},
    )
    add_auto_map(folder / "tokenizer_config.json", {"AutoTokenizer": [None, "hostile.HostileTokenizer"]})
    config = make_config(folder)
    compress(config)
    options = {"sequence_length": 32, "max_windows": 1, "decode_tokens": 0}
    evaluate([config.output], [str(text_file)], baseline=str(folder), **options)
    assert not marker.exists()
    output = Path(config.output)
    assert not list(output.glob("*.py"))
    assert "auto_map" not in json.loads((output / "config.json").read_text()), "the result is stock"


def test_a_result_with_code_of_ours_names_no_other(
    own_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opens it says that code may run. A harmless name on the hub, and a stand-in of what fetches code."""
    folder = own_checkpoint(layers=1)
    add_auto_map(folder / "tokenizer_config.json", {"AutoTokenizer": ["some-org/harmless--tok.Tok", None]})
    (folder / "tokenizer_of_ours.py").write_text("")
    nested = {"image_processor": {"auto_map": {"AutoImageProcessor": "some-org/harmless--im.Im"}, "size": 7}}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    (folder / "generation_config.json").write_text('{"top_k":  3}')
    pipelines = {"text-generation": {"impl": "some-org/harmless--pipe.Pipe", "pt": ["AutoModelForCausalLM"]}}
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"custom_pipelines": pipelines}))
    config = make_config(
        folder, form="per-layer", ffn="id", allocation="uniform", ranks="none", curvature="none", sparsity=0.1
    )
    compress(config)
    output = Path(config.output)
    assert {path.name for path in output.glob("*.py")} == {"modeling_oneshot.py"}
    assert "custom_pipelines" not in json.loads((output / "config.json").read_text())
    assert json.loads((output / "processor_config.json").read_text()) == {"image_processor": {"size": 7}}
    assert (output / "generation_config.json").read_text() == '{"top_k":  3}', "unchanged"
    fetched: list[str] = []
    monkeypatch.setattr(
        "transformers.models.auto.tokenization_auto.get_class_from_dynamic_module",
        lambda name, *_, **__: fetched.append(name),
    )
    tokenizer = AutoTokenizer.from_pretrained(output, trust_remote_code=True, local_files_only=True)
    assert not fetched
    assert tokenizer("a b").input_ids == load_tokenizer(folder)("a b").input_ids


@pytest.mark.parametrize("inner", ["", "text_config", "vision_config", "text_config.further.deeper", "listed"])
@pytest.mark.parametrize("key", ["_attn_implementation", "experts_implementation", "auto_map"])
def test_code_that_a_config_names_at_any_depth_is_refused(
    key: str, inner: str, own_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels on the hub, which the package `kernels` fetches: a harmless name, and a stand-in of what fetches it."""
    fetched: list[str] = []
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fetched.append)
    folder = own_checkpoint()
    path = folder / "config.json"
    values: Any = {key: {"AutoModel": "harmless.Model"} if key == "auto_map" else {"": "some-org/harmless"}}
    for name in reversed(inner.split(".") if inner else ()):
        values = {name: [values] if name == "listed" else values}
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    if key == "auto_map" and not inner:
        open_model(str(folder), folder)  # transformers asks before it runs that; it stays without an answer
        return
    with pytest.raises(CheckpointError, match=rf"config.json names code \({inner}\.?{key}\), which is never run"):
        open_model(str(folder), folder)
    with pytest.raises(CheckpointError, match="names code"):
        load_whole(AutoModelForCausalLM, folder)
    assert not fetched


TEXTS = ("chat_template.jinja", "merges.txt", "vocab.txt", "bpe.codes", "cl100k.tiktoken")


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.json", "modules.json", *TEXTS])
@pytest.mark.parametrize("content", [b"\x80\x00\xff", b"{", b"7"])
def test_companions_that_are_not_what_their_names_say(
    content: bytes, name: str, own_checkpoint: MakeCheckpoint
) -> None:
    """They would be copied into the result."""
    folder = own_checkpoint()
    (folder / name).write_bytes(content)
    if name in TEXTS and content != b"\x80\x00\xff":
        open_model(str(folder), folder)
        return
    (folder / "LICENSE.txt").write_bytes(b"\xa9 of somebody, in an older code")
    with pytest.raises(
        CheckpointError, match=rf"{name} is not (JSON|text|an object).*; download it again, or remove it"
    ):
        open_model(str(folder), folder)


@pytest.mark.parametrize("large", [False, True])
def test_vocabularies_of_any_length_are_text(large: bool, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    (folder / "merges.txt").write_bytes(b"a b\n" * (300_000 if large else 1) + "é".encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"merges.txt is not text in UTF-8 \(.*decode"):
        open_model(str(folder), folder)


def test_a_long_vocabulary_that_is_cut_is_told(own_checkpoint: MakeCheckpoint) -> None:
    """As an interrupted download leaves it. No text is read, so that no tokenizer is."""
    folder = own_checkpoint()
    whole = json.dumps({"a" * 9 + str(number): number for number in range(60_000)}, indent=1) + "\n"
    (folder / "vocab.json").write_text(whole)
    open_model(str(folder), folder)
    (folder / "vocab.json").write_text(whole[:-20])
    with pytest.raises(CheckpointError, match=r"vocab.json is not JSON \(its end is missing\); download it again"):
        open_model(str(folder), folder)


@pytest.mark.parametrize("length", [0, 2**20])
def test_a_config_of_any_length_is_read_to_its_depth(length: int, own_checkpoint: MakeCheckpoint) -> None:
    """Code may be named anywhere in it."""
    folder = own_checkpoint()
    nested = "[" * 400 + "]" * 400
    (folder / "processor_config.json").write_text(json.dumps({"long": "x" * length})[:-1] + f', "deep": {nested}}}')
    with pytest.raises(CheckpointError, match=r"processor_config.json is nested too deeply"):
        open_model(str(folder), folder)


def test_modules_that_are_code_are_refused(own_checkpoint: MakeCheckpoint) -> None:
    """sentence-transformers runs them if the code of the result may run."""
    folder = own_checkpoint()
    named = {"": "sentence_transformers.models.Transformer", "1_Pooling": "some-org/harmless--custom_st.Pooling"}
    modules = [{"path": path, "type": kind} for path, kind in named.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        CheckpointError, match=r"modules.json names code \(some-org/harmless--custom_st.Pooling\), which is never run"
    ):
        open_model(str(folder), folder)


def test_a_tokenizer_on_the_hub_brings_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option transformers would ask on the terminal."""
    asked: list[dict[str, Any]] = []

    def fetched(name: str, **options: Any) -> Any:
        asked.append(options)
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fetched)
    with pytest.raises(CalibrationError, match="no network"):
        save_model(build_model(), "some-org/some-model", tmp_path)
    assert [options["trust_remote_code"] for options in asked] == [False]
