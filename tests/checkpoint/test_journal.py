"""The writer: all or nothing, and what a resumed run finds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oneshot.checkpoint import INDEX_NAME, Checkpoint
from oneshot.errors import CheckpointError, OutputError
from oneshot.writer import CheckpointWriter

SHARDS = [{"a": torch.ones(3), "b": torch.arange(4.0).view(2, 2)}, {"c": torch.full((2,), 3.0)}, {"d": torch.ones(1)}]


def open_writer(folder: Path, **options: Any) -> CheckpointWriter:
    return CheckpointWriter(
        folder, **{"num_shards": 3, "fingerprint": {"seed": 0, "options": {"damping": 0.0}}} | options
    )


def write(folder: Path, count: int, error: BaseException | None = None, **options: Any) -> None:
    """Add shards up to `count`, then fail, leave or commit."""
    with open_writer(folder, **options) as writer:
        for number in range(writer.num_finished, count):
            writer.add(SHARDS[number], record={"number": number}, scaffold=SHARDS[0] if number == 1 else None)
        if error is not None:
            raise error
        if count == len(SHARDS):
            writer.finish_weights()
            writer.commit()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_and_read_round_trip(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "c": torch.randn(6, 2).T,
        "d": torch.arange(3),
        "e": torch.zeros(0, 4),
    }
    folder = tmp_path / "new" / "out"
    with open_writer(folder, num_shards=2) as writer:
        writer.add({name: tensors[name] for name in "ab"})
        writer.add({name: tensors[name] for name in "cde"})
        writer.finish_weights()
        (writer.partial / "config.json").write_text("{}")
        writer.commit()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names(folder) == sorted(["config.json", INDEX_NAME, *shards])
    index = json.loads((folder / INDEX_NAME).read_text())
    assert index["weight_map"] == {name: shards[name > "b"] for name in tensors}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    read = Checkpoint(folder).read(tensors)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert names(folder.parent) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError(), KeyboardInterrupt(), SystemExit(), OSError(28, "No space left")])
def test_finished_shards_outlive_a_failure_and_the_next_run_goes_on(error: BaseException, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
        write(folder, 2, error)
    assert names(tmp_path) == ["out.incomplete"], "plainly named"
    with open_writer(folder, resume=True) as writer:
        assert writer.num_finished == 2
        assert [writer.record(number) for number in range(2)] == [{"number": 0}, {"number": 1}]
        for number, scaffold in ((0, {}), (1, SHARDS[0])):
            for found, wanted in zip(writer.reread(number), (SHARDS[number], scaffold), strict=True):
                assert found.keys() == wanted.keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    write(folder, 3, resume=True)
    write(tmp_path / "undisturbed", 3)
    assert names(tmp_path) == ["out", "undisturbed"]
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "undisturbed" / path.name).read_bytes()


def test_nothing_stays_where_no_shard_is_finished_or_the_input_is_at_fault(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", 0, KeyboardInterrupt())
    with pytest.raises(CheckpointError):
        write(tmp_path / "out", 2, CheckpointError("NaN in the third layer."))
    assert names(tmp_path) == []


def test_what_is_kept_is_found_again_and_is_reason_enough_to_stay(tmp_path: Path) -> None:
    with open_writer(tmp_path / "out") as writer:
        assert writer.kept("plan") is None
        writer.keep("plan", {"sizes": [1, 2]})
    with open_writer(tmp_path / "out", resume=True) as writer:
        assert writer.kept("plan") == {"sizes": [1, 2]}
        assert writer.num_finished == 0
    with open_writer(tmp_path / "out", overwrite=True) as writer:
        assert writer.kept("plan") is None


def test_an_interrupted_run_is_neither_forgotten_nor_taken_for_another(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write(folder, 1)
    with pytest.raises(OutputError, match=r"--resume.*--overwrite"):
        open_writer(folder)
    with pytest.raises(OutputError, match=r"another run \(different: damping, seed\)"):
        open_writer(folder, resume=True, fingerprint={"seed": 1, "options": {"damping": 0.1}})
    with open_writer(folder, resume=True) as writer:
        assert writer.num_finished == 1, "the refusals have not touched it"
    with open_writer(folder, overwrite=True) as writer:
        assert writer.num_finished == 0


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """Whatever lies at the names that a run works under."""
    for name in ("out.incomplete", "out.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious.json").write_text("{}")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(OutputError, match="in the way"):
            open_writer(tmp_path / "out", **options)
    (tmp_path / "out.incomplete").rename(tmp_path / "elsewhere")
    (tmp_path / "out.incomplete").write_text("a file")
    with pytest.raises(OutputError, match="in the way"):
        open_writer(tmp_path / "out")
    (tmp_path / "out.incomplete").unlink()
    write(tmp_path / "out", 3)
    (tmp_path / "out" / "config.json").write_text("{}")
    write(tmp_path / "out", 3, overwrite=True)
    assert (tmp_path / "elsewhere" / "precious.json").exists()
    assert (tmp_path / "out.replaced" / "precious.json").exists()


@pytest.mark.parametrize(
    "names_left", [[], ["lock"], ["lock", "fingerprint.json.unfinished"], ["lock", "fingerprint.json"]]
)
def test_a_run_killed_before_its_first_shard_is_no_hindrance(names_left: list[str], tmp_path: Path) -> None:
    (tmp_path / "out.incomplete" / "checkpoint").mkdir(parents=True)
    for name in names_left:
        (tmp_path / "out.incomplete" / name).write_text("{")
    write(tmp_path / "out", 3)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("damage", ["shard", "record", "scaffold"])
def test_a_damaged_shard_is_made_again_and_what_follows_it(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, work = tmp_path / "out", tmp_path / "out.incomplete"
    write(folder, 3 - 1)
    write(folder, 3 - 1, resume=True)
    path = {
        "shard": work / "checkpoint" / "model-00002-of-00003.safetensors",
        "record": work / "record-00002.json",
        "scaffold": work / "scaffold-00002.safetensors",
    }[damage]
    path.write_bytes(path.read_bytes()[:-1])
    with open_writer(folder, resume=True) as writer:
        assert writer.num_finished == 1
    assert (damage == "record") != ("was damaged" in caplog.text)


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with open_writer(tmp_path / "out") as writer:
        writer.add(SHARDS[0])
        with pytest.raises(OutputError, match="Another process"):
            open_writer(tmp_path / "out", overwrite=True)
        assert writer.reread(0)[0].keys() == SHARDS[0].keys()


def test_nan_and_inf_are_not_written(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        with open_writer(tmp_path / "out") as writer, pytest.raises(OutputError, match=r"model\.bad"):
            writer.add({"model.good": torch.ones(2), "model.bad": torch.tensor([1.0, value])})
    assert names(tmp_path) == []


def test_overwrite_keeps_the_old_folder_until_the_commit(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "old").write_text("old")
    with pytest.raises(OutputError, match="is no checkpoint"):
        open_writer(folder, overwrite=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="--overwrite"):
        open_writer(folder)
    with pytest.raises(RuntimeError):
        write(folder, 3 - 1, RuntimeError(), overwrite=True)
    assert names(folder) == ["config.json", "old"]
    write(folder, 3, overwrite=True)
    assert "old" not in names(folder)
    assert all(load_file(path) for path in folder.glob("*.safetensors"))
    assert names(tmp_path) == ["out"]


def test_an_operating_system_error_while_writing_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"), open_writer(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert names(tmp_path) == []
