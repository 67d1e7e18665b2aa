"""Inside a layer: the streams that pass it, its two blocks, and the order in which both are compressed."""

from oneshot.layerwise.latency import measured_seconds
from oneshot.layerwise.layer import LayerCompressor, reads_activations
from oneshot.layerwise.profiling import PROBED_KINDS, LayerProfiler

__all__ = ["PROBED_KINDS", "LayerCompressor", "LayerProfiler", "measured_seconds", "reads_activations"]
