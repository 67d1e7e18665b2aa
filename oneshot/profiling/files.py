"""A profile on disk: `profile.safetensors` has the curves; `profile.json` has their origin and all checksums.

A folder beside them has the output curvature, so that a run that plans by the profile need not measure it again. Of a
mixture, `mixture.json` has the verdict and `experts.jsonl` the order of the experts; nothing reads them again.
"""

import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oneshot.checkpoint.read_log import ReadLog
from oneshot.compression import Curvature
from oneshot.errors import OutputError, ProfileError
from oneshot.machine.durable import DamagedFileError, checksum, flush, flush_tree, read_sealed, seal, write_sealed
from oneshot.planning import Profile, ProfileOrigin
from oneshot.report import words

TENSORS, ORIGIN, CURVATURE = "profile.safetensors", "profile.json", "curvature"
VERDICT, RANKING = "mixture.json", "experts.jsonl"
logger = logging.getLogger(__name__)


def save_profile(
    profile: Profile,
    folder: Path,
    *,
    written: dict[str, Any] | None = None,
    curvature: Curvature | None = None,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Write a profile into a new folder that appears when it is complete. Raises `OutputError`.

    Args:
        written: JSON values of the text that the model wrote for it; writing takes longer than planning from a profile.
        curvature: of every layer, whose files move there; left out with a warning if the disk has no room for them.
        beside: the contents of other files in the folder, by their names.
    """
    refuse_existing(folder)
    tensors = {
        field.name: getattr(profile, field.name).contiguous() for field in fields(profile) if field.name != "origin"
    }
    parent, partial = folder.absolute().parent, None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=parent, prefix=f".{folder.name}.incomplete-"))
        save_file(tensors, partial / TENSORS)
        content = {"origin": asdict(profile.origin), "curves": checksum(partial / TENSORS)}
        content |= {} if written is None else {"written": written}
        if curvature is not None and _has_room(parent, curvature, folder):
            shutil.move(curvature.folder, partial / CURVATURE)
            (partial / CURVATURE).chmod(0o755)  # as the profile's folder: temporary ones are their owner's alone
            content[CURVATURE] = {path.name: checksum(path) for path in sorted((partial / CURVATURE).iterdir())}
        write_sealed(partial / ORIGIN, content)
        for name, text in ({} if beside is None else beside).items():
            (partial / name).write_text(text, encoding="utf-8")
        partial.chmod(0o755)
        flush_tree(partial)
        partial.rename(folder)
        flush(parent)
    except (OSError, SafetensorError) as error:
        if partial is not None:
            shutil.rmtree(partial)
        refuse_existing(folder)  # made by another process meanwhile
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
        return ProfileOrigin(**_content(folder)["origin"])
    except (KeyError, TypeError) as error:
        raise ProfileError(_unreadable(folder, error)) from error


def text_of_profile(folder: Path) -> dict[str, Any] | None:
    """Return the text that the model wrote for a profile; None without one. Raises `ProfileError` as `load_profile`."""
    written: dict[str, Any] | None = _content(folder).get("written")
    return written


def holds_curvature(folder: Path) -> bool:
    """Return whether a profile has the output curvature. Raises `ProfileError` as `load_profile`."""
    return CURVATURE in _content(folder)


def curvature_of_profile(folder: Path) -> Curvature:
    """Return the output curvature that a profile has, read in its place. Raises `ProfileError` if it is damaged."""
    for name, expected in _content(folder)[CURVATURE].items():
        try:
            found = checksum(folder / CURVATURE / name)
        except OSError as error:
            raise ProfileError(_unreadable(folder, error)) from error
        if found != expected:
            raise ProfileError(_unreadable(folder, f"{CURVATURE}/{name} was damaged after it was written"))
    return Curvature(folder / CURVATURE)


def profile_hash(folder: Path) -> str:
    """Return a checksum of a profile, wherever it lies. Raises `ProfileError` as `load_profile`."""
    return seal(_content(folder))


def _content(folder: Path) -> dict[str, Any]:
    """Return what `profile.json` states, if nothing of the profile is damaged."""
    try:
        content = read_sealed(folder / ORIGIN)
        if content is None:
            raise ProfileError(_unreadable(folder, f"{ORIGIN} is missing"))
        if checksum(folder / TENSORS) != content.get("curves"):
            raise ProfileError(_unreadable(folder, f"{TENSORS} was damaged after it was written"))
    except (OSError, DamagedFileError) as error:
        raise ProfileError(_unreadable(folder, error)) from error
    return content


def _has_room(parent: Path, curvature: Curvature, folder: Path) -> bool:
    """Return whether the curvature can move to a disk, which needs no room on its own; warn if it cannot."""
    if _disk_of(curvature.folder) == _disk_of(parent):
        return True
    size, free = sum(path.stat().st_size for path in curvature.folder.iterdir()), shutil.disk_usage(parent).free
    if size < free:
        return True
    logger.warning(
        "%s is written without the output curvature, %s, because its disk has %s free; runs that plan by the profile "
        "measure it again.",
        folder,
        words.size(size),
        words.size(free),
    )
    return False


def _disk_of(folder: Path) -> int:
    return folder.stat().st_dev


def _unreadable(folder: Path, error: Exception | str) -> str:
    return f"{folder} is not a readable profile ({error}); make one with oneshot profile."


def refuse_other_model(
    origin: ProfileOrigin,
    folder: str,
    *,
    model_hash: str | None,
    config_hash: str | None,
    curvature: str,
    head_unit: str,
    damping: float,
) -> None:
    """Raise `ProfileError` if a profile is of another model, or has another `curvature`, `head_unit` or `damping`.

    The hashes are None for a model whose files are not at hand.
    """
    if model_hash not in (None, origin.model_hash):
        raise ProfileError(f"The profile {folder} belongs to another model; make one of this checkpoint.")
    if config_hash not in (None, origin.config_hash):
        raise ProfileError(
            f"The profile {folder} belongs to a model with another config.json; make one of this checkpoint."
        )
    if origin.curvature != curvature:
        raise ProfileError(
            f"The profile {folder} was made with --set curvature={origin.curvature}, but this run has "
            f"curvature={curvature}; make a profile with --set curvature={curvature}."
        )
    if origin.head_unit != head_unit:
        raise ProfileError(
            f"The profile {folder} has what heads cost by head_unit={origin.head_unit}, but this run has "
            f"head_unit={head_unit}; add --set head_unit={origin.head_unit}, or make a profile with --set "
            f"head_unit={head_unit}."
        )
    if origin.damping != damping:
        raise ProfileError(
            f"The profile {folder} was made with --set damping={origin.damping}, but this run has damping={damping}; "
            f"add --set damping={origin.damping}, or make a profile with --set damping={damping}."
        )


def refuse_other_text(profile: Profile, folder: str, *, token_hash: str, log: ReadLog | None) -> None:
    """Raise `ProfileError` if the profile is of another text.

    `log`: of the tensors that this process reads; each is compared with what the profile was made of, now or later.
    """
    if profile.origin.token_hash != token_hash:
        raise ProfileError(
            f"The profile {folder} belongs to another calibration text; give the same --calibration, "
            "--num-sequences, --sequence-length and --seed, or make a new profile (of one source it also reads "
            "builtin; --calibration TEXT+TEXT reads TEXT alone in both)."
        )
    if log is not None:
        log.expect(
            profile.origin.weights,
            lambda place: ProfileError(
                f"The profile {folder} belongs to another model: {place} differs; make one of this checkpoint."
            ),
        )
