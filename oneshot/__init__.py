"""Training-free, one-shot structured compression of LLM checkpoints."""

from oneshot.config import CompressionConfig
from oneshot.errors import OneshotError
from oneshot.pipeline import compress, predict
from oneshot.records import Footprint, Plan, Report

__all__ = ["CompressionConfig", "Footprint", "OneshotError", "Plan", "Report", "compress", "predict"]
