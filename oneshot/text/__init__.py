"""Calibration text: where documents come from, how they are packed, and text that the model writes itself."""

from oneshot.text.packing import (
    Batch,
    Text,
    encode,
    load_examples,
    load_text,
    load_tokenizer,
    mix,
    pack,
    shares,
    special_tokens,
    split_sources,
    token_hash,
)
from oneshot.text.pairs import load_pairs
from oneshot.text.self_written import SELF, documents_together, write_text
from oneshot.text.sources import iter_documents, iter_pairs, read_rows

__all__ = [
    "SELF",
    "Batch",
    "Text",
    "documents_together",
    "encode",
    "iter_documents",
    "iter_pairs",
    "load_examples",
    "load_pairs",
    "load_text",
    "load_tokenizer",
    "mix",
    "pack",
    "read_rows",
    "shares",
    "special_tokens",
    "split_sources",
    "token_hash",
    "write_text",
]
