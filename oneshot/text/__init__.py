"""Calibration text: where documents come from, how they are packed, and text that the model writes itself."""

from oneshot.text.chats import ChatRenderer, is_turn, prompt_ids
from oneshot.text.examples import encode, load_examples, padded
from oneshot.text.files import (
    PIECE_BYTES,
    RECORDS,
    TABLES,
    ending_of,
    exists,
    file_of,
    names_file,
    present_row,
    size_of_records,
)
from oneshot.text.kinds import NUM_KINDS, TOKENS_OF_A_KIND, kind_windows, probed_kinds
from oneshot.text.languages import NUM_LANGUAGES, PASSAGE_TOKENS, known_languages, passage_nats, passages
from oneshot.text.odd_records import OddRecords
from oneshot.text.packing import (
    NO_ROWS,
    Batch,
    Text,
    load_text,
    mix,
    num_rows,
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
from oneshot.text.sources import (
    BUILTIN,
    SHORT_NAMES,
    check_source,
    iter_documents,
    iter_pairs,
    read_rows,
    whole_letters,
)
from oneshot.text.token_files import has_tokens, load_token_ids, save_token_ids, save_token_rows
from oneshot.text.token_rows import LABELS, MASK, TOKENS, Fillings, fillings_of, text_tokens
from oneshot.text.tokenizers import bos_of, holds_tokenizer, load_tokenizer, needs_conversion
