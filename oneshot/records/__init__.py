"""Frozen records that cross the stages. Plain data with JSON round trips; no behaviour beyond arithmetic."""

from oneshot.records.plans import LEFT_OUT, HiddenPlan, LayerPlan, Plan, Profile, ProfileOrigin
from oneshot.records.reports import BlockReport, Footprint, LayerReport, Report
from oneshot.records.shapes import LayerShape, ModelShape, StackShape, TableShape
from oneshot.records.statistics import BlockStatistics, CalibrationSet, Factors, Moments, token_hash

__all__ = [
    "LEFT_OUT",
    "BlockReport",
    "BlockStatistics",
    "CalibrationSet",
    "Factors",
    "Footprint",
    "HiddenPlan",
    "LayerPlan",
    "LayerReport",
    "LayerShape",
    "ModelShape",
    "Moments",
    "Plan",
    "Profile",
    "ProfileOrigin",
    "Report",
    "StackShape",
    "TableShape",
    "token_hash",
]
