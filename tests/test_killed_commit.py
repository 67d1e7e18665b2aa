"""A run that is killed while it removes the traces of its making is finished, and says so when it is resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
from factories import MakeCheckpoint, MakeConfig

from oneshot.checkpoint.journal import Journal
from oneshot.checkpoint.work_folder import WorkFolder
from oneshot.pipeline import compress


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("removed", [0, 1, 3, 4])
def test_a_run_killed_during_the_last_removal_is_finished(
    removed: int, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(make_config(make_checkpoint()), resume=True)
    output = Path(config.output)
    work = WorkFolder(output).path
    unlink, count = Path.unlink, 0

    def dying_unlink(self: Path, missing_ok: bool = False) -> None:
        nonlocal count
        if output.exists() and self.parent == work:
            if count == removed:
                raise KilledError
            count += 1
        unlink(self, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dying_unlink)
        patch.setattr(Journal, "_leave", lambda self, useless=False: self._lock.release())
        with pytest.raises(KilledError):
            compress(config)
    assert output.exists()
    assert work.exists()
    stored = (output / "model.safetensors").read_bytes()
    report = compress(config)
    assert (output / "model.safetensors").read_bytes() == stored
    assert report.stored_parameters["compressed"] < report.stored_parameters["dense"]
    assert not work.exists()
