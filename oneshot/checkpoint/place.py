"""The place of a result: where it may appear."""

import tempfile
from pathlib import Path

from oneshot.checkpoint.reader import Checkpoint
from oneshot.checkpoint.work_folder import WorkFolder, refuse_output
from oneshot.errors import OutputError, cause


def output_folder(output: str) -> Path:
    """Return the folder of the result. Raises `OutputError` for an impossible name."""
    try:
        folder = Path(output).expanduser()
        if not folder.name:
            raise OutputError(f"--output {output} is not a new folder; name one that does not exist yet.")
        folder.resolve().exists()
        WorkFolder(folder).path.exists()  # its name is longer
    except (OSError, RuntimeError, ValueError) as error:  # too long, unknown user, a zero byte
        raise OutputError(f"--output {output} cannot be used ({cause(error)}); choose another.") from error
    return folder


def refuse_place(output: Path, checkpoint: Checkpoint, *, overwrite: bool, resume: bool) -> None:
    """Raise `OutputError` if the result cannot appear at its place."""
    if checkpoint.folder.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"{output} holds the input checkpoint; choose another --output.")
    refuse_output(output, overwrite=overwrite, resume=resume)
    refuse_unwritable(output)


def refuse_file(path: Path, *, overwrite: bool) -> None:
    """Raise `OutputError` if no file can be written to this path; nothing stays there."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file as --output.")
    if path.exists() and not overwrite:
        raise OutputError(f"{path} exists already; choose another --output or add --overwrite.")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is not a folder; name a file in one that exists as --output.")
    refuse_unwritable(path)


def refuse_unwritable(output: Path) -> None:
    """Raise `OutputError` if no folder can be made where the result should be; nothing stays there."""
    place = next(folder for folder in output.absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".oneshot-", dir=place):
            pass
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({cause(error)}); choose another --output.") from error
