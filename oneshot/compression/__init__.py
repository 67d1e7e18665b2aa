"""Compressing layers: statistics, selection, correction and folding, and the subspaces and ranks around them.

`layer.LayerCompressor` is the order. `ways` has the way through each type of mixer: the steps of `steps`, then
`measuring`, `solving` and `fold`, or `experts`. A `sublayer.SublayerTask` has the sizes, `tasks` a class for each type.
"""

from oneshot.compression.correction import Factors
from oneshot.compression.curvature import Curvature
from oneshot.compression.embedding import expanded, reduce_embedding
from oneshot.compression.layer import CompressedLayer, LayerCompressor
from oneshot.compression.shared_heads import find_shared_heads
from oneshot.compression.statistics import Statistics
from oneshot.compression.sublayer import needs_statistics
from oneshot.compression.subspaces import StreamSubspaces, Subspaces, find_subspaces

__all__ = [
    "CompressedLayer",
    "Curvature",
    "Factors",
    "LayerCompressor",
    "Statistics",
    "StreamSubspaces",
    "Subspaces",
    "expanded",
    "find_shared_heads",
    "find_subspaces",
    "needs_statistics",
    "reduce_embedding",
]
