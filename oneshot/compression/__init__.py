"""Compressing layers: statistics, selection, correction and folding, and the subspaces and ranks around them.

`layer.LayerCompressor` is the order. For each type of mixer a `sublayer.SublayerTask` has the sizes, and the methods
that measure, choose, correct and fold: `one_writer` and `tasks` for attention and an FFN, `experts` for a mixture.
"""

from oneshot.compression.curvature import Curvature
from oneshot.compression.embedding import TokenRows, expanded, reduce_embedding
from oneshot.compression.layer import CompressedLayer, LayerCompressor
from oneshot.compression.shared_heads import find_shared_heads
from oneshot.compression.sublayer import needs_statistics
from oneshot.compression.subspaces import StreamSubspaces, find_subspaces
