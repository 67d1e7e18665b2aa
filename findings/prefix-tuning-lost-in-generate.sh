#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: a prefix of prefix tuning has no effect in `generate`.
#
# Expected: the first token that `generate` writes greedily has the logits of a forward pass of the adapted model.
# Seen: it has the logits of the model without the adapter, and there is no message. peft hands its prefix over as
# `past_key_values`, which transformers 5.24 calls `cache`. So a model adapted by prefix tuning is judged wrongly
# by everything that generates text. Prompt tuning is not affected.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import peft
import torch
import transformers
from peft import PrefixTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=200, **sizes, initializer_range=0.3, bos_token_id=0, eos_token_id=None, pad_token_id=1)
model = get_peft_model(
    LlamaForCausalLM(config), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
).eval()
with torch.no_grad():
    for name, weight in model.named_parameters():
        if "prompt" in name:
            weight.normal_(0, 3)
    ids = torch.arange(5, 15)[None]
    adapted = model(ids).logits[0, -1]
    with model.disable_adapter():
        plain = model(ids).logits[0, -1]
    options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    generated = model.generate(input_ids=ids, **options).logits[0][0]
to_adapted, to_plain = ((generated - one).abs().max().item() for one in (adapted, plain))
print(f"peft {peft.__version__}, transformers {transformers.__version__}")
print(f"logits of the first generated token: {to_adapted:.3g} from the adapted model's, {to_plain:.3g} from the plain one's")
assert to_plain < 1e-4 < 0.1 < to_adapted, "The behaviour has changed: generate uses the prefix."
PYTHON
