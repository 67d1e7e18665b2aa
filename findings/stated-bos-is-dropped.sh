#!/usr/bin/env bash
# transformers 5.24.0: AutoTokenizer and `add_bos_token` in tokenizer_config.json.
# Expected: a folder with "add_bos_token": true gives tokens that begin with BOS, as the entry says, and as gguf's SpecialVocab
#   takes the same file.
# Seen: if the folder also has a tokenizer.json, the entry is dropped without a word. The tokens have no BOS, and `add_bos_token` of
#   the loaded tokenizer is False. Only the post_processor in tokenizer.json counts. Set on the object, the property works.
# Exits 0 if this is still seen, 1 if the behaviour changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

transformers.logging.set_verbosity_error()
folder = Path(sys.argv[1])
folder.mkdir()
tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
stated = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}
(folder / "tokenizer_config.json").write_text(json.dumps(stated))

loaded = AutoTokenizer.from_pretrained(folder)
read = loaded("a")["input_ids"]
print(f"transformers {transformers.__version__}: stated add_bos_token True, read {loaded.add_bos_token}, tokens of 'a': {read}")
loaded.add_bos_token = True
print(f"set on the object: {loaded('a')['input_ids']}")
sys.exit(0 if read == [2] and loaded("a")["input_ids"] == [0, 2] else 1)
PYTHON
