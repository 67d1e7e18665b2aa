"""Inside a layer: the streams that pass it, its two blocks, and the order in which both are compressed."""

from oneshot.layerwise.layer import LayerCompressor, reads_activations

__all__ = ["LayerCompressor", "reads_activations"]
