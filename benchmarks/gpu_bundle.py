"""Make `.gpu`: what benchmarks/gpu.py needs on a machine without network. It takes less than 60 MiB.

It has the first layers of SmolLM2-135M in 8 bits a weight (one scale for each row), its tokenizer, and the name of the
commit.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 8
LARGEST = 127
MOST_BYTES = 60 * 2**20
SCALE = ".scale"
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

Tensors = dict[str, torch.Tensor]


def quantised(tensors: Tensors) -> Tensors:
    """Return matrices in 8 bits with a scale for each row; vectors as they are."""
    small: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            small[name] = tensor
            continue
        scale = tensor.float().abs().amax(1).clamp_min(1e-12) / LARGEST
        small[name] = (tensor.float() / scale.unsqueeze(1)).round().to(torch.int8)
        small[name + SCALE] = scale
    return small


def expand(bundle: Path, folder: Path) -> None:
    """Write the checkpoint that a bundle stands for, in bfloat16."""
    folder.mkdir(parents=True)
    small = load_file(bundle / "model.safetensors")
    whole = {
        name: (tensor.float() * small[name + SCALE].unsqueeze(1) if name + SCALE in small else tensor).bfloat16()
        for name, tensor in small.items()
        if not name.endswith(SCALE)
    }
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    for name in COPIED:
        if (bundle / name).exists():
            shutil.copy(bundle / name, folder)


def make(bundle: Path) -> int:
    """Write the bundle and return its bytes."""
    from harness import smollm2_gguf

    from oneshot.checkpoint import locate_checkpoint

    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = locate_checkpoint(str(smollm2_gguf()), Path(scratch))
        tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        layers = tuple(f"model.layers.{number}." for number in range(LAYERS))
        kept = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith("model.layers.") or name.startswith(layers)
        }
        save_file(quantised(kept), bundle / "model.safetensors")
        for name in COPIED:
            if (folder / name).exists():
                shutil.copy(folder / name, bundle)
    config = json.loads((bundle / "config.json").read_text())
    config = {name: value for name, value in config.items() if name != "layer_types"} | {"num_hidden_layers": LAYERS}
    (bundle / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    (bundle / "COMMIT").write_text(name.stdout)
    return sum(path.stat().st_size for path in bundle.iterdir())


def main() -> int:
    """Make the bundle; fail if it is too large to travel."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--bundle", type=Path, default=ROOT / ".gpu")
    size = make(options.parse_args().bundle)
    print(f"{size / 2**20:.1f} MiB")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
