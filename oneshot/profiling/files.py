"""A profile on disk: `profile.safetensors` has the curves, `profile.json` has their origin."""

import json
import shutil
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oneshot.errors import OutputError, ProfileError
from oneshot.json_text import json_text
from oneshot.planning import Profile, ProfileOrigin

TENSORS, ORIGIN = "profile.safetensors", "profile.json"


def save_profile(profile: Profile, folder: Path) -> None:
    """Write a profile into a new folder that appears when it is complete. Raises `OutputError`."""
    refuse_existing(folder)
    tensors = {
        field.name: getattr(profile, field.name).contiguous() for field in fields(profile) if field.name != "origin"
    }
    parent, partial = folder.absolute().parent, None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=parent, prefix=f".{folder.name}.incomplete-"))
        save_file(tensors, partial / TENSORS)
        (partial / ORIGIN).write_text(json_text(asdict(profile.origin)) + "\n")
        partial.chmod(0o755)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        if partial is not None:
            shutil.rmtree(partial)
        raise OutputError(f"The profile cannot be written to {folder} ({error}); choose another --output.") from error


def refuse_existing(folder: Path) -> None:
    """Raise `OutputError` if the folder exists."""
    if folder.exists():
        raise OutputError(f"{folder} exists already; choose another --output or remove it.")


def load_profile(folder: Path) -> Profile:
    """Read a profile. Raises `ProfileError` if something is missing or damaged."""
    origin = profile_origin(folder)
    try:
        return Profile(origin=origin, **load_file(folder / TENSORS))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ProfileError(_unreadable(folder, error)) from error


def profile_origin(folder: Path) -> ProfileOrigin:
    """Read where a profile comes from, without its curves. Raises `ProfileError` as `load_profile`."""
    try:
        return ProfileOrigin(**json.loads((folder / ORIGIN).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ProfileError(_unreadable(folder, error)) from error


def _unreadable(folder: Path, error: Exception) -> str:
    return f"{folder} is not a readable profile ({error}); make one with oneshot profile."


def refuse_other(profile: Profile, folder: str, *, model_hash: str, token_hash: str, curvature: str) -> None:
    """Raise `ProfileError` if the profile was made of another model or text, or with another `curvature`."""
    if profile.origin.model_hash != model_hash:
        raise ProfileError(f"The profile {folder} belongs to another model; make one of this checkpoint.")
    if profile.origin.curvature != curvature:
        raise ProfileError(
            f"The profile {folder} was made with --set curvature={profile.origin.curvature}, but this run has "
            f"curvature={curvature}; make a profile with --set curvature={curvature}."
        )
    if profile.origin.token_hash != token_hash:
        raise ProfileError(
            f"The profile {folder} belongs to another calibration text; give the same --calibration, "
            "--num-sequences, --sequence-length and --seed, or make a new profile."
        )
