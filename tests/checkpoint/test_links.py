"""Links, pipes and folders in the place of a checkpoint's files: only what stays within the checkpoint is followed."""

import os
import shutil
from pathlib import Path

import pytest
from damage import message_of, replace_by_link
from factories import Fails, MakeCheckpoint, small_arguments

from oneshot.checkpoint import open_model
from oneshot.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from oneshot.cli.compress import main
from oneshot.errors import CheckpointError
from oneshot.export import write_companions


@pytest.mark.parametrize("kind", ["folder", "pipe", "broken", "loop", "outside"])
@pytest.mark.parametrize("name", ["config.json", SINGLE_NAME, INDEX_NAME, "tokenizer.json", "vocab.txt", "LICENSE"])
def test_a_path_that_is_not_a_regular_file_of_the_folder(
    kind: str, name: str, own_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Reading a pipe would block; a file outside the folder would be published with the result."""
    folder = own_checkpoint(shard_size="20KB" if name == INDEX_NAME else "5GB")
    path, outside = folder / name, tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("{}")
    if kind == "folder":
        path.mkdir()
        if name in ("vocab.txt", "LICENSE", "tokenizer.json"):
            open_model(str(folder), folder)  # nobody reads such a folder
            return
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"broken": tmp_path / "gone", "loop": path, "outside": outside}[kind])
    reason = {
        "folder": "is not a regular file",
        "pipe": "is not a regular file",
        "broken": "leads nowhere",
        "loop": "leads nowhere",
        "outside": f"leads to {outside}, outside the checkpoint",
    }[kind]
    message = message_of(folder)
    assert message.startswith(str(path))
    assert reason in message


def test_a_private_file_is_not_published(own_checkpoint: MakeCheckpoint, tmp_path: Path, fails: Fails) -> None:
    folder, secret = own_checkpoint(), tmp_path / "id_rsa"
    secret.write_text("secret")
    replace_by_link(folder / "tokenizer_config.json", secret)
    assert f"leads to {secret}, outside the checkpoint" in fails(folder)
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        write_companions(folder, target, {}, dtype=None)
    assert all("secret" not in path.read_text() for path in target.iterdir())


def as_hub_cache(folder: Path, repository: Path) -> Path:
    """Return a snapshot as in the hub's cache: links to the files, which lie in `blobs`."""
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / f"hash{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash{number}")
    return snapshot


def test_links_of_the_hub_cache_are_followed(make_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path) -> None:
    folder = make_checkpoint(shard_size="20KB")
    snapshot = as_hub_cache(folder, tmp_path / "models--org--tiny")
    (tmp_path / "my-model").symlink_to(snapshot)
    outputs = [tmp_path / "plain", tmp_path / "cached", tmp_path / "linked"]
    for checkpoint, output in zip((folder, snapshot, tmp_path / "my-model"), outputs, strict=True):
        assert main([*small_arguments(checkpoint, output, text_file), "--quiet"]) == 0
    plain, cached, linked = (
        {path.name: path.read_bytes() for path in output.iterdir() if path.suffix == ".safetensors"}
        for output in outputs
    )
    assert plain == cached == linked
    assert (outputs[1] / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (outputs[1] / "tokenizer.json").is_symlink()


def test_a_false_hub_cache(own_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Links to another folder of the repository are refused, and also `blobs` that is itself a link."""
    repository, secret = tmp_path / "models--org--tiny", tmp_path / "secret"
    secret.write_text("{}")
    snapshot = as_hub_cache(own_checkpoint(), repository)
    (repository / "refs").mkdir()
    (repository / "refs" / "a").write_text("{}")
    (snapshot / "LICENSE").symlink_to("../../refs/a")
    assert "outside the checkpoint" in message_of(snapshot)
    replace_by_link(snapshot / "LICENSE", "../../blobs/../../secret")
    assert "outside the checkpoint" in message_of(snapshot)
    (snapshot / "LICENSE").unlink()
    open_model(str(snapshot), tmp_path)
    (repository / "blobs").rename(tmp_path / "elsewhere")
    (repository / "blobs").symlink_to(tmp_path / "elsewhere")
    assert "outside the checkpoint" in message_of(snapshot)


def test_a_link_within_the_folder_is_followed(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    (folder / SINGLE_NAME).rename(folder / "weights")
    (folder / SINGLE_NAME).symlink_to("weights")
    assert open_model(str(folder), folder).shape.hidden_size == 32
