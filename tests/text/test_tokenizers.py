"""Tokenizers that are stored only in their families' older files: WordPiece, merges of bytes, sentencepiece."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from factories import MakeConfig, build_model, topics
from transformers import AutoTokenizer

from oneshot.errors import CalibrationError
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(code) for code in range(33, 127)]


def word_pieces() -> list[str]:
    """Return a vocabulary with all letters of English, and a few words."""
    small = [chr(code) for code in range(97, 123)]
    return [*MARKS, *small, *(f"##{letter}" for letter in small), "hello", "number", "##s", ",", "."]


def write_word_pieces(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(word_pieces())) + "\n")


def write_merges(folder: Path) -> None:
    """Write single bytes that are letters, the mark of a space, and two merges."""
    tokens = [*LETTERS, "Ġ", "he", "ll", "<s>", "</s>", "<pad>", "<unk>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")


def write_config(folder: Path, model_type: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_vocab_txt_is_read_as_word_pieces(model_type: str, tmp_path: Path) -> None:
    """BERT's rules by hand: lower case, words apart from punctuation, the longest piece first."""
    write_word_pieces(tmp_path)
    tokenizer = load_tokenizer(write_config(tmp_path, model_type))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("Hello, numbers.")["input_ids"])
    assert tokens == ["[CLS]", "hello", ",", "number", "##s", ".", "[SEP]"]


def test_vocab_json_and_merges_are_read_as_merged_bytes(tmp_path: Path) -> None:
    write_merges(tmp_path)
    tokenizer = load_tokenizer(write_config(tmp_path, "opt"))
    found = tokenizer.convert_ids_to_tokens(tokenizer("hello hi", add_special_tokens=False)["input_ids"])
    assert found == ["he", "ll", "o", "Ġ", "h", "i"]


@pytest.mark.parametrize(("model_type", "name"), [("t5", "spiece.model"), ("llama", "tokenizer.model")])
def test_pieces_are_read_by_sentencepiece(model_type: str, name: str, tmp_path: Path) -> None:
    """Compare with sentencepiece's own encoding."""
    pytest.importorskip("google.protobuf", reason="protobuf is not installed: pip install 'oneshot-llm[pieces]'")
    sentencepiece = pytest.importorskip("sentencepiece", reason="pip install 'oneshot-llm[pieces]'")
    written = io.BytesIO()
    kinds: dict[str, dict[str, Any]] = {
        "t5": {"bos_id": -1, "pad_id": 0, "eos_id": 1, "unk_id": 2},
        "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(topics(0, 20).splitlines()),
        model_writer=written,
        vocab_size=600,
        minloglevel=2,
        **kinds[model_type],
    )
    (tmp_path / name).write_bytes(written.getvalue())
    if model_type == "llama":  # as all of its checkpoints state
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer = load_tokenizer(write_config(tmp_path, model_type))
    reader = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    text = "the list of numbers, and a statement"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == reader.encode(text)
    if model_type == "t5":
        assert tokenizer(text)["input_ids"][-1] == 1
        assert tokenizer.convert_tokens_to_ids("<extra_id_0>") == 699


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.model"])
@pytest.mark.parametrize("missing", [("sentencepiece",), ("sentencepiece", "protobuf")])
def test_missing_packages_are_named(
    name: str, missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"\x0a\x10pieces")
    for package in ("sentencepiece", "protobuf"):
        monkeypatch.setattr(
            f"transformers.utils.is_{package}_available", lambda package=package: package not in missing
        )
    expected = rf"{name} needs the Python package {' and '.join(missing)}; pip install 'oneshot-llm\[pieces\]'"
    with pytest.raises(CalibrationError, match=expected):
        load_tokenizer(write_config(tmp_path, "t5"))


@pytest.mark.parametrize("form", ["stock", "per-layer"])
def test_a_result_keeps_its_tokenizer(form: str, make_config: MakeConfig, tmp_path: Path) -> None:
    """Both forms of a BERT with only vocab.txt: our model type has no tokenizer of its own."""
    dense = tmp_path / "dense"
    build_model("bert", layers=3, width=64, model_class="BertModel").save_pretrained(dense)
    write_word_pieces(dense)
    config = make_config(dense, form=form, sparsity=0.1, allocation="uniform")
    compress(config)
    names = {path.name for path in Path(config.output).iterdir()}
    assert "vocab.txt" in names
    assert ("tokenizer.json" in names) == (form == "per-layer")
    texts = ["Hello, numbers.", "abc hello"]
    wanted = load_tokenizer(dense)(texts)["input_ids"]
    assert load_tokenizer(Path(config.output))(texts)["input_ids"] == wanted
    assert AutoTokenizer.from_pretrained(config.output)(texts)["input_ids"] == wanted
