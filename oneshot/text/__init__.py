"""Calibration text: where documents come from, how they are packed, and text that the model writes itself."""

from oneshot.text.examples import encode, load_examples, padded
from oneshot.text.packing import (
    Batch,
    Text,
    load_text,
    mix,
    pack,
    placed,
    shares,
    special_tokens,
    split_sources,
    token_hash,
    tokenise,
)
from oneshot.text.pairs import load_pairs
from oneshot.text.self_written import SELF, documents_together, write_text
from oneshot.text.sources import SHORT_NAMES, iter_documents, iter_pairs, read_rows, size_of_records, whole_letters
from oneshot.text.token_files import has_tokens, load_token_ids, save_token_ids
from oneshot.text.tokenizers import load_tokenizer, needs_conversion

__all__ = [
    "SELF",
    "SHORT_NAMES",
    "Batch",
    "Text",
    "documents_together",
    "encode",
    "has_tokens",
    "iter_documents",
    "iter_pairs",
    "load_examples",
    "load_pairs",
    "load_text",
    "load_token_ids",
    "load_tokenizer",
    "mix",
    "needs_conversion",
    "pack",
    "padded",
    "placed",
    "read_rows",
    "save_token_ids",
    "shares",
    "size_of_records",
    "special_tokens",
    "split_sources",
    "token_hash",
    "tokenise",
    "whole_letters",
    "write_text",
]
