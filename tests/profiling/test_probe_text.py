"""The sequences that probes are: halves of the calibration text's last ones, and beginnings of other kinds of text."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint

from oneshot.checkpoint import open_model
from oneshot.profiling.probes import probe_sequences, probe_shape, probe_text
from oneshot.text import NUM_KINDS, TOKENS_OF_A_KIND, Text, kind_windows, load_tokenizer, probed_kinds
from oneshot.text.kinds import CHECKED, PROBED
from oneshot.text.sources import BUILTIN_FILE

WORDS = 80


def texts_of(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def text_of(num_sequences: int, length: int) -> Text:
    ids = torch.arange(num_sequences * length).view(num_sequences, length) % WORDS
    return Text(ids, "a text")


@pytest.mark.parametrize("num_sequences", [1, 8, 24])
@pytest.mark.parametrize("length", [1, 2, 3, 16, 33, 2048])
def test_pieces_of_the_text_and_other_kinds_are_equally_long(
    num_sequences: int, length: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = make_checkpoint()
    text = text_of(num_sequences, length)
    own = text.last(probe_sequences(num_sequences))
    found = probe_text(open_model(str(folder), tmp_path), own)
    assert tuple(found.token_ids.shape) == probe_shape(num_sequences, length, causal=True)
    if length == 1:
        assert torch.equal(found.token_ids, own.token_ids)
        return
    *pieces, _, _, _, _ = found.token_ids
    for index, piece in enumerate(pieces):
        assert torch.equal(piece, own.token_ids[index // 2][index % 2 * len(piece) :][: len(piece)])
    tokenizer = load_tokenizer(folder)
    for row, text_of_kind in zip(found.token_ids[-NUM_KINDS:], texts_of(PROBED), strict=True):
        assert row.tolist() == tokenizer(text_of_kind)["input_ids"][: len(row)]


def test_other_kinds_are_for_packed_texts_of_decoders_with_a_tokenizer(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    decoder, text = open_model(str(make_checkpoint()), tmp_path), text_of(2, 16)
    encoder = make_checkpoint(family="bert", model_class="BertModel", tied=False)
    assert probe_text(open_model(str(encoder), tmp_path), text) is text
    examples = Text(text.token_ids, "examples", torch.tensor([16, 16]))
    assert probe_text(decoder, examples) is examples
    assert probe_text(decoder, text).num_sequences == 2 * 2 + NUM_KINDS
    without = tmp_path / "without"
    shutil.copytree(decoder.checkpoint.folder, without, ignore=shutil.ignore_patterns("tokenizer*"))
    assert probe_text(open_model(str(without), tmp_path), text) is text


@pytest.mark.parametrize(("num_tokens", "found"), [(0, 0), (1, 0), (63, 0), (64, 64), (500, 128)])
def test_a_tokenizer_that_knows_little_of_the_other_kinds_has_none(num_tokens: int, found: int) -> None:
    def tokenizer(text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(1, num_tokens, dtype=torch.int64)}

    assert probed_kinds(tokenizer, 128).shape == ((NUM_KINDS, found) if found else (0, 0))
    assert len(kind_windows(tokenizer, 128)) == (NUM_KINDS if num_tokens else 0)


def test_other_kinds_with_tokens_that_have_no_row_are_left_out(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = open_model(str(make_checkpoint(vocabulary=8)), tmp_path)
    text = Text(torch.zeros(2, 16, dtype=torch.int64), "a text")
    assert probe_text(model, text) is text


def test_no_text_has_a_part_in_the_choice_of_sizes_and_in_the_check() -> None:
    probed, checked, calibrated = (texts_of(file) for file in (PROBED, CHECKED, BUILTIN_FILE))
    assert len(probed) == len(checked) == NUM_KINDS
    of_probes, others = (
        {line for text in texts for line in text.splitlines() if len(line) > 40}
        for texts in (probed, [*checked, *calibrated])
    )
    assert of_probes
    assert not of_probes & others
    assert all(len(text) > 4 * TOKENS_OF_A_KIND for text in probed), "tokenizers make fewer tokens of them"
