"""No code from a checkpoint runs: not from files named by `auto_map`.

That pickles are refused, tests/cli/test_checkpoint_errors.py tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig, build_model
from transformers import AutoModelForCausalLM

from oneshot.api.models import save_model
from oneshot.checkpoint import load_whole, open_model
from oneshot.errors import CalibrationError, CheckpointError
from oneshot.evaluation import evaluate
from oneshot.pipeline import compress

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


@pytest.mark.parametrize(
    "name", ["generation_config.json", "chat_template.json", "chat_template.jinja", "modules.json"]
)
@pytest.mark.parametrize("content", [b"\x80\x00\xff", b"{", b"7"])
def test_companions_that_are_not_what_their_names_say(
    content: bytes, name: str, own_checkpoint: MakeCheckpoint
) -> None:
    """They would be copied into the result."""
    folder = own_checkpoint()
    (folder / name).write_bytes(content)
    if name.endswith(".jinja") and content != b"\x80\x00\xff":
        open_model(str(folder), folder)
        return
    with pytest.raises(
        CheckpointError, match=rf"{name} is not (JSON|text|an object).*; download it again, or remove it"
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
