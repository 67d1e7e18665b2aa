"""Checkpoints on disk: where they are, how they are read safely, and how a run writes one."""

from oneshot.checkpoint.card import card_metadata
from oneshot.checkpoint.compressed_tensors import rounds_inputs
from oneshot.checkpoint.found_class import stating_class
from oneshot.checkpoint.further import FurtherLayer, FurtherLayers, further_layers
from oneshot.checkpoint.gguf import GgufCheckpoint, open_gguf
from oneshot.checkpoint.gguf_file import parts_of
from oneshot.checkpoint.journal import Journal
from oneshot.checkpoint.locate import locate_checkpoint, open_headers, open_model
from oneshot.checkpoint.model import Model, identify
from oneshot.checkpoint.reader import IMPORTANCE_NAME, Checkpoint
from oneshot.checkpoint.saved import peek_fingerprint, peek_saved
from oneshot.checkpoint.stock import (
    as_opened,
    attention_of,
    complete_config,
    complete_text_config,
    copy_modules,
    load_whole,
    make_buffers,
    name_outputs_,
    per_layer_lists,
    reason_against_config,
    resized_config,
    sample_model,
    stock_classes,
    stock_config,
    tied_names,
    with_floats,
    with_kept_layers,
    without_head,
)
from oneshot.checkpoint.work_folder import (
    output_folder,
    refuse_file,
    refuse_inputs,
    refuse_output,
    refuse_place,
    refuse_unwritable,
    remove_leftovers,
)
