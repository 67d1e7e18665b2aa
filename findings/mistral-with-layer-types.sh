#!/usr/bin/env bash
# transformers 5.24.0: a Mistral checkpoint that states `layer_types` is another model for AutoModelForCausalLM than for its own class.
#
# Expected: `MistralForCausalLM.from_pretrained` and `AutoModelForCausalLM.from_pretrained` of one folder compute the same. The folder
# states `"model_type": "mistral"`, `"architectures": ["MistralForCausalLM"]`, a window, and `layer_types` with a layer of full attention.
# Seen: the auto class opens it as a Ministral, whose layers have windows as `layer_types` says. Mistral's own class does not read
# `layer_types` and gives every layer the window. Texts that are longer than the window have other logits, and each class loads all
# weights without a message. A model that Mistral's own class has saved is hit in the same way, so it is no longer itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy
FOLDER="$folder" "$folder/venv/bin/python" -W ignore - 2>"$folder/messages" <<'PYTHON' || { cat "$folder/messages"; exit 1; }
import json
import os
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

WINDOW = 8
place = Path(os.environ["FOLDER"]) / "model"
torch.manual_seed(0)
config = MistralConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"],
    initializer_range=0.2,
)
MistralForCausalLM(config).eval().save_pretrained(place)
stated = json.loads((place / "config.json").read_text())
print(f"transformers {transformers.__version__}: {stated['model_type']}, {stated['architectures']}, {stated['layer_types']}")
ids = torch.arange(40)[None]
seen = {}
for opener in (MistralForCausalLM, AutoModelForCausalLM):
    model, told = opener.from_pretrained(place, output_loading_info=True, attn_implementation="eager")
    assert not any(told.values()), told
    with torch.no_grad():
        seen[opener.__name__] = type(model).__name__, model.eval()(ids).logits[0]
(own, first), (other, second) = seen.values()
apart = (first - second).norm(dim=1) / first.norm(dim=1)
inside, behind = apart[:WINDOW].max().item(), apart[2 * WINDOW :].mean().item()
print(f"{own} and {other}: logits differ by {inside:.1%} within the window and by {behind:.1%} behind it")
assert (own, other) == ("MistralForCausalLM", "MinistralForCausalLM"), "The behaviour has changed."
assert inside < 1e-3 and behind > 0.05, "The behaviour has changed."
PYTHON
