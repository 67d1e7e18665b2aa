"""A word that a user may give has an implementation: a name without one is refused before any work, not at its use."""

from typing import Any, get_args

import pytest

from oneshot.compression.expert_scores import EXPERT_SCORES, ExpertSelector
from oneshot.compression.one_writer import NONZEROS
from oneshot.config import FormName
from oneshot.export.companions import OWN_CLASSES
from oneshot.export.forms import FORMS, STATED_SHAPES
from oneshot.families.refusals import COMPRESSED
from oneshot.method import Allocation, Experts, SelectorName, Sketch
from oneshot.planning.damages import ALLOCATIONS
from oneshot.selection import SELECTORS, needs_of
from oneshot.selection.selector import Need


@pytest.mark.parametrize(
    ("words", "table", "others"),
    [
        (SelectorName, SELECTORS, {"none"}),
        (Experts, EXPERT_SCORES, {"none"}),
        (ExpertSelector, EXPERT_SCORES, set()),
        (Sketch, NONZEROS, {"none"}),
        (Allocation, ALLOCATIONS, {"auto", "uniform"}),
        (FormName, FORMS, set()),
    ],
    ids=["selector", "experts", "expert selector", "sketch", "allocation", "form"],
)
def test_every_word_has_an_entry(words: Any, table: dict[str, Any], others: set[str]) -> None:
    assert set(get_args(words)) == table.keys() | others


def test_every_need_is_known() -> None:
    assert {need for name in SELECTORS for need in needs_of(name)} == set(get_args(Need))  # type: ignore[arg-type]


def test_a_model_type_of_our_own_is_refused_opened_and_sized() -> None:
    assert set(COMPRESSED) == OWN_CLASSES.keys() == STATED_SHAPES.keys()
