#!/usr/bin/env bash
# mlx-lm 0.32.2 with transformers 5.24.0: a Llama that transformers 5 saved is rotated with the base 10,000.
#
# Expected: mlx-lm requires transformers 5.7 or later, so it reads the config.json that such a version writes.
# Seen: transformers 5 writes `rope_parameters`, in which are `rope_theta` and the scaling. mlx-lm's Llama reads `rope_theta` and
# `rope_scaling`, keys of transformers 4, and takes 10,000 and no scaling where they are missing. There is no message, and the logits
# are wrong for every other base, such as Llama 3's 500,000. With the two older keys added to config.json they are right. Its class of
# Qwen3 reads the new record; most others do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model
from transformers import LlamaConfig, LlamaForCausalLM

transformers.utils.logging.disable_progress_bar()
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CASES = {
    "base 10,000": {"rope_type": "default", "rope_theta": 10000.0},
    "base 500,000": {"rope_type": "default", "rope_theta": 500000.0},
    "base 10,000, scaled as Llama 3.1": {"rope_type": "llama3", "rope_theta": 10000.0, **SCALING},
}
ids = torch.arange(3, 40)[None]


def difference(known: np.ndarray, folder: Path) -> float:
    return float(np.abs(np.array(load_model(folder)[0](mx.array(ids.numpy()))) - known).max())


print(f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}, transformers {transformers.__version__}")
seen = {}
for number, (case, rotary) in enumerate(CASES.items()):
    folder = Path(sys.argv[1]) / str(number)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=128, initializer_range=0.2, rope_parameters=rotary)).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        known = model(ids).logits.numpy()
    saved = difference(known, folder)
    config = json.loads((folder / "config.json").read_text())
    written = sorted(key for key in config if key.startswith("rope"))
    older = {"rope_theta": rotary["rope_theta"], "rope_scaling": rotary if "factor" in rotary else None}
    (folder / "config.json").write_text(json.dumps(config | older))
    seen[case] = saved, difference(known, folder)
    print(f"{case}: written {written}; logits (up to {np.abs(known).max():.1f}) differ by {saved:.5f},", end=" ")
    print(f"with the older keys by {seen[case][1]:.5f}")
right = all(added < 1e-3 for _, added in seen.values()) and seen["base 10,000"][0] < 1e-3
wrong = all(saved > 0.5 for case, (saved, _) in seen.items() if case != "base 10,000")
assert right and wrong, "The behaviour has changed."
PYTHON
