"""Errors of the command line about the options: out of range, out of reach, or against each other."""

import re
from itertools import product
from typing import Any

import pytest
from advice import advised, mentions
from factories import Fails, MakeCheckpoint

from oneshot.cli.compress import build_parser, main
from oneshot.cli.options import parse_config
from oneshot.errors import ConfigError

# options that say how weights are stored, and how large they are; None leaves one out
OF_TYPES = {
    "--bits": (None, "4.5"),
    "--max-file-size": (None, "1MB"),
    "--form": (None, "gguf", "stock", "nemotron-nas"),
    "--quantise": (None, "w4a16"),
    "--save-dtype": (None, "q8_0", "bfloat16"),
    "--sparsity": (None, "0.2"),
    "--max-size": (None, "1MB"),
}


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
        ({"sparsity": None, "max_size": "0"}, ("--max-size 0 is out of range",)),
        ({"sparsity": None, "max_size": "0.1"}, ("'0.1' is less than 1",)),
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
    fails(folder, "so far apart", "ask for --sparsity", recipe="stat", settings=["ffn=none"], sparsity=0.03)


def test_a_target_out_of_reach_names_the_most_that_can_go(make_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    """What the message names can be reached; fewer heads are named only where they suffice."""
    checkpoint = make_checkpoint()
    assert "heads=id" not in fails(checkpoint, "at best", sparsity=0.9)  # which would leave both tables whole
    told = fails(checkpoint, "at best", sparsity=0.9, settings=["embedding=none"])
    (most,) = re.findall(r"ask for --sparsity (\S+) or less\.$", told)
    allowed = "or less, or allow --set heads=id as well."
    fails(checkpoint, allowed, sparsity=float(most) + 0.01, settings=["embedding=none"])
    assert main([str(checkpoint), f"--sparsity={most}", "--calibration=builtin", "--dry-run", "--device=cpu"]) == 0
    told = fails(checkpoint, "at best", sparsity=0.95, settings=["heads=id"])
    (more,) = re.findall(r"ask for --sparsity (\S+) or less\.$", told)
    assert float(more) > float(most)
    options = [f"--sparsity={more}", "--set=heads=id", "--calibration=builtin", "--dry-run", "--device=cpu"]
    assert main([str(checkpoint), *options]) == 0


def refusal_of(options: dict[str, str]) -> str | None:
    """Return why a command with these options is refused before anything is read; None if it is not."""
    arguments = build_parser("compress").parse_args(["folder", "--output=out", *map("=".join, options.items())])
    try:
        parse_config(arguments, sparsity=None if arguments.sparsity is None else float(arguments.sparsity[0]))
    except ConfigError as error:
        return str(error)
    return None


def test_advice_beside_types_of_tensors_leads_to_a_command_that_runs() -> None:
    """Follow every alternative of every refusal to the letter, until only the size is to be chosen."""
    refused = 0
    for values in product(*OF_TYPES.values()):
        options = {flag: value for flag, value in zip(OF_TYPES, values, strict=True) if value is not None}
        waiting = [(options, frozenset[str]())]
        while waiting:
            options, before = waiting.pop()
            message = refusal_of(options)
            if message is None or message.startswith("Give exactly one target"):
                continue
            assert message not in before, options
            changed = list(advised(message, options))
            assert changed, message
            for again in changed:
                chosen = {flag for flag in again if again[flag] != options.get(flag)}
                told = {flag for flag, _ in mentions((refusal_of(again) or "").rpartition("; ")[0])}
                assert not chosen & told, (message, again)
            waiting += [(again, before | {message}) for again in changed]
            refused += 1
    assert refused > 100
