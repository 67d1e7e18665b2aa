"""Families × forms × options: a result that holds what `drawn_runs` checks, or one sentence whose advice helps.

In the suite every family, every value of an option and every form is there, each at least once. `-m grid` runs every
family with every value, which takes an hour: `pytest tests/test_grid.py -m grid`.
"""

import itertools
import random
from collections.abc import Iterator

import pytest
from drawn_runs import OTHERS, RECIPES, Drawn, Options, Place, check_run, models
from families.cases import CASES
from vocabularies import SETTINGS

pytestmark = pytest.mark.long

FORMS = ("stock", "per-layer", "per-layer", "nemotron-nas", "gguf")  # most families have the first two alone
BUDGETS = ("bytes", "flops", "latency")
CHOICES: list[Options] = [
    *({f"--set {key}": value} for key, values in SETTINGS.items() for value in values),
    *({"--recipe": recipe} for recipe in RECIPES),
    *({flag: value} for flag, values, _ in OTHERS for value in values),
]
# what once ended with a traceback, or with a request to report it
MENDED: list[tuple[str, Options]] = [
    *((name, {"--form": "per-layer"}) for name in ("roberta", "xlm-roberta", "camembert", "electra")),
    *(
        (name, {"--set heads": "id", "--set depth": "sensitivity"})
        for name in ("gpt2", "gpt_neox", "falcon", "helium", "stablelm", "olmo2", "gpt_bigcode")
    ),
    *((name, {"--set heads": "id"}) for name in ("glm4v", "qwen2_vl", "qwen2_5_vl")),
    ("qwen2_vl", {"--recipe": "stat", "--set sketch": "none", "--set pivoting": "cholesky"}),
    ("llama-one-kv-head", {"--form": "per-layer", "--round-to": "64"}),
    ("gemma", {"--form": "per-layer", "--round-to": "64"}),
    ("qwen3_moe", {"--form": "per-layer", "--set layer_allocation": "auto"}),
    ("ernie4_5", {"--form": "gguf", "--save-dtype": "q8_0"}),
    ("phi", {"--form": "gguf", "--bits": "4"}),
]


def row(name: str, options: Options) -> Drawn:
    """Return a run of a family with these options."""
    return Drawn(0, name, models()[name][1], "one file", {"--sparsity": "0.1"} | options)


def covering(seed: int = 0) -> Iterator[Drawn]:
    """Yield a run of every family; together they have every value, and forms in turn."""
    dice, names, choices = random.Random(seed), list(CASES), list(CHOICES)
    dice.shuffle(names)
    dice.shuffle(choices)
    for number, name in enumerate(names):
        options = {"--form": FORMS[number % len(FORMS)]}
        for choice in choices[number :: len(names)]:
            options |= choice
        yield row(name, options)


def whole() -> Iterator[Drawn]:
    """Yield every family with every value, with forms in turn."""
    for number, (name, options) in enumerate(itertools.product(CASES, CHOICES)):
        yield row(name, {"--form": FORMS[number % len(FORMS)]} | options)


def title(drawn: Drawn) -> str:
    return f"{drawn.name} {' '.join(f'{flag}={value}' for flag, value in drawn.options.items())}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("drawn"))


@pytest.mark.parametrize("drawn", [*(row(*each) for each in MENDED), *covering()], ids=title)
def test_a_result_or_one_sentence(drawn: Drawn, place: Place) -> None:
    assert check_run(drawn, place).faults == []


@pytest.mark.grid
@pytest.mark.parametrize("name", CASES)
def test_every_family_with_every_value(name: str, place: Place) -> None:
    found = {title(drawn): check_run(drawn, place).faults for drawn in whole() if drawn.name == name}
    assert {run: faults for run, faults in found.items() if faults} == {}
