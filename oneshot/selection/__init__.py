"""Selectors of the neurons and heads that stay, by name, each with its needs, its choice and its cost."""

from oneshot.selection.elimination import SELECTION_DAMPING
from oneshot.selection.evidence import Evidence, Moments
from oneshot.selection.pivots import pivots_of_experts
from oneshot.selection.registry import SELECTORS, find_selector, needs_of, reads_activations, select_heads
from oneshot.selection.selector import Cost, Extent, Need
