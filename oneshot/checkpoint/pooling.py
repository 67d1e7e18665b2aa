"""How sentence-transformers makes the embedding of a text of the last states, and the same in a GGUF file."""

from pathlib import Path

from oneshot.checkpoint.safe_files import MODULES, read_json, read_modules, stored_file
from oneshot.errors import CheckpointError
from oneshot.json_text import json_text

KINDS = {1: "mean", 2: "cls", 3: "lasttoken"}
"""The kinds of a GGUF file (`llama_pooling_type`) by sentence-transformers' names; 0 is none, 4 a classifier."""
FLAGS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}
TYPE = "sentence_transformers.models."
NEUTRAL = ("Transformer", "Pooling", "Normalize")  # what llama.cpp also does, or leaves to its caller


def pooling_of(folder: Path) -> str | None:
    """Return the kind of pooling that a folder of sentence-transformers states, such as `mean`; None for other folders.

    Raises `CheckpointError` for files that cannot be read, and for other kinds than these.
    """
    modules = _modules(folder)
    if "Pooling" not in modules:
        return None
    place = stored_file(folder, str(modules["Pooling"] / "config.json"))
    stated = read_json(place)
    kinds = [name for name, value in stated.items() if name.startswith("pooling_mode_") and value is True]
    kinds = kinds or [str(stated.get("pooling_mode"))]
    found = next((name for name, flag in FLAGS.items() if kinds in ([flag], [name])), None)
    if found is None:
        raise CheckpointError(f"{place} states {' and '.join(kinds)[:100]}; only {', '.join(FLAGS)} are known here.")
    return found


def further_modules(folder: Path) -> list[str]:
    """Return the modules of a folder of sentence-transformers that change its embeddings beside the pooling, sorted.

    Raises `CheckpointError` for a file that cannot be read.
    """
    return sorted(_modules(folder).keys() - set(NEUTRAL))


def _modules(folder: Path) -> dict[str, Path]:
    """Return the paths of the modules of sentence-transformers by their kinds; none for other folders."""
    return {kind.rpartition(".")[2]: place for kind, place in read_modules(folder)}


def write_pooling(folder: Path, kind: str, hidden_size: int) -> None:
    """Write the files from which sentence-transformers pools the last states of a model."""
    names = ("Transformer", ""), ("Pooling", "1_Pooling")
    modules = [{"idx": n, "name": str(n), "path": path, "type": TYPE + name} for n, (name, path) in enumerate(names)]
    flags = {flag: name == kind for name, flag in FLAGS.items()}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    stated = {"word_embedding_dimension": hidden_size, **flags}
    (folder / "1_Pooling" / "config.json").write_text(json_text(stated) + "\n")
    (folder / MODULES).write_text(json_text(modules) + "\n")
