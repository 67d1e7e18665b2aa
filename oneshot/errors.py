"""Errors a user can meet. Each message is one sentence that names the thing and the remedy."""

from collections.abc import Sequence

LONGEST_CAUSE = 300  # characters


class OneshotError(Exception):
    """Base of every error that `oneshot` raises on purpose; the command line prints it without a traceback.

    Its text is one printable line, because names of files and tensors may hold control characters.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Return the text on one line, with escapes for line ends, control characters and invalid Unicode."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def together(errors: Sequence[OneshotError]) -> OneshotError:
    """Return one error that has the sentences of all, of the type of the first."""
    first, *others = (str(error).removesuffix(".") for error in errors)
    others = [text[0].lower() + text[1:] if not text[1:2].strip() or text[1].islower() else text for text in others]
    return type(errors[0])("; moreover ".join([first, *others]) + ".")


def cause(error: BaseException) -> str:
    """Return the first line of another library's error for use in a sentence; its type if it has no text.

    A line that ends with a colon goes on in the next one, which may be the first of a list.
    """
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = f"{first} {others[0].removeprefix('- ')}" if first.endswith(":") and others else first
    return text[:LONGEST_CAUSE]


class ConfigError(OneshotError):
    """An option has a value that cannot be used."""


class CheckpointError(OneshotError):
    """The input checkpoint is missing, damaged, or of a kind that is not supported."""


class CalibrationError(OneshotError):
    """The calibration or evaluation text is missing, empty or too short."""


class ProfileError(OneshotError):
    """The profile is missing, damaged, or of another model or calibration text."""


class PlanError(OneshotError):
    """No plan reaches the target, or the form cannot hold the plan."""


class OutputError(OneshotError):
    """The output exists already or cannot be written."""


class DeviceError(OneshotError):
    """The device is not there or ran out of memory."""


class WorkerError(OneshotError):
    """Another process of the run ended, or cannot be reached."""


class MemoryLimitError(OneshotError):
    """The run would take more memory or disk than it may."""
