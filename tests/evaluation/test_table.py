"""The table of an evaluation: rows in words, standard errors beside their values, ratios of values only."""

from dataclasses import replace

import pytest

from oneshot.evaluation import Evaluation, print_evaluations

DENSE = Evaluation(
    "dense",
    1000,
    800,
    4000,
    2000,
    64,
    {"/a/text.txt": 8.0},
    {"/a/text.txt": 510},
    prefill_seconds=0.5,
    decode_seconds=0.25,
    tasks={"arc_easy": {"acc,none": 0.5, "acc_stderr,none": 0.02, "acc_norm,strict": 0.4, "em,none": 0.25}},
    measures={"/a/pairs.jsonl": {"top1_accuracy": 0.75}},
)
SMALL = replace(
    DENSE,
    checkpoint="small",
    stored_parameters=800,
    perplexity={"/a/text.txt": 12.0},
    tasks={"arc_easy": {"acc,none": 0.4, "acc_stderr,none": 0.03, "acc_norm,strict": 0.4, "em,none": 0.0}},
)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_evaluations([SMALL, DENSE])
    return [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in capsys.readouterr().out.splitlines()]


def test_rows_are_in_words(lines: list[str]) -> None:
    for row in (
        "stored parameters 800 1,000 0.800",
        "bytes of the weight files 4,000 4,000 1.000",
        "perplexity text.txt (510 tokens) 12.00 8.00 1.500",
        "seconds of decoding, per token 0.2500 0.2500 1.000",
        "top1 accuracy pairs.jsonl 0.7500 0.7500 1.000",
    ):
        assert row in lines
    assert not any("_" in line for line in lines if "arc_easy" not in line)


def test_a_standard_error_is_beside_its_value_and_has_no_ratio(lines: list[str]) -> None:
    assert "arc_easy acc 0.4000 ± 0.0300 0.5000 ± 0.0200 0.800" in lines
    assert "arc_easy acc norm (strict) 0.4000 0.4000 1.000" in lines
    assert "arc_easy em 0.0000 0.2500 0.000" in lines
    assert not any("stderr" in line for line in lines)
