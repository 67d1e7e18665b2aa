"""Configs and indexes with invalid values or invalid JSON, each refused in one sentence."""

import os
import resource
from typing import Any

import pytest
from damage import SIZES, edit_config, message_of
from factories import Fails, MakeCheckpoint

from oneshot.checkpoint import open_model
from oneshot.checkpoint.reader import INDEX_NAME
from oneshot.checkpoint.safe_files import MAX_JSON_BYTES, MAX_JSON_DEPTH


@pytest.mark.parametrize("value", [0, -1, True, False, 2.0, "32", [], {}, 2**31, 10**30, None])
@pytest.mark.parametrize("key", SIZES)
def test_invalid_sizes(key: str, value: Any, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    edit_config(folder, **{key: value})
    assert key in message_of(folder)


def test_a_thousand_million_layers_take_no_memory(own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint()
    open_model(str(folder), folder)  # so that the memory of a good checkpoint is in use already
    edit_config(folder, num_hidden_layers=10**9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "states 1000000000 layers" in fails(folder)
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
