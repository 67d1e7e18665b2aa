"""The metadata of a checkpoint's own model card: licence, languages and data sets that a derived model inherits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load

from oneshot.checkpoint.safe_files import stored_file
from oneshot.errors import CheckpointError

CARD_NAME = "README.md"
MAX_CARD_BYTES = 2**20
INHERITED = ("license", "license_name", "license_link", "language", "datasets", "base_model")
HUB = "https://huggingface.co/"
GGUF_ORIGINS = ("general.source.repo_url", "general.repo_url", "general.base_model.0.repo_url")
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


def write_gguf_card(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write the licence and the origin on the hub that a GGUF file states as a card; nothing if it states none."""
    found = {"license": metadata.get("general.license")}
    addresses = (metadata.get(key) for key in GGUF_ORIGINS)
    hub = [str(address).removeprefix(HUB) for address in addresses if str(address).startswith(HUB)]
    found["base_model"] = next((name for name in hub if name.count("/") == 1), None)
    stated = {name: value for name, value in found.items() if value is not None and _is_plain(value)}
    if stated:
        (folder / CARD_NAME).write_text(ModelCard(f"---\n{ModelCardData(**stated).to_yaml()}\n---\n").content)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a short string or a list of short strings."""
    listed = value if isinstance(value, list) else [value]
    return 0 < len(listed) <= MOST_VALUES and all(isinstance(one, str) and len(one) <= LONGEST_VALUE for one in listed)
