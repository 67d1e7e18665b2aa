#!/usr/bin/env bash
# transformers 5.24.0: FP8 weights of blocks of 128 are dequantised wrongly where 128 does not divide a size.
#
# Expected: block (i, j) of scales belongs to rows 128 i to 128 i + 127 and columns 128 j to 128 j + 127, as in
# DeepSeek-V3's files; the last block is smaller. FineGrainedFP8Config(dequantize=True) then gives value × scale.
# Seen: the rows and columns are shared out equally among the scales. Of a weight with 192 rows, a sixth of all
# numbers gets the scale of the neighbouring block, and there is no message.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

BLOCK = 128
folder = Path(sys.argv[1]) / "model"
folder.mkdir()
torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=64, **sizes, tie_word_embeddings=False)
stored, expected = {}, {}
for name, weight in LlamaForCausalLM(config).state_dict().items():
    if not name.endswith("proj.weight"):
        stored[name] = weight.to(torch.bfloat16).clone()
        continue
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales, values = torch.empty(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    expected[name] = torch.empty(weight.shape)
    for row in range(rows):
        for column in range(columns):
            part = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scales[row, column] = weight[part].abs().max() / 448 * (1 + 3 * row + 5 * column)
            values[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
            expected[name][part] = values[part].float() * scales[row, column]
    stored |= {name: values, f"{name}_scale_inv": scales}
save_file(stored, folder / "model.safetensors", {"format": "pt"})
fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
(folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": fp8}))
opened = LlamaForCausalLM.from_pretrained(
    folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
).state_dict()
print(f"transformers {transformers.__version__}")
wrong = {}
for name, weight in expected.items():
    wrong[name] = ((opened[name] - weight).abs() > 0.02 * weight.abs() + 1e-6).float().mean().item()
    print(f"{name} {tuple(weight.shape)}: {wrong[name]:.1%} of the numbers are wrong")
whole = all(share == 0 for name, share in wrong.items() if "self_attn" in name)
broken = all(share > 0.1 for name, share in wrong.items() if "mlp" in name)
assert whole and broken, "The behaviour has changed: see the shares above."
PYTHON
