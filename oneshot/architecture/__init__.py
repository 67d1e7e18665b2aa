"""What a description of a family is made of: tensor names of layers, their sizes, and sizes read from a checkpoint."""

from oneshot.architecture.axes import cut, shapes_of
from oneshot.architecture.carried import Carried, CarriedSizes
from oneshot.architecture.checks import check_layers
from oneshot.architecture.classes import as_stored, predicts_tokens
from oneshot.architecture.description import Description, Feature, Sizes, stated_class
from oneshot.architecture.expert_sizes import ExpertSizes
from oneshot.architecture.experts import Experts
from oneshot.architecture.further import BEHIND, FurtherNames, stated_of_further, without_further
from oneshot.architecture.further import PREFIX as FURTHER_PREFIX
from oneshot.architecture.fused import from_files, fuse, part_of_output, split, stored_shapes, to_files
from oneshot.architecture.latent import LatentSizes
from oneshot.architecture.layer_shape import RANKED_KINDS, LayerShape, RankedKind, TableShape
from oneshot.architecture.resizing import scaled_epsilon
from oneshot.architecture.shapes import ModelShape, StackShape
from oneshot.architecture.sizes import read_shape
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import Attention, FeedForward, Mixer, Norm, Sublayer, read_by

__all__ = [
    "BEHIND",
    "FURTHER_PREFIX",
    "RANKED_KINDS",
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
    "as_stored",
    "check_layers",
    "cut",
    "from_files",
    "fuse",
    "part_of_output",
    "predicts_tokens",
    "read_by",
    "read_shape",
    "scaled_epsilon",
    "shapes_of",
    "split",
    "stated_class",
    "stated_of_further",
    "stored_shapes",
    "to_files",
    "without_further",
]
