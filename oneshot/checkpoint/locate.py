"""From the CHECKPOINT argument to a folder: a local folder, a GGUF file, or a name on the hub."""

import os
from pathlib import Path

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import NotASafetensorsRepoError

from oneshot.checkpoint.gguf import convert_gguf, open_gguf
from oneshot.checkpoint.hub import HubHeaders, download, is_hub_name
from oneshot.checkpoint.model import Model, identify
from oneshot.checkpoint.reader import Checkpoint
from oneshot.errors import CheckpointError, cause


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
