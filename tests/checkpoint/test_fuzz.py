"""Random damage to the files of a checkpoint: it is read with finite tensors of the stated shapes, or refused."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import SIZES
from factories import build_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oneshot.checkpoint import open_model
from oneshot.checkpoint.reader import INDEX_NAME
from oneshot.errors import OneshotError

pytestmark = pytest.mark.long

FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
