"""Errors of the command line about the options: out of range, out of reach, or against each other."""

import re
from typing import Any

import pytest
from factories import Fails, MakeCheckpoint

from oneshot.cli.compress import main


@pytest.mark.parametrize("sparsity", ["abc", "1.5", "-0.1", "nan", "1", "inf", ""])
def test_sparsity_out_of_range(sparsity: str, make_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    fails(make_checkpoint(), "--sparsity", sparsity, sparsity=sparsity)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"sparsity": None}, ("--sparsity", "--params")),
        ({"params": "1M"}, ("--sparsity", "--params")),
        ({"sparsity": None, "params": "10T"}, ("10T",)),
        ({"sparsity": None, "params": "0"}, ("--params 0",)),
        ({"sparsity": None, "params": "1B"}, ("1,000,000,000", "above the dense model")),
        ({"sparsity": 0.99}, ("at best", "ask for --sparsity 0.")),
        ({"calibration": "self+"}, ("'self+'", "without a name")),
        ({"settings": ["ffn=none"]}, ("Nothing may be reduced",)),
        ({"recipe": "magic"}, ("magic", "oneshot, stat")),
        ({"device": "cuda:7"}, ("cuda:7", "--device cpu")),
        ({"device": "tpu"}, ("tpu",)),
        ({"settings": ["damping=-1"]}, ("--set damping=-1", "0 or more")),
        ({"settings": ["damping=nan"]}, ("--set damping=nan", "0 or more")),
        ({"settings": ["damping=much"]}, ("--set damping=much", "a number or auto")),
        ({"num_sequences": 0}, ("--num-sequences",)),
        ({"sequence_length": 1}, ("--sequence-length",)),
        ({"batch_size": 0}, ("--batch-size",)),
        ({"round_to": 0}, ("--round-to",)),
        ({"round_to": 1000}, ("--round-to",)),
        ({"max_memory": "much"}, ("much",)),
        ({"profile": "/no/such/profile"}, ("/no/such/profile is not a readable profile",)),
        ({"max_memory": "0"}, ("--max-memory 0",)),
        ({"settings": ["pivoting=qr", "sketch=none"]}, ("--set pivoting=qr", "--set sketch=")),
        ({"settings": ["sketch_size=-1"]}, ("--set sketch_size=-1", "at least 0")),
    ],
)
def test_options_out_of_range(
    changes: dict[str, Any], names: tuple[str, ...], make_checkpoint: MakeCheckpoint, fails: Fails
) -> None:
    fails(make_checkpoint(), *names, **changes)


def test_a_size_that_the_form_cannot_hold(make_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = make_checkpoint(groups=4, attention_bias=True)
    fails(folder, "3 heads", "hidden size 32", recipe="stat", settings=["ffn=none"], sparsity=0.03)


def test_a_target_out_of_reach_names_the_most_that_can_go(make_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    """What the message names can be reached; fewer heads are named only where they suffice."""
    checkpoint = make_checkpoint()
    told = fails(checkpoint, "at best", sparsity=0.9)
    (most,) = re.findall(r"ask for --sparsity (\S+) or less\.$", told)
    fails(checkpoint, "or less, or allow --set heads=id as well.", sparsity=float(most) + 0.01)
    assert main([str(checkpoint), f"--sparsity={most}", "--calibration=builtin", "--dry-run", "--device=cpu"]) == 0
    told = fails(checkpoint, "at best", sparsity=0.95, settings=["heads=id"])
    (more,) = re.findall(r"ask for --sparsity (\S+) or less\.$", told)
    assert float(more) > float(most)
    options = [f"--sparsity={more}", "--set=heads=id", "--calibration=builtin", "--dry-run", "--device=cpu"]
    assert main([str(checkpoint), *options]) == 0
