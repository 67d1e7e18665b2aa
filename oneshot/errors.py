"""Errors a user can meet. Each message is one sentence that names the thing and the remedy."""


class OneshotError(Exception):
    """Base of every error that `oneshot` raises on purpose; the command line prints it without a traceback."""


class ConfigError(OneshotError):
    """An option has a value that cannot be used."""


class CheckpointError(OneshotError):
    """The input checkpoint is missing, damaged, or of a kind that is not supported."""


class CalibrationError(OneshotError):
    """The calibration or evaluation text is missing, empty or too short."""


class ProfileError(OneshotError):
    """The profile is missing, damaged, or of another model or calibration text."""


class PlanError(OneshotError):
    """No plan reaches the wanted size, or the export tier cannot hold the plan."""


class OutputError(OneshotError):
    """The output exists already or cannot be written."""


class DeviceError(OneshotError):
    """The wanted device is not there or ran out of memory."""


class MemoryLimitError(OneshotError):
    """The run would take more memory or disk than it may."""
