"""Model families: odd ones have a file each, those of a few lines are in `llamas`, `layer_norms` and `other_mixtures`.

To add one: a `Description`, and its name in `reading.FAMILIES`.
"""

from oneshot.families.bert import BERT
from oneshot.families.carried import Carried, CarriedSizes
from oneshot.families.checks import check_layers
from oneshot.families.classes import as_stored, predicts_tokens
from oneshot.families.description import Description, Feature, Sizes, stated_class
from oneshot.families.expert_sizes import ExpertSizes
from oneshot.families.experts import Experts
from oneshot.families.further import BEHIND, FurtherNames, stated_of_further, without_further
from oneshot.families.further import PREFIX as FURTHER_PREFIX
from oneshot.families.fused import from_files, fuse, part_of_output, split, to_files
from oneshot.families.latent import LatentSizes
from oneshot.families.layer_shape import RANKED_KINDS, LayerShape, RankedKind, TableShape
from oneshot.families.llama import LLAMA
from oneshot.families.reading import FAMILIES, find_family
from oneshot.families.refusals import (
    COMPRESSED,
    COMPRESSED_MODEL_TYPE,
    ENCODER_MODEL_TYPE,
    NAS_MODEL_TYPE,
    RESIZED_MODEL_TYPE,
    UnknownFamilyError,
)
from oneshot.families.resizing import scaled_epsilon
from oneshot.families.shapes import ModelShape, StackShape
from oneshot.families.sizes import read_shape
from oneshot.families.stack import Stack
from oneshot.families.sublayers import Attention, FeedForward, Mixer, Norm, Sublayer, read_by
from oneshot.families.wrappers import is_text, text_of, with_text

__all__ = [
    "BEHIND",
    "BERT",
    "COMPRESSED",
    "COMPRESSED_MODEL_TYPE",
    "ENCODER_MODEL_TYPE",
    "FAMILIES",
    "FURTHER_PREFIX",
    "LLAMA",
    "NAS_MODEL_TYPE",
    "RANKED_KINDS",
    "RESIZED_MODEL_TYPE",
    "Attention",
    "Carried",
    "CarriedSizes",
    "Description",
    "ExpertSizes",
    "Experts",
    "Feature",
    "FeedForward",
    "FurtherNames",
    "LatentSizes",
    "LayerShape",
    "Mixer",
    "ModelShape",
    "Norm",
    "RankedKind",
    "Sizes",
    "Stack",
    "StackShape",
    "Sublayer",
    "TableShape",
    "UnknownFamilyError",
    "as_stored",
    "check_layers",
    "find_family",
    "from_files",
    "fuse",
    "is_text",
    "part_of_output",
    "predicts_tokens",
    "read_by",
    "read_shape",
    "scaled_epsilon",
    "split",
    "stated_class",
    "stated_of_further",
    "text_of",
    "to_files",
    "with_text",
    "without_further",
]
