"""What a description of a family is made of: tensor names of layers, their sizes, and sizes read from a checkpoint."""

from oneshot.architecture.axes import cut, shapes_of
from oneshot.architecture.carried import Carried, CarriedSizes
from oneshot.architecture.classes import as_stored, predicts_tokens
from oneshot.architecture.description import Description, Feature, Sizes, stated_class
from oneshot.architecture.expert_sizes import ExpertSizes
from oneshot.architecture.experts import Experts
from oneshot.architecture.further import BEHIND, FurtherNames, stated_of_further, without_further
from oneshot.architecture.further import PREFIX as FURTHER_PREFIX
from oneshot.architecture.fused import from_files, fuse, part_of_output, split, stored_shapes, to_files
from oneshot.architecture.latent import LatentSizes
from oneshot.architecture.layer_shape import (
    RANKED_KINDS,
    TABLES,
    LayerShape,
    RankedKind,
    Table,
    TableShape,
    table_shapes,
)
from oneshot.architecture.resizing import FIXED_HEADS_ALONE, scaled_epsilon, set_sizes, set_width
from oneshot.architecture.shapes import ModelShape, StackShape
from oneshot.architecture.sizes import check_layers, read_shape, wrong_tensor
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import Attention, FeedForward, Mixer, Norm, Sublayer, read_by
