"""Many processes that start one output: one makes it, and the others say what is true."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from journals import PARTS, contents, names, open_journal, write_parts

from oneshot.checkpoint import refuse_output
from oneshot.checkpoint.reader import SINGLE_NAME
from oneshot.errors import OutputError

STARTERS = 8
TRUE = ("Another process is writing", "exists already")


def started(number: int, folder: Path, work: Callable[[], None]) -> int:
    """Fork a process that does the work and leaves what it says in a file."""
    child = os.fork()
    if child:
        return child
    said = "a traceback"
    try:
        work()
        said = "done"
    except OutputError as error:
        said = str(error)
    except BaseException as error:
        said = f"a traceback: {error!r}"
    finally:
        (folder / f"said-{number}").write_text(said)
        os._exit(0)


@pytest.mark.parametrize("seconds", [0.0, 0.03])
@pytest.mark.parametrize("before", ["nothing", "killed"])
def test_one_of_many_starters_makes_the_output(before: str, seconds: float, tmp_path: Path) -> None:
    """Some come before the first has the lock, some while it works, and some when it is done."""
    write_parts(tmp_path / "undisturbed", PARTS)
    for turn in range(2):
        folder = tmp_path / f"{turn}" / "out"
        folder.parent.mkdir()
        if before == "killed":
            with open_journal(folder) as journal:
                journal.add(PARTS[0])
        resume = before == "killed"

        def work() -> None:
            refuse_output(folder, overwrite=False, resume=resume and not folder.exists())  # noqa: B023
            with open_journal(folder, resume=resume) as journal:  # noqa: B023
                for part in PARTS[journal.num_finished :]:
                    time.sleep(seconds / 3)
                    journal.add(part)
                journal.finish()
                (journal.partial / "config.json").write_text("{}")
                journal.commit()

        children = []
        for number in range(STARTERS):
            children.append(started(number, folder.parent, work))
            time.sleep(seconds / 2)
        for child in children:
            os.waitpid(child, 0)
        said = [path.read_text() for path in sorted(folder.parent.glob("said-*"))]
        assert said.count("done") == 1, said
        assert [each for each in said if each != "done" and not any(words in each for words in TRUE)] == []
        assert contents(folder)[SINGLE_NAME] == contents(tmp_path / "undisturbed")[SINGLE_NAME]
        assert [name for name in names(folder.parent) if not name.startswith("said")] == ["out"]


def test_a_run_that_is_done_leaves_the_folder_of_the_next_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With --overwrite a run may begin while the one before it is about to leave."""
    folder = tmp_path / "out"
    with open_journal(folder) as first:
        for part in PARTS:
            first.add(part)
        first.finish()
        (first.partial / "config.json").write_text("{}")
        first.commit()
        second = open_journal(folder, overwrite=True)
    assert "--resume" not in caplog.text, "the first run is complete"
    with second:
        for part in PARTS:
            second.add(part)
        second.finish()
        second.commit()
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["vanished", "new"])
def test_an_output_that_is_being_replaced_is_a_checkpoint(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks at it, another run moves the old folder away, and the new one to its place."""
    folder = tmp_path / "out"
    write_parts(folder, PARTS)
    (folder / "config.json").write_text("{}")
    exists, looks = Path.exists, list[Path]()

    def replaced(path: Path, **options: bool) -> bool:
        found = exists(path, **options)
        looks.append(path)
        if kind == "vanished" and looks.count(folder) == 2:  # it was there just before
            folder.rename(tmp_path / "old")
        return found and (path.name != "config.json" or kind == "vanished")

    monkeypatch.setattr(Path, "exists", replaced)
    refuse_output(folder, overwrite=True, resume=False)


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders of the result are flushed, then it is renamed, then the name is flushed."""
    seen: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(file: int) -> None:
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def note_rename(source: Path, target: Path) -> None:
        seen.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    folder = tmp_path / "out"
    with open_journal(folder) as journal:
        for part in PARTS:
            journal.add(part)
        journal.finish()
        (journal.partial / "1_Pooling").mkdir()
        for name in ("config.json", "oneshot_report.json", "1_Pooling/config.json"):
            (journal.partial / name).write_text("{}")
        partial, start = journal.partial, len(seen)
        journal.commit()
    renamed = seen.index(("rename", str(folder)))
    before = [path for _, path in seen[start:renamed]]
    for name in ("config.json", "oneshot_report.json", SINGLE_NAME, "1_Pooling/config.json", "1_Pooling"):
        assert str(partial / name) in before
    assert before[-1] == str(partial), "names after what they name"
    assert seen[renamed + 1] == ("fsync", str(tmp_path))


def test_an_old_result_that_a_killed_commit_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".out.replaced-x1y2" / "old"
    left.mkdir(parents=True)
    (tmp_path / ".outer.replaced-x1y2").mkdir()
    write_parts(tmp_path / "out", PARTS)
    assert names(tmp_path) == [".outer.replaced-x1y2", "out"]
