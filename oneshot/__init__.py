"""Training-free, one-shot structured compression of LLM checkpoints."""

from oneshot.config import CompressionConfig
from oneshot.errors import OneshotError
from oneshot.pipeline import compress
from oneshot.records import Plan, Report

__all__ = ["CompressionConfig", "OneshotError", "Plan", "Report", "compress"]
