"""The tokenizer of a GGUF file, and how it cuts texts before its merges, which the file only names."""

from pathlib import Path
from typing import Any

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
    kind = content.get("pre_tokenizer_type", "default")
    if content.get("tokenizer_type") == "gpt2" and kind not in GGUF_PRE_TOKENIZER_SPLITS and kind not in LIKE_GPT2:
        backend.pre_tokenizer = cutting(kind)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options, **more)


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
