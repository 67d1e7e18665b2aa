"""No code from a checkpoint runs: not from files named by `auto_map`.

That pickles are refused, tests/cli/test_checkpoint_errors.py tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig

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
