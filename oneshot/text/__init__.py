"""Calibration text: where documents come from, how they are packed, and text that the model writes itself."""

from oneshot.text.chats import chat_renderer
from oneshot.text.examples import encode, load_examples, padded
from oneshot.text.files import PIECE_BYTES, RECORDS, TABLES, ending_of, file_of, size_of_records
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
    warn_if_long,
)
from oneshot.text.pairs import load_pairs
from oneshot.text.self_written import SELF, documents_together, write_text
from oneshot.text.sources import SHORT_NAMES, check_source, iter_documents, iter_pairs, read_rows, whole_letters
from oneshot.text.token_files import has_tokens, load_token_ids, save_token_ids
from oneshot.text.tokenizers import holds_tokenizer, load_tokenizer, needs_conversion

__all__ = [
    "PIECE_BYTES",
    "RECORDS",
    "SELF",
    "SHORT_NAMES",
    "TABLES",
    "Batch",
    "Text",
    "chat_renderer",
    "check_source",
    "documents_together",
    "encode",
    "ending_of",
    "file_of",
    "has_tokens",
    "holds_tokenizer",
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
    "warn_if_long",
    "whole_letters",
    "write_text",
]
