#!/usr/bin/env bash
# transformers 5.24.0: AutoTokenizer splits texts by GPT-2's rule where it does not know a GGUF file's `tokenizer.ggml.pre`.
#
# Expected: the key names the rule by which the merges were learned. llama.cpp knows 91 names, and refuses others with "unknown
# pre-tokenizer type". So here also a name is known, or there is an error or a warning.
# Seen: 23 names count. Any other, such as "deepseek-coder", whose models are Llamas, or an invented one, gives GPT-2's rule without
# a message. The model then reads tokens that it was not trained on. In the code below llama.cpp of llama-cpp-python 0.3.36 has a tab
# and its word in one token, and two new lines in two, as the rules of "deepseek-coder" say. transformers has them the other way round.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 gguf==0.19.0
cd "$folder" # a file of the same name in the working directory would be opened instead of the folder's
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import logging
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

TEXT = "if a:\n\treturn\n\n\treturn"
MERGES = ["r e", "re t", "ret u", "retu r", "retur n", "ĉ return", "Ċ Ċ"]  # byte-level: ĉ is a tab, Ċ a new line
TOKENS = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"\p{N}"]  # what of its rules splits this text


def write(path: Path, rule: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
    writer.add_token_merges(MERGES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)
print(f"transformers {transformers.__version__}, gguf {version('gguf')}")
print(f"names that are known: {len(GGUF_PRE_TOKENIZER_SPLITS)}")
bpe = models.BPE({token: number for number, token in enumerate(TOKENS)}, [tuple(merge.split()) for merge in MERGES])
right = Tokenizer(bpe)
splits = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in DEEPSEEK_CODER]
right.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
read = {}
for rule in ("llama-bpe", "gpt-2", "deepseek-coder", "an-invented-name"):
    write(Path(sys.argv[1]) / f"{rule}.gguf", rule)
    read[rule] = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=f"{rule}.gguf").tokenize(TEXT)
    print(f"{rule}: {' '.join(read[rule])}")
known = right.encode(TEXT).tokens
print(f"deepseek-coder by its rules: {' '.join(known)}")
print("warnings:", said)
fallen_back = read["deepseek-coder"] == read["an-invented-name"] == read["gpt-2"] != read["llama-bpe"]
assert fallen_back and read["deepseek-coder"] != known and not said, "The behaviour has changed."
PYTHON
