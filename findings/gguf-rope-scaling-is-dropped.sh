#!/usr/bin/env bash
# transformers 5.24.0: a GGUF file's scaling of rotary positions is dropped, as keys and as Llama 3's table.
#
# Expected: `from_pretrained(folder, gguf_file=...)` computes what the file states. llama.cpp does for `rope.scaling.type` with
# `rope.scaling.factor` (linear, YaRN), and for the tensor `rope_freqs.weight`, in which its converter writes Llama 3.1's scaling.
# Seen: for the architecture llama all are dropped without a warning. The config says "default", and the logits equal an unscaled
# model's to the last bit. So a long context fails, and for Llama 3.1 a short one has wrong logits also.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0
cd "$folder" # a file of the same name in the working directory would be opened instead of the folder's
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - "$folder" 2>"$folder/messages" <<'PYTHON' || { cat "$folder/messages"; exit 1; }
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM

transformers.utils.logging.disable_progress_bar()
THETA, CONTEXT, HIDDEN, FFN, HEADS, VOCABULARY = 500000.0, 2048, 64, 96, 2, 128
LAYER = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
LAYER |= {f"attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
LAYER |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
TENSORS = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCABULARY, HIDDEN)}
TENSORS |= {f"blk.0.{name}": shape for name, shape in LAYER.items()}


def write(path: Path, case: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(4 * CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    if case in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(case))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(CONTEXT)
    elif case == "table":  # a table of equal numbers divides all frequencies, as a linear factor does
        writer.add_tensor("rope_freqs.weight", np.full(HIDDEN // HEADS // 2, 8.0, np.float32))
    random = np.random.default_rng(0)
    for name, shape in TENSORS.items():
        weight = np.ones(shape, np.float32) if "norm" in name else 0.3 * random.standard_normal(shape, np.float32)
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


STATED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT},
    "table": {"rope_type": "linear", "factor": 8.0},
}
print(f"transformers {transformers.__version__}, gguf {version('gguf')}")
ids = torch.arange(3, 40)[None]
folder = Path(sys.argv[1])
unscaled, seen = None, []
for case in ("none", *STATED):
    write(folder / f"{case}.gguf", case)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=f"{case}.gguf").eval()
    with torch.no_grad():
        read = model(ids).logits
        if case == "none":
            unscaled = read
            continue
        model.config.rope_parameters = {"rope_theta": THETA, **STATED[case]}
        right = LlamaForCausalLM(model.config).eval()
        right.load_state_dict(model.state_dict())
        difference = (right(ids).logits - read).abs().max().item()
    same = torch.equal(read, unscaled)
    print(f"{case}: equal to the unscaled file's logits: {same};", end=" ")
    print(f"largest difference from the stated scaling: {difference:.3f}")
    seen.append(same and difference > 0.1)
assert all(seen), "The behaviour has changed: a scaling is read."
PYTHON
