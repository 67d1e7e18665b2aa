"""Inside a layer: the streams that pass it, its two blocks, and the order in which both are compressed."""

from oneshot.layerwise.layer import LayerCompressor, reads_activations
from oneshot.layerwise.profiling import LayerProfiler

__all__ = ["LayerCompressor", "LayerProfiler", "reads_activations"]
