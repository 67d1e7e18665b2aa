#!/usr/bin/env bash
# transformers 5.24.0 with compressed-tensors 0.20.0: a pack-quantized checkpoint with zero points does not open again.
#
# Expected: what compressed-tensors' own compressor writes for a stock model, from_pretrained opens, symmetric or not.
# Seen: without zero points it opens. With them (symmetric: false, groups of 32) every zero point is a "size mismatch": the
# file has them packed eight to a word, and the model that transformers prepares has one number for each row.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 compressed-tensors==0.20.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - "$folder" 2>/dev/null <<'PYTHON'
import sys
from pathlib import Path

import compressed_tensors
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams

print(f"transformers {transformers.__version__}, compressed-tensors {compressed_tensors.__version__}")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128}
GROUP = 32


def opened(symmetric: bool, folder: Path) -> bool:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    quantised = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format="pack-quantized")
    apply_quantization_config(model, quantised)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.detach().float().unflatten(1, (-1, GROUP))
            scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
            module.weight_scale.data.copy_(scales)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zeros)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor(quantization_config=quantised)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except RuntimeError as error:
        print(f"symmetric {symmetric}: {type(error).__name__}: {error}")
        return False
    print(f"symmetric {symmetric}: opens")
    return True


folder = Path(sys.argv[1])
found = opened(True, folder / "symmetric"), opened(False, folder / "asymmetric")
assert found == (True, False), "The behaviour has changed."
PYTHON
