"""The tokenizer of a GGUF file, and how it cuts texts before its merges, which the file only names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONTROL, USER_DEFINED = 3, 4  # types of tokens that stay whole (`llama_token_type`)
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = ENDINGS + r"|\p{N}" + REST
LLAMA3 = ENDINGS + r"|\p{N}{1,3}" + REST
SEED_CODER = ENDINGS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open"), (QWEN2,)),
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), (LLAMA3,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK3),
    "seed-coder": (SEED_CODER,),
    "falcon": FALCON,
}
"""The expressions that cut a text one after the other, by llama.cpp's names (`llm_tokenizer_bpe`)."""
SINGLE_DIGITS = ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
LIKE_GPT2: tuple[str, ...] = ("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "roberta-bpe")
# SmolLM2's file is read as its tokens were counted so far; single digits would change 8 of 74,518 tokens of a text
LIKE_GPT2 += ("smollm",)


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer that a file states; raises `ValueError` if it cuts texts in a way that is not known."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    architecture, content, options = get_gguf_tokenizer(str(path))
    backend, more = convert_gguf_tokenizer(architecture, content)
    backend = with_the_files_tokens(backend, content)
    kind = content.get("pre_tokenizer_type", "default")
    if content.get("tokenizer_type") == "gpt2" and kind not in GGUF_PRE_TOKENIZER_SPLITS and kind not in LIKE_GPT2:
        backend.pre_tokenizer = cutting(kind)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options, **more)
    if len(tokenizer) > len(content["tokens"]):
        further = sorted(name for name, number in tokenizer.get_vocab().items() if number >= len(content["tokens"]))
        raise ValueError(f"its special token {further[0]!r} is not among its {len(content['tokens'])} tokens")
    return tokenizer


def with_the_files_tokens(backend: Any, content: Mapping[str, Any]) -> Any:
    """Return a tokenizer with the tokens of a file and no others, under the file's numbers.

    transformers' classes add special tokens of their own, such as `<|endoftext|>`, behind the embedding's rows, and
    spell the file's special tokens anew that have other letters than bytes are written with.
    """
    from tokenizers import Tokenizer

    tokens, kinds = content["tokens"], content.get("token_type") or ()
    described = json.loads(backend.to_str())
    model, added = described["model"], [one for one in described["added_tokens"] if one["id"] < len(tokens)]
    listed = {one["id"] for one in added}
    spelled = {number: name for name, number in model["vocab"].items()}
    in_bytes = content.get("tokenizer_type") == "gpt2"
    for number, (name, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if number in listed or kind not in (CONTROL, USER_DEFINED):
            continue
        if in_bytes:
            spelled[number] = name
        if in_bytes or kind == USER_DEFINED:  # as runs of spaces in Gemma's tokenizer
            added.append(dict(PLAIN, id=number, content=spelled[number], special=kind == CONTROL))
    model["vocab"] = {name: number for number, name in spelled.items() if number < len(tokens)}
    if model.get("unk_token") not in model["vocab"]:
        model["unk_token"] = None
    described["added_tokens"] = sorted(added, key=lambda one: one["id"])
    return Tokenizer.from_str(json.dumps(described))


def cutting(kind: str) -> Any:
    """Return what cuts texts, by llama.cpp's name; raises `ValueError` for one that is not known."""
    from tokenizers import Regex, pre_tokenizers

    if kind in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if kind not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre is {kind}, which is not known")
    cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in SPLITS[kind]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
