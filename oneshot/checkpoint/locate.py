"""From the CHECKPOINT argument to a folder: a local folder, a GGUF file, or a name on the hub.

A checkpoint on the hub is fetched whole for a run, and only its headers for a prediction. Of the weights only the files
that are read are fetched: many repositories hold copies in other formats.
"""

import os
from pathlib import Path

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import NotASafetensorsRepoError

from oneshot.checkpoint.gguf import convert_gguf, open_gguf
from oneshot.checkpoint.model import Model, identify
from oneshot.checkpoint.reader import INDICES, WEIGHT_NAMES, Checkpoint, read_weight_map
from oneshot.checkpoint.safe_files import LINEARS, MODULE_WEIGHTS, check_readable, module_folders, read_config
from oneshot.errors import CheckpointError, cause

SMALL_PATTERNS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "bpe.codes"]
SMALL_PATTERNS += ["README.md", "LICENSE*", "NOTICE*", "USE_POLICY*", *LINEARS]


def open_model(checkpoint: str, scratch: Path) -> Model:
    """Find or fetch a checkpoint and open it; it reads headers and no weights.

    Raises `CheckpointError` for everything that is missing, damaged, or of a family that is not supported.
    """
    return identify(Checkpoint(locate_checkpoint(checkpoint, scratch)))


def locate_checkpoint(checkpoint: str, scratch: Path, revision: str | None = None) -> Path:
    """Find or fetch the checkpoint's folder; a GGUF file is dequantised into `scratch`.

    `revision`: branch, tag or commit of a hub name.

    Raises `CheckpointError` if the path does not exist, the folder is empty, or the hub cannot be reached.
    """
    if revision is not None and os.path.exists(os.path.expanduser(checkpoint)):
        raise CheckpointError(
            f"{checkpoint} is a local path, which has no revision; leave out the revision {revision}."
        )
    try:
        path = Path(checkpoint).expanduser()
        str(path).encode()  # safetensors accepts only UTF-8
        is_folder = path.is_dir()
        is_empty = is_folder and not any(path.iterdir())
    except (OSError, RuntimeError, UnicodeEncodeError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read ({cause(error)}); check the path.") from error
    if is_folder:
        if is_empty:
            raise CheckpointError(f"{path} is an empty folder; give the folder of a Hugging Face checkpoint.")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; check the path.")
        return convert_gguf(path, scratch)
    if path.exists():
        raise CheckpointError(f"{path} is a file; give a folder with config.json and weights, or a .gguf file.")
    if not is_hub_name(checkpoint):
        raise CheckpointError(f"{checkpoint} does not exist; check the path, or give a hub name such as org/model.")
    return download(checkpoint, revision)


def open_headers(checkpoint: str, scratch: Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint for a prediction: a GGUF file is not converted, and weights on the hub are not fetched.

    A hub name whose files were fetched earlier is opened without a network. One without safetensors is fetched whole.

    Raises `CheckpointError` as `locate_checkpoint`.
    """
    gguf = open_gguf(checkpoint)
    if gguf is not None:
        return gguf
    if os.path.exists(os.path.expanduser(checkpoint)) or not is_hub_name(checkpoint):
        return Checkpoint(locate_checkpoint(checkpoint, scratch, revision))
    try:
        return HubHeaders(checkpoint, revision)
    except CheckpointError as error:
        if not is_offline_mode() and not isinstance(error.__cause__, NotASafetensorsRepoError):
            raise
        return Checkpoint(locate_checkpoint(checkpoint, scratch, revision))


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

    Weights of modules of sentence-transformers come between both.

    Raises `CheckpointError` if it cannot be fetched, and as `read_modules`.
    """
    folder = _fetched(name, revision, SMALL_PATTERNS)
    lacking = module_folders(folder)
    for weights in MODULE_WEIGHTS:
        if lacking:
            _fetched(name, revision, [f"{place}/{weights}" for place in lacking])
        lacking = [place for place in lacking if not (folder / place / weights).exists()]
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
