#!/usr/bin/env bash
# ctranslate2 4.8.5 with transformers 5.24.0: it converts a Llama with another `head_dim` and computes other logits.
#
# Expected: `head_dim` of a Llama's config is read, as it is of Qwen3's and Mistral's, or the converter refuses it.
# Seen: the converter of Llama leaves it out. Unless it is hidden size ÷ heads, the logits are wrong, and nothing is said. (With grouped
# heads a forward pass ends with "axis 2 has dimension ...".) So a Llama from which heads were pruned is another model there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 ctranslate2==4.8.5
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - "$folder" 2>"$folder/messages" <<'PYTHON' || { cat "$folder/messages"; exit 1; }
import sys
from pathlib import Path

import ctranslate2
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedTokenizerFast, Qwen3Config

HIDDEN, WORDS = 64, 128
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": WORDS}
ids = list(range(3, 40))


def difference(config: transformers.PretrainedConfig, folder: Path) -> float:
    """Return the largest difference between the logits of transformers and of CTranslate2."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"word{number}": number for number in range(WORDS)}, unk_token="word0"))
    names = {"unk_token": "word0", "bos_token": "word1", "eos_token": "word2"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder / "model")
    ctranslate2.converters.TransformersConverter(str(folder / "model")).convert(str(folder / "converted"))
    generator = ctranslate2.Generator(str(folder / "converted"), device="cpu", compute_type="float32")
    with torch.no_grad():
        known = model(torch.tensor([ids])).logits.numpy()
    return float(np.abs(np.array(generator.forward_batch([ids])) - known).max())


print(f"ctranslate2 {ctranslate2.__version__}, transformers {transformers.__version__}")
seen = {}
for kind in (LlamaConfig, MistralConfig, Qwen3Config):
    for heads, head_dim in ((4, 16), (4, 32), (2, 16)):
        common = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
        config = kind(**SIZES, **common, initializer_range=0.2, bos_token_id=1, eos_token_id=2)
        case = f"{kind.model_type}, hidden size {HIDDEN}, {heads} heads of {head_dim}"
        seen[case] = difference(config, Path(sys.argv[1]) / case)
        print(f"{case}: logits differ by {seen[case]:.5f}")
wrong = [case for case, largest in seen.items() if largest > 0.5]
right = [case for case, largest in seen.items() if largest < 1e-3]
filled = "llama, hidden size 64, 4 heads of 16"
assert len(wrong) == 2 and all(case.startswith("llama") for case in wrong), "The behaviour has changed."
assert len(right) == 7 and filled in right, "The behaviour has changed."
PYTHON
