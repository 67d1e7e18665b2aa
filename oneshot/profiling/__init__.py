"""Profiles: what smaller sizes cost, measured in one dense pass; output curvature; and the latency of layers."""

from oneshot.profiling.curvature import curvature_tokens, measure_curvature
from oneshot.profiling.embedding import marks_of
from oneshot.profiling.expert_ranking import ranking_lines
from oneshot.profiling.files import (
    RANKING,
    VERDICT,
    curvature_of_profile,
    holds_curvature,
    load_profile,
    profile_hash,
    profile_origin,
    refuse_existing,
    refuse_other_model,
    refuse_other_text,
    save_profile,
    text_of_profile,
)
from oneshot.profiling.importance import IMPORTANCE_TOKENS, measure_importance
from oneshot.profiling.latency import Timings, measured_seconds
from oneshot.profiling.probes import PROBED_KINDS
from oneshot.profiling.profile import make_profile
from oneshot.profiling.profiler import LayerProfiler
