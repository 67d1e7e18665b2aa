"""The journal: all or nothing, and what a resumed run finds."""

import re
from pathlib import Path

import pytest
import torch
from journals import FINGERPRINT, PARTS, Tensors, assert_same, contents, names, open_journal, without_values, write
from safetensors.torch import load_file

from oneshot.checkpoint import Checkpoint, Journal, peek_saved
from oneshot.checkpoint.reader import SINGLE_NAME
from oneshot.errors import CheckpointError, OutputError


def test_write_and_read_round_trip(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "c": torch.randn(6, 2).T,
        "d": torch.arange(3),
        "e": torch.zeros(0, 4),
    }
    folder = tmp_path / "new" / "out"
    parts = [{name: tensors[name] for name in "ab"}, {name: tensors[name] for name in "cde"}]
    with open_journal(folder, parts) as journal:
        for part in parts:
            journal.add(part)
        journal.finish()
        (journal.partial / "config.json").write_text("{}")
        journal.commit()
    assert names(folder) == ["config.json", SINGLE_NAME]
    assert_same(Checkpoint(folder).read(tensors), tensors)
    assert names(folder.parent) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError(), KeyboardInterrupt(), SystemExit(), OSError(28, "No space left")])
def test_finished_parts_outlive_a_failure_and_the_next_run_continues(error: BaseException, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
        write(folder, 2, error)
    assert names(tmp_path) == ["out.incomplete"], "plainly named"
    with open_journal(folder, resume=True) as journal:
        assert journal.num_finished == 2
        assert journal.records(2) == [{"number": 0}, {"number": 1}]
        for number, scaffold in ((0, {}), (1, PARTS[0])):
            for found, expected in zip(journal.reread(number), (PARTS[number], scaffold), strict=True):
                assert_same(found, expected)
    write(folder, 3, resume=True)
    write(tmp_path / "undisturbed", 3)
    assert names(tmp_path) == ["out", "undisturbed"]
    assert contents(folder) == contents(tmp_path / "undisturbed")


def test_nothing_stays_if_no_part_is_finished_or_the_input_is_at_fault(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", 0, KeyboardInterrupt())
    with pytest.raises(CheckpointError):
        write(tmp_path / "out", 2, CheckpointError("NaN in the third layer."))
    assert names(tmp_path) == []


def test_saved_values_are_found_again_and_keep_the_folder(tmp_path: Path) -> None:
    folder, ranks = tmp_path / "out", {"rank": torch.arange(3.0)}
    assert peek_saved(folder, "plan") is None
    with open_journal(folder) as journal:
        assert journal.saved("plan") is None
        assert journal.saved_tensors("embedding") is None
        journal.save_tensors("embedding", ranks)
        journal.save("plan", {"sizes": [1, 2]})
    assert peek_saved(folder, "plan") == {"sizes": [1, 2]}
    with open_journal(folder, resume=True) as journal:
        assert journal.saved("plan") == {"sizes": [1, 2]}
        saved = journal.saved_tensors("embedding")
        assert saved is not None
        assert_same(saved, ranks)
        assert journal.num_finished == 0
    with open_journal(folder, overwrite=True) as journal:
        assert journal.saved("plan") is None
        assert journal.saved_tensors("embedding") is None


def test_values_that_are_saved_again_stay_those_of_finished_parts(tmp_path: Path) -> None:
    """A resumed run saves its text again, when tensors of later values are there."""
    folder = tmp_path / "out"
    with open_journal(folder) as journal:
        journal.save("self", {"token_ids": [1, 2]})
        journal.save_tensors("embedding", {"rank": torch.arange(3.0)})
        journal.save("plan", {"sizes": [1, 2]})
        journal.add(PARTS[0])
    with Journal(folder, fingerprint=FINGERPRINT, resume=True) as journal:
        journal.save("self", {"token_ids": [1, 2]})
        journal.expect(without_values(PARTS))
        assert journal.num_finished == 1


def test_an_interrupted_run_is_neither_forgotten_nor_confused_with_another(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write(folder, 1)
    with pytest.raises(OutputError, match=r"--resume.*--overwrite"):
        open_journal(folder)
    with pytest.raises(OutputError, match=r"another run \(different: damping, --seed\)"):
        open_journal(folder, resume=True, fingerprint={"seed": 1, "options": {"damping": 0.1}})
    with open_journal(folder, resume=True) as journal:
        assert journal.num_finished == 1, "the refusals have not touched it"
    with open_journal(folder, overwrite=True) as journal:
        assert journal.num_finished == 0


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    """Also if it lies at a name that a run works under."""
    for name in ("out.incomplete", "out.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious.json").write_text("{}")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(OutputError, match="in the way"):
            open_journal(tmp_path / "out", **options)
    (tmp_path / "out.incomplete").rename(tmp_path / "elsewhere")
    (tmp_path / "out.incomplete").write_text("a file")
    with pytest.raises(OutputError, match="in the way"):
        open_journal(tmp_path / "out")
    (tmp_path / "out.incomplete").unlink()
    write(tmp_path / "out", 3)
    (tmp_path / "out" / "config.json").write_text("{}")
    write(tmp_path / "out", 3, overwrite=True)
    assert (tmp_path / "elsewhere" / "precious.json").exists()
    assert (tmp_path / "out.replaced" / "precious.json").exists()


@pytest.mark.parametrize(
    "names_left", [[], ["lock"], ["lock", "fingerprint.json.unfinished"], ["lock", "fingerprint.json"]]
)
def test_a_run_killed_before_its_first_part_is_not_in_the_way(names_left: list[str], tmp_path: Path) -> None:
    (tmp_path / "out.incomplete" / "checkpoint").mkdir(parents=True)
    for name in names_left:
        (tmp_path / "out.incomplete" / name).write_text("{")
    write(tmp_path / "out", 3)
    assert names(tmp_path) == ["out"]


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with open_journal(tmp_path / "out") as journal:
        journal.add(PARTS[0])
        with pytest.raises(OutputError, match="Another process"):
            open_journal(tmp_path / "out", overwrite=True)
        assert journal.reread(0)[0].keys() == PARTS[0].keys()


def test_nan_and_inf_are_not_written(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        part = {"model.good": torch.ones(2), "model.bad": torch.tensor([1.0, value])}
        with open_journal(tmp_path / "out", [part]) as journal, pytest.raises(OutputError, match=r"model\.bad"):
            journal.add(part)
        assert journal.num_finished == 0
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"a": torch.ones(3)}, "b was made as nothing but planned as float32 [2, 2]"),
        (PARTS[0] | {"z": torch.ones(1)}, "z was made as float32 [1] but planned as nothing"),
        (PARTS[0] | {"a": torch.ones(4)}, "a was made as float32 [4] but planned as float32 [3]"),
        (PARTS[0] | {"a": torch.ones(3).half()}, "a was made as float16 [3] but planned as float32 [3]"),
    ],
    ids=["missing", "further", "shape", "dtype"],
)
def test_what_was_not_expected_is_not_written(made: Tensors, message: str, tmp_path: Path) -> None:
    with open_journal(tmp_path / "out") as journal, pytest.raises(OutputError, match=re.escape(message)):
        journal.add(made)
    assert names(tmp_path) == []


def test_overwrite_keeps_the_old_folder_until_the_commit(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "old").write_text("old")
    with pytest.raises(OutputError, match="is not a checkpoint"):
        open_journal(folder, overwrite=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="--overwrite"):
        open_journal(folder)
    with pytest.raises(RuntimeError):
        write(folder, 3 - 1, RuntimeError(), overwrite=True)
    assert names(folder) == ["config.json", "old"]
    write(folder, 3, overwrite=True)
    assert names(folder) == [SINGLE_NAME]
    assert load_file(folder / SINGLE_NAME)
    assert names(tmp_path) == ["out"]


def test_an_operating_system_error_while_writing_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"), open_journal(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert names(tmp_path) == []
