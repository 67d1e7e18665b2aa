"""Checkpoints on the hub: fetched whole for a run, and only their headers for a prediction.

Of the weights only the files that are read are fetched: many repositories hold copies in other formats.
"""

from pathlib import Path

from oneshot.checkpoint.reader import INDICES, WEIGHT_NAMES, Checkpoint, read_weight_map
from oneshot.checkpoint.safe_files import check_readable, read_config
from oneshot.errors import CheckpointError, cause

SMALL_PATTERNS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "bpe.codes"]
SMALL_PATTERNS += ["README.md", "LICENSE*", "NOTICE*", "USE_POLICY*"]


class HubHeaders(Checkpoint):
    """The config, the tokenizer and the headers of a checkpoint on the hub; its weights are not fetched.

    Raises `CheckpointError` if the hub cannot be reached or the name has no safetensors.
    """

    weights_at_hand = False

    def __init__(self, name: str, revision: str | None) -> None:
        from huggingface_hub import get_safetensors_metadata

        try:
            headers = get_safetensors_metadata(name, revision=revision)
        except Exception as error:  # its types change with the hub's HTTP library; the cause is named and chained
            raise _unreachable(name, error) from error
        self.folder = _fetched(name, revision, SMALL_PATTERNS)
        self.config = read_config(self.folder)
        check_readable(self.folder)
        self._shard_of, self._stored_names = dict(headers.weight_map), {}
        tensors = {name: one for file in headers.files_metadata.values() for name, one in file.tensors.items()}
        self.shapes = {name: tuple(one.shape) for name, one in tensors.items()}
        self.dtypes = {name: str(one.dtype) for name, one in tensors.items()}
        self._take_quantised()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensors."""
        return self.tensor_bytes


def is_hub_name(checkpoint: str) -> bool:
    """Return whether a name that is no local path can be a hub name."""
    return not checkpoint.startswith((".", "/", "~")) and checkpoint.count("/") == 1


def download(name: str, revision: str | None) -> Path:
    """Fetch a checkpoint and return its folder: the small files, then the weight files in transformers' order.

    Raises `CheckpointError` if it cannot be fetched.
    """
    folder = _fetched(name, revision, SMALL_PATTERNS)
    for file in WEIGHT_NAMES:
        index = file if file in INDICES else None
        if index is None:
            _fetched(name, revision, [file])
        if (folder / file).exists():
            if index is not None:
                _fetched(name, revision, sorted(set(read_weight_map(folder, index).values())))
            return folder
    return folder  # without weights that are known, of which opening tells


def _fetched(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # its types change with the hub's HTTP library; the cause is named and chained
        raise _unreachable(name, error) from error


def _unreachable(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name} is not a local path and cannot be fetched from the hub ({cause(error)}); "
        "check the name, the revision, the network and your access rights."
    )
