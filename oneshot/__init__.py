"""Training-free, one-shot structured compression of LLM checkpoints."""

from oneshot.config import Config, MachineOptions, Target, TextOptions
from oneshot.errors import OneshotError
from oneshot.pipeline import compress, compress_sizes, predict, profile
from oneshot.planning import Plan, Profile
from oneshot.recipes import RECIPES, Method
from oneshot.report.records import Footprint, Report

__all__ = [
    "RECIPES",
    "Config",
    "Footprint",
    "MachineOptions",
    "Method",
    "OneshotError",
    "Plan",
    "Profile",
    "Report",
    "Target",
    "TextOptions",
    "compress",
    "compress_sizes",
    "predict",
    "profile",
]
