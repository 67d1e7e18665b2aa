#!/usr/bin/env bash
# transformers 5.24.0: of a mixture of experts `load_in_4bit` and torchao's Int8WeightOnlyConfig leave the experts unquantised.
#
# Expected: both quantise all linears but the output head, and the experts are nearly all of a mixture's weights. In transformers 4
# every expert was a module of linears, which bitsandbytes replaced.
# Seen: transformers 5 has the experts of a layer in two parameters of three dimensions. Both quantisers look for nn.Linear, so they
# quantise the attention alone, and there is no warning. The model takes nearly as much memory as without.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.2 torchao==0.18.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" 2>"$folder/messages" <<'PYTHON' || { cat "$folder/messages"; exit 1; }
import logging
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig, Qwen3MoeConfig, TorchAoConfig

transformers.utils.logging.disable_progress_bar()
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
MODELS = {
    "Mixtral": MixtralConfig(**SIZES, intermediate_size=128, num_local_experts=8),
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=2),
}
QUANTISERS = {
    "bitsandbytes, 4 bits": BitsAndBytesConfig(load_in_4bit=True),
    "torchao, 8 bits": TorchAoConfig(Int8WeightOnlyConfig()),
}
said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)
print(", ".join(f"{name} {version(name)}" for name in ("transformers", "bitsandbytes", "torchao")))
seen = []
for name, config in MODELS.items():
    folder = Path(sys.argv[1]) / name
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for quantiser, settings in QUANTISERS.items():
        said.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.bfloat16)
        said += [str(one.message) for one in caught]
        whole = {"experts": [], "self_attn": []}
        for path, weight in model.named_parameters():
            for part, plain in whole.items():
                if part in path and weight.dim() > 1:
                    plain.append(type(weight) is torch.nn.Parameter and weight.dtype == torch.bfloat16)
        about = [one for one in said if "expert" in one.lower() or "quantiz" in one.lower()]
        counts = {part: f"{sum(plain)} of {len(plain)}" for part, plain in whole.items()}
        print(f"{name}, {quantiser}: weights in bfloat16: {counts}; warnings: {about}")
        seen.append(all(whole["experts"]) and not any(whole["self_attn"]) and not about)
assert all(seen), "The behaviour has changed."
PYTHON
