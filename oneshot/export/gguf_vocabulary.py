"""The tokenizer of a GGUF file, as llama.cpp reads it: tokens, their types, and merges or scores.

llama.cpp has no general tokenizer. It knows rules by name, so a tokenizer with other rules is refused.
"""

import json
from pathlib import Path
from typing import Any

from oneshot.errors import PlanError
from oneshot.text import load_tokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS, REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+|", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# the pattern that splits text into words, and whether merges are left out for whole words -> llama.cpp's name
SPLITS = {
    (CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST, True): "llama-bpe",
    (CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST, False): "smaug-bpe",
    (CONTRACTIONS + WORDS + r"\p{N}" + REST, False): "qwen2",
    (TEKKEN, True): "tekken",
}
NO_MERGE = -1e6  # score of a token that no merge makes
SPACE = "▁"


class Vocabulary:
    """A tokenizer that llama.cpp knows.

    Attributes:
        model: `gpt2` for merges of bytes, `llama` for scored pieces with single bytes for what they cannot write.
        rules: the name of the rules that split text into words.

    Raises `PlanError` for rules that llama.cpp has no name for, or that are not known here.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._tokenizer = load_tokenizer(folder)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        content: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
        self._content, self._merges = content.get("model", {}), []
        if self._content.get("type") != "BPE":
            raise PlanError(f"--form gguf needs a BPE tokenizer, which {folder} does not hold; use another form.")
        self._merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in self._content["merges"]]
        self._normalises = content.get("normalizer") or {}
        self._splits = content.get("pre_tokenizer") or {}
        if self._content.get("byte_fallback"):
            self.model, self.rules = "llama", "default"
        else:
            self.model, self.rules = "gpt2", split_rules(self._splits, bool(self._content.get("ignore_merges")))

    def write(self, writer: Any) -> None:
        """Add the tokenizer and the chat template to a `GGUFWriter`."""
        import gguf

        tokens, types = self._tokens()
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.rules)
        writer.add_token_list(tokens)
        if self.model == "llama":
            writer.add_token_scores(self._scores(tokens))
            writer.add_add_space_prefix(self._begins_with_space())
        writer.add_token_types(types)
        special = gguf.SpecialVocab(self._folder, load_merges=self.model == "gpt2", n_vocab=self._size)
        special.add_special_token |= self._added()
        special.chat_template = self._chat_template()
        special.add_to_gguf(writer, quiet=True)

    def _tokens(self) -> tuple[list[str], list[int]]:
        """Return the tokens in order, and their types; numbers without a token are unused."""
        from gguf import TokenType

        tokenizer = self._tokenizer
        names = {number: name for name, number in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        tokens: list[str] = []
        types: list[int] = []
        for number in range(self._size):
            name, kind = names.get(number), TokenType.NORMAL
            if name is None:
                name, kind = f"[PAD{number}]", TokenType.UNUSED
            elif number in added:
                if not added[number].normalized:  # llama.cpp looks for the normalised token
                    name = tokenizer.decode(tokenizer.encode(name, add_special_tokens=False))
                marks = name.startswith("<|") and name.endswith("|>")  # structure, whatever the tokenizer says
                kind = TokenType.CONTROL if added[number].special or marks else TokenType.USER_DEFINED
                if self.model == "llama" and name == tokenizer.unk_token:
                    kind = TokenType.UNKNOWN
                if kind == TokenType.USER_DEFINED:
                    name = name.replace(SPACE, " ")
            elif self.model == "llama" and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
                kind = TokenType.BYTE
            tokens.append(name)
            types.append(kind)
        return tokens, types

    def _scores(self, tokens: list[str]) -> list[float]:
        """Return scores under which llama.cpp merges in the tokenizer's order: minus the rank of a token's merge."""
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(self._merges):
            ranks.setdefault(left + right, rank)
        return [float(-ranks[token]) if token in ranks else NO_MERGE for token in tokens]

    def _begins_with_space(self) -> bool:
        """Return whether a space is put before text."""
        parts = [self._splits, self._normalises]
        for whole in (self._splits, self._normalises):
            parts += [*whole.get("pretokenizers", ()), *whole.get("normalizers", ())]
        return any(part.get("type") == "Prepend" or part.get("prepend_scheme", "never") != "never" for part in parts)

    def _chat_template(self) -> Any:
        """Return the chat template that transformers takes of all that a folder may state, as `gguf` writes it."""
        found = getattr(self._tokenizer, "chat_template", None)
        if isinstance(found, dict):
            return [{"name": name, "template": template} for name, template in found.items()]
        return found

    def _added(self) -> dict[str, bool]:
        """Return which tokens are put before and after text."""
        ids, known = self._tokenizer("a").input_ids, self._tokenizer
        return {
            "bos": known.bos_token_id is not None and ids[0] == known.bos_token_id,
            "eos": known.eos_token_id is not None and ids[-1] == known.eos_token_id,
        }


def split_rules(splits: dict[str, Any], ignores_merges: bool) -> str:
    """Return llama.cpp's name for the rules that split text into words. Raises `PlanError` if they are not known."""
    parts = splits.get("pretokenizers", [splits])
    kinds = [part.get("type") for part in parts]
    byte_level = parts[-1] if kinds[-1:] == ["ByteLevel"] else {"add_prefix_space": True}
    if not byte_level.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and byte_level.get("use_regex"):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and byte_level.get("use_regex"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not byte_level.get("use_regex"):
            pattern = parts[0].get("pattern", {}).get("Regex")
            if (name := SPLITS.get((pattern, ignores_merges))) is not None:
                return name
    raise PlanError(
        "--form gguf does not know how this tokenizer splits text into words; use --form stock or nemotron-nas, and "
        "llama.cpp's own converter."
    )
