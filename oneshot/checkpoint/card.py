"""The metadata of a checkpoint's own model card: licence, languages and data sets that a derived model inherits."""

from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from oneshot.checkpoint.safe_files import stored_file
from oneshot.errors import CheckpointError

CARD_NAME = "README.md"
MAX_CARD_BYTES = 2**20
INHERITED = ("license", "license_name", "license_link", "language", "datasets")
MOST_VALUES, LONGEST_VALUE = 100, 200


def card_metadata(folder: Path) -> dict[str, Any]:
    """Return what a derived model inherits of the card's metadata; empty without a readable card."""
    try:
        path = stored_file(folder, CARD_NAME)
        metadata = metadata_load(path) if path.stat().st_size <= MAX_CARD_BYTES else None
    except CheckpointError:  # there is no card, or a link that leads out of the checkpoint
        return {}
    except Exception:  # YAML of anyone: its reader raises many unrelated types, and the card is optional
        return {}
    if not isinstance(metadata, dict):
        return {}
    return {name: metadata[name] for name in INHERITED if _is_plain(metadata.get(name))}


def _is_plain(value: Any) -> bool:
    """Return whether a value is a short string or a list of short strings."""
    listed = value if isinstance(value, list) else [value]
    return 0 < len(listed) <= MOST_VALUES and all(isinstance(one, str) and len(one) <= LONGEST_VALUE for one in listed)
