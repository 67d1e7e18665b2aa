"""A journal whose files are damaged or whose disk fills up: noticed, and made again."""

import os
from pathlib import Path

import pytest
from journals import MIXED, PARTS, contents, names, open_journal, write, write_parts

from oneshot.checkpoint.reader import SINGLE_NAME
from oneshot.errors import OutputError


@pytest.mark.parametrize("damage", ["part", "record", "scaffold", "gone"])
def test_a_damaged_part_is_made_again_and_what_follows_it(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, work = tmp_path / "out", tmp_path / "out.incomplete"
    write(folder, 3 - 1)
    write(folder, 3 - 1, resume=True)
    path = {
        "part": work / "checkpoint" / SINGLE_NAME,
        "record": work / "record-00002.json",
        "scaffold": work / "scaffold-00002.safetensors",
        "gone": work / "scaffold-00002.safetensors",
    }[damage]
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-1])
    with open_journal(folder, resume=True) as journal:
        assert journal.num_finished == 1
    assert f"{path} was damaged" in caplog.text


@pytest.mark.parametrize("finished", [1, 2, 4])
def test_a_power_cut_that_lost_bytes_with_a_record_is_noticed(finished: int, tmp_path: Path) -> None:
    """Files that are shorter or have zeros where tensors were: a disk that did not keep what was flushed."""
    for damage in ("zeros", "short", "none"):
        own = tmp_path / damage
        with open_journal(own / "out", MIXED) as journal:
            for number in range(finished):
                journal.add(MIXED[number], record={"number": number})
        path = own / "out.incomplete" / "checkpoint" / SINGLE_NAME
        content = path.read_bytes()
        path.write_bytes({"zeros": bytes(len(content)), "short": content[:-1], "none": content}[damage])
        with open_journal(own / "out", MIXED, resume=True) as journal:
            assert (journal.num_finished == finished) == (damage == "none")
        write_parts(own / "out", MIXED, resume=True)
        write_parts(own / "undisturbed", MIXED)
        assert contents(own / "out") == contents(own / "undisturbed")


@pytest.mark.parametrize("place", range(6))
def test_a_turned_bit_is_found_wherever_it_is(place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Parts up to the damaged one are kept; a part after it, which is good, is made again to the same bytes."""
    folder = tmp_path / "out"
    with open_journal(folder, MIXED) as journal:
        for number, part in enumerate(MIXED):
            journal.add(part, record={"number": number})
        damaged = [place for place in journal.stored() if place.num_bytes][place]
    content = bytearray(damaged.path.read_bytes())
    content[damaged.start + (damaged.num_bytes - 1) * (place % 2)] ^= 1
    damaged.path.write_bytes(content)
    with open_journal(folder, MIXED, resume=True) as journal:
        assert journal.num_finished == next(number for number, part in enumerate(MIXED) if damaged.name in part)
    assert f"{damaged.path} was damaged after it was written" in caplog.text
    write_parts(folder, MIXED, resume=True)
    write_parts(tmp_path / "undisturbed", MIXED)
    assert contents(folder) == contents(tmp_path / "undisturbed")


def test_a_file_that_is_shortened_before_the_end_is_an_output_error(tmp_path: Path) -> None:
    path = tmp_path / "out.incomplete" / "checkpoint" / SINGLE_NAME

    def damage_and_finish() -> None:
        with open_journal(tmp_path / "out") as journal:
            for tensors in PARTS:
                journal.add(tensors)
            path.write_bytes(path.read_bytes()[:-1])
            journal.finish()

    with pytest.raises(OutputError, match=r"model\.safetensors ended early"):
        damage_and_finish()
    assert names(tmp_path) == ["out.incomplete"]
    with open_journal(tmp_path / "out", resume=True) as journal:
        assert journal.num_finished == 2, "the damaged part is made again"


def test_a_disk_that_fills_up_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every write, of a tensor, of a record and of a header; a full disk first takes some of the bytes."""
    pwrite, room = os.pwrite, 0

    def fill(file: int, data: memoryview, start: int) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        taken = min(room, len(data))
        room -= taken
        return pwrite(file, data[:taken], start)

    write(tmp_path / "undisturbed", 3)
    num_bytes = (tmp_path / "undisturbed" / SINGLE_NAME).stat().st_size
    for room_at_first in (0, 1, 13, 28, 33, num_bytes - 1):
        room, folder = room_at_first, tmp_path / str(room_at_first) / "out"
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fill)
            with pytest.raises(OutputError, match=rf"{folder} cannot be written \(No space left on device\)"):
                write(folder, 3)
        assert not folder.exists()
        write(folder, 3, resume=True)
        assert contents(folder) == contents(tmp_path / "undisturbed")
