"""Safe access to the files of a checkpoint folder: regular files inside it, and JSON of limited size and depth.

A checkpoint may come from anywhere. A link that leaves its folder would publish a private file with the result, and a
pipe would block forever.
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oneshot.errors import CheckpointError, cause
from oneshot.machine.durable import checksum

LEGAL_FILES = ("LICENSE*", "NOTICE*", "USE_POLICY*")  # which no loader reads
# Copied as they are beside the compressed weights. The model or the tokenizer writes the first ones when it is saved.
WRITING_FILES = (
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "added_tokens.json",
    "special_tokens_map.json",
    "merges.txt",
    "*.model",  # of sentencepiece
    "*.tiktoken",
    "bpe.codes",
    "vocab.json",
    "vocab.txt",
    "tokenizer*",
)
OTHER_FILES = (
    "preprocessor_config.json",  # of images
    "processor_config.json",
    "video_preprocessor_config.json",
    # how sentence-transformers makes an embedding of the hidden states
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]*_*/config.json",
    *LEGAL_FILES,
)
COMPANION_FILES = (*WRITING_FILES, *OTHER_FILES)
# Read by us or by transformers, whose tokenizers look for many names.
READ_FILES = (*COMPANION_FILES, "*.json", "*.txt", "*.jinja", "additional_chat_templates/*")
MAX_JSON_BYTES = 100 * 2**20
MAX_JSON_DEPTH = 50
MAX_CHECKED_BYTES, TAIL = 2**20, 1000
TEXT_ENDINGS = (".json", ".jinja", ".txt", ".codes", ".tiktoken")
MAX_LABELS = 10**6
CONFIG_ENDING = "config.json"  # of files that may name code
MODULES, OWN_MODULES = "modules.json", "sentence_transformers."
LINEARS = ("colbert_linear.pt", "sparse_linear.pt")  # of BGE-M3, which FlagEmbedding reads
MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # sentence-transformers reads the first one that exists
BY_VERSION = "configuration_files"  # files of which transformers reads one by its own version instead of config.json


def stored_file(folder: Path, name: str) -> Path:
    """Return `folder / name` if it is a regular file inside the folder, or a link to one.

    Links from a `snapshots` folder of the hub's cache may also lead to its `blobs`, as the hub's own links do.

    Raises `CheckpointError` if the file is missing, leads elsewhere, or is not a regular file.
    """
    path = folder / name
    try:
        target = path.resolve(strict=True)
        is_regular = stat.S_ISREG(target.stat().st_mode)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop, before Python 3.13
        if os.path.islink(path):
            raise CheckpointError(
                f"{path} is a link that leads nowhere ({cause(error)}); download the file again."
            ) from error
        raise CheckpointError(
            f"{path} is missing or cannot be read ({cause(error)}); "
            "give the folder of a complete Hugging Face checkpoint."
        ) from error
    home = folder.resolve()
    places = [home]
    if home.parent.name == "snapshots":
        places.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in places):
        raise CheckpointError(f"{path} leads to {target}, outside the checkpoint; copy the file into the folder.")
    if not is_regular:
        raise CheckpointError(f"{path} is not a regular file; give the folder of a complete Hugging Face checkpoint.")
    return path


def check_readable(folder: Path) -> None:
    """Check all files that may be read or copied, except the weights.

    Of those that are copied and that loaders read, text must be UTF-8, and JSON must be JSON. Large JSON other than a
    config belongs to tokenizers, which have readers of their own; only its end is looked for.

    Raises as `stored_file`, and `CheckpointError` for one that holds something else.
    """
    _existing(folder, READ_FILES)
    for path in companion_files(folder):
        is_legal = any(path.match(pattern) for pattern in LEGAL_FILES)
        if path.suffix not in TEXT_ENDINGS or is_legal:
            continue
        if path.stat().st_size <= MAX_JSON_BYTES:
            _check_text(path)
        elif path.name.endswith(CONFIG_ENDING):
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB; download it again, or remove it.")


def _check_text(path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8")
        is_json, is_config = path.suffix == ".json", path.name.endswith(CONFIG_ENDING)
        is_parsed = is_json and (is_config or len(text) <= MAX_CHECKED_BYTES)
        content = json.loads(text) if is_parsed else {}
        if is_json and not is_parsed and not text[-TAIL:].rstrip().endswith(("}", "]")):
            raise ValueError("its end is missing")
    except (OSError, ValueError, RecursionError) as error:
        is_text = path.suffix != ".json" or isinstance(error, UnicodeDecodeError)
        kind = "text in UTF-8" if is_text else "JSON"
        raise CheckpointError(f"{path} is not {kind} ({cause(error)}); download it again, or remove it.") from error
    if not isinstance(content, dict | list):
        raise CheckpointError(f"{path} is not an object or a list of JSON; download it again, or remove it.")
    if is_config and _deeper_than(content, MAX_JSON_DEPTH):
        raise CheckpointError(f"{path} is nested too deeply; download it again, or remove it.")


def companion_files(folder: Path) -> list[Path]:
    """Return the tokenizer, chat template, generation config, pooling and licence files.

    Raises as `other_companions`.
    """
    return sorted({*_existing(folder, WRITING_FILES), *other_companions(folder)})


def other_companions(folder: Path) -> list[Path]:
    """Return the companion files that belong neither to generation nor to the tokenizer.

    Weights of what follows the last hidden states are among them.

    Raises as `stored_file` and `read_modules`.
    """
    modules = [str(place / CONFIG_ENDING) for place in module_folders(folder)]
    of_modules = [name for name in modules if os.path.lexists(folder / name)] + weights_behind(folder)
    return sorted({*_existing(folder, OTHER_FILES), *(stored_file(folder, name) for name in of_modules)})


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the type and the path of each module of sentence-transformers; none for other folders.

    Every path is below the folder, or the folder itself (`Path()`).

    Raises as `stored_file`, and `CheckpointError` for a damaged file, for code, for a path that leaves the folder, and
    for a model that has a folder of its own.
    """
    if not os.path.lexists(folder / MODULES):
        return []
    path = stored_file(folder, MODULES)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it is larger than {MAX_JSON_BYTES >> 20} MiB")
        stated = json.loads(path.read_text(encoding="utf-8"))
        modules = [(str(module["type"]), Path(module["path"])) for module in stated]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON with a list of modules ({cause(error)}); download it again, or remove it."
        ) from error
    for kind, place in modules:
        if not kind.startswith(OWN_MODULES):
            raise CheckpointError(
                f"{path} names code ({kind[:100]}), which is never run; remove the file if you trust the rest."
            )
        if place.is_absolute() or ".." in place.parts or not str(place).isprintable():
            raise CheckpointError(
                f"{path} states the path {str(place)[:100]!r}, which is not the name of a folder of the checkpoint; "
                "download it again, or remove it."
            )
        if kind.endswith("Transformer") and place != Path():
            raise CheckpointError(
                f"{path} states that the model lies in {place}, so its weights would stay as they are; move the files "
                'of that folder beside modules.json, and state the path "" there.'
            )
    return modules


def module_folders(folder: Path) -> list[Path]:
    """Return the folders of the modules of sentence-transformers, without the one of the model itself.

    Raises as `read_modules`.
    """
    return [place for _, place in read_modules(folder) if place != Path()]


def weights_behind(folder: Path) -> list[str]:
    """Return the weight files of what follows the model's last hidden states, as names in the folder.

    That is modules of sentence-transformers behind the pooling, such as a linear, and the linears of BGE-M3.

    Raises as `read_modules`.
    """
    files = ([str(place / name) for name in MODULE_WEIGHTS] for place in module_folders(folder))
    stored = ([name for name in names if os.path.lexists(folder / name)] for names in files)
    linears = [name for name in LINEARS if os.path.lexists(folder / name)]
    return [names[0] for names in stored if names] + linears


def config_hash(folder: Path) -> str:
    """Return the SHA-256 of `config.json`. Raises as `stored_file`."""
    return checksum(stored_file(folder, "config.json"))


def companion_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of `config.json` and of every companion file, by its name. Raises as `stored_file`."""
    hashes = {str(path.relative_to(folder)): checksum(path) for path in companion_files(folder)}
    return {"config.json": config_hash(folder)} | hashes


def _existing(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = {
        path for pattern in patterns for path in folder.glob(pattern) if not path.is_dir() and path.suffix != ".py"
    }
    return [stored_file(folder, str(path.relative_to(folder))) for path in sorted(found)]


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json`.

    Raises `CheckpointError` as `read_json`, and for entries that make transformers run code, build too much or read
    another file.
    """
    path = stored_file(folder, "config.json")
    config = read_json(path)
    for place, value in _entries(config):
        name = place.rpartition(".")[2]
        if ("implementation" in name and "/" in json.dumps(value)) or (name == "auto_map" and place != name):
            raise CheckpointError(
                f"{path} names code ({place[:100]}), which is never run; remove the entry if you trust the rest."
            )
    labels = config.get("num_labels")
    if labels is not None and not (isinstance(labels, int) and 0 <= labels <= MAX_LABELS):
        raise CheckpointError(f"{path} states num_labels {labels!r}, which is not a sensible number; remove the entry.")
    if BY_VERSION in config:
        raise CheckpointError(
            f"{path} states {BY_VERSION}, so transformers may read another file of the folder by its own version; put "
            "the content of that file into config.json, without the entry."
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object without NaN and Infinity.

    Raises `CheckpointError` for anything else, and for more than `MAX_JSON_BYTES` or `MAX_JSON_DEPTH`.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB; give an undamaged checkpoint.")
        content = json.loads(path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({cause(error)}); download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again.")
    if _deeper_than(content, MAX_JSON_DEPTH):
        raise CheckpointError(f"{path} is nested too deeply; give an undamaged checkpoint.")
    return content


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _entries(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every entry of a JSON value at any depth, with its place, such as `text_config.layer_types`."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield place + name, value
            yield from _entries(value, f"{place}{name}.")
    elif isinstance(content, list):
        for value in content:
            yield from _entries(value, place)


def _deeper_than(content: Any, depth: int) -> bool:
    level = [content]
    for _ in range(depth):
        values = [value.values() if isinstance(value, dict) else value for value in level]
        level = [inner for several in values for inner in several if isinstance(inner, dict | list)]
    return bool(level)
