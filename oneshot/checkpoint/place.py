"""The place of a result: where it may appear."""

from pathlib import Path

from oneshot.checkpoint.reader import Checkpoint
from oneshot.checkpoint.work_folder import refuse_output
from oneshot.errors import OutputError, cause


def output_folder(output: str) -> Path:
    """Return the folder of the result. Raises `OutputError` for an impossible name."""
    try:
        folder = Path(output).expanduser()
        folder.resolve().exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, unknown user, a zero byte
        raise OutputError(f"--output {output} cannot be used ({cause(error)}); choose another.") from error
    return folder


def refuse_place(output: Path, checkpoint: Checkpoint, *, overwrite: bool, resume: bool) -> None:
    """Raise `OutputError` if the result cannot appear at its place."""
    if checkpoint.folder.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"{output} holds the input checkpoint; choose another --output.")
    refuse_output(output, overwrite=overwrite, resume=resume)
