"""GGUF files in parts, as large models are published; and files without tensors."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oneshot.checkpoint import locate_checkpoint, open_gguf
from oneshot.cli.imatrix import main as imatrix
from oneshot.errors import CheckpointError

Split = Callable[..., list[Path]]


@pytest.fixture
def split(as_gguf: Callable[..., Path], tmp_path: Path) -> Split:
    """`split(num_parts, further metadata of the last)` -> the file's parts, as `llama-gguf-split` writes them."""

    whole = as_gguf()

    def make(num_parts: int, **further: Any) -> list[Path]:
        import gguf

        reader = gguf.GGUFReader(whole)
        tensors = reader.tensors
        parts = []
        for part in range(num_parts):
            parts.append(tmp_path / f"m-{part + 1:05d}-of-{num_parts:05d}.gguf")
            writer = gguf.GGUFWriter(parts[-1], "llama")
            for name, field in reader.fields.items() if part == 0 else ():
                if not name.startswith("GGUF.") and name != "general.architecture":
                    inner = field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(name, field.contents(), field.types[0], inner)
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", num_parts)
            writer.add_int32("split.tensors.count", len(tensors))
            for name, value in further.items() if part == num_parts - 1 else ():
                writer.add_string(name, value)
            for tensor in tensors[part::num_parts]:
                writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        return parts

    return make


def test_parts_are_the_whole(split: Split, tmp_path: Path) -> None:
    first = split(3)[0]
    whole = tmp_path / "written" / "model.gguf"
    folders = [locate_checkpoint(str(path), tmp_path / "scratch") for path in (whole, first)]
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name
    opened, in_parts = open_gguf(str(whole)), open_gguf(str(first))
    assert opened is not None
    assert in_parts is not None
    assert in_parts.shapes == opened.shapes
    assert in_parts.file_bytes == sum(path.stat().st_size for path in tmp_path.glob("m-*.gguf"))


def test_parts_that_do_not_make_a_whole(split: Split, tmp_path: Path) -> None:
    first, second, third = split(3)

    def message(path: Path = first) -> str:
        with pytest.raises(CheckpointError) as error:
            open_gguf(str(path))
        return str(error.value)

    assert "(it is one of 3 parts, of which the first one ends with -00001-of-00003.gguf)" in message(second)
    shutil.move(third, tmp_path / "kept")
    assert f"(its part {third.name} is missing)" in message()
    shutil.copy(second, third)
    assert f"({third.name} is a part of another model: split.no is 1 and not 2)" in message()
    shutil.copy(tmp_path / "kept", third)
    shutil.copy(first, tmp_path / "other.gguf")
    assert "(it is one of 3 parts, of which" in message(tmp_path / "other.gguf")
    third.write_bytes(third.read_bytes()[:-100])
    assert "(it ends early)" in message()
    split(3, **{"general.name": "another"})
    assert "is a part of another model: general.name is another" in message()


@pytest.mark.parametrize("number", range(3))
def test_no_part_is_replaced_by_an_importance_matrix(
    number: int, split: Split, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = split(3)
    before = [part.read_bytes() for part in parts]
    options = [f"--calibration={text_file}", "--num-sequences=2", "--sequence-length=16", "--device=cpu", "--overwrite"]
    assert imatrix([str(parts[0]), f"--output={parts[number]}", "--quiet", *options]) == 1
    said = capsys.readouterr().err
    assert f"{parts[number]} belongs to the input checkpoint; choose another --output." in said
    assert [part.read_bytes() for part in parts] == before


def test_a_file_without_tensors(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"cannot be read as GGUF \(it has no tensors\)"):
        open_gguf(str(tmp_path / "vocabulary.gguf"))
