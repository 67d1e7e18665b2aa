"""The tokenizer beside a result cuts texts as the input's does."""

import json
import shutil
from pathlib import Path

import pytest

from oneshot.export import write_companions
from oneshot.export.companions import content_of
from oneshot.text import load_tokenizer


def same_cuts(source: Path, folder: Path) -> bool:
    """Return whether the tokenizers of two folders give the same tokens of a text, and begin and end it alike."""
    text = "HelloWorld in 12345 words,  and\n\nmore"
    left, right = (load_tokenizer(place) for place in (source, folder))
    return left(text)["input_ids"] == right(text)["input_ids"] and content_of(left) == content_of(right)


@pytest.mark.parametrize("model_type", ["qwen2", "cohere", "roberta"])
def test_a_result_cuts_texts_as_its_input_does(model_type: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    """Also where transformers chooses the tokenizer's class by the model type, which a form may change."""
    source, folder = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tokenizer_folder, source)
    folder.mkdir()
    options = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": options["eos_token"]}))
    (source / "config.json").write_text(json.dumps({"model_type": model_type}))
    write_companions(source, folder, {"model_type": "of-its-own"}, dtype=None)
    assert same_cuts(source, folder)
    shutil.copy(source / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    assert not same_cuts(source, folder), "copies are read as another tokenizer"


def test_an_old_tokenizer_of_mistral_that_is_to_be_mended_is_mended_in_the_result(tmp_path: Path) -> None:
    """transformers mends those with more than 100,000 tokens, beside Mistral's model types."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
    names = [*letters, *(f"<{number}>" for number in range(100_000))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    words = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}"), "isolated")
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_as_letters])
    source, folder = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    folder.mkdir()
    tokenizer.save(str(source / "tokenizer.json"))
    config = {"model_type": "mistral", "transformers_version": "4.50.0"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer_config.json").write_text(json.dumps({"fix_mistral_regex": True}))
    write_companions(source, folder, config | {"model_type": "of-its-own"}, dtype=None)
    mended = load_tokenizer(folder).backend_tokenizer.pre_tokenizer
    assert [word for word, _ in mended.pre_tokenize_str("HelloWorld 123")] == ["Hello", "World", "Ġ", "1", "2", "3"]
