#!/usr/bin/env bash
# transformers 5.24.0: generate(use_mtp=True) finds the layers that predict further tokens by published numbers alone.
#
# Expected: GLM-4-MoE with num_nextn_predict_layers 1 stores its further layer behind the last one, so a model with 3
# layers has it as model.layers.3, where vLLM reads it. generate(use_mtp=True) then drafts with it.
# Seen: the layer is looked for as model.layers.46 and model.layers.92, the numbers of GLM-4.5-Air and GLM-4.5. Of a
# model with fewer layers all its tensors are called missing, although they are in the file. DeepSeek-V3 has 61 alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
"$folder/venv/bin/python" -W ignore - "$folder/model" <<'PYTHON'
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

folder, hidden = sys.argv[1], 32
torch.manual_seed(0)
sizes = {"hidden_size": hidden, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
config = Glm4MoeConfig(vocab_size=64, eos_token_id=None, **sizes, **heads, **experts)
Glm4MoeForCausalLM(config).save_pretrained(folder)
path = f"{folder}/model.safetensors"
stored = load_file(path)
block = {name: tensor.clone() for name, tensor in stored.items() if name.startswith("model.layers.2.")}
further = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in block.items()}
further["model.layers.3.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / 8
for norm in ("enorm", "hnorm", "shared_head.norm"):
    further[f"model.layers.3.{norm}.weight"] = torch.ones(hidden)
save_file(stored | further, path, {"format": "pt"})
prompt = torch.arange(2, 12)[None]
options = {"max_new_tokens": 8, "do_sample": False}
print(f"transformers {transformers.__version__}")
model = Glm4MoeForCausalLM.from_pretrained(folder)
print("looked for:", sorted(model._keys_to_ignore_on_load_unexpected))
try:
    model.generate(prompt, use_mtp=True, **options)
except RuntimeError as error:
    print("seen:", str(error)[:200])
    seen = "are missing" in str(error)
else:
    seen = False
model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]  # what it would have to look for
drafted = model.generate(prompt, use_mtp=True, **options)
print("with the layer's own number it drafts:", drafted.tolist() == model.generate(prompt, **options).tolist())
assert seen, "The behaviour has changed."
PYTHON
