"""Every file of an unfinished run, changed, cut or gone: the bytes of an undisturbed run, or one sentence."""

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig
from interruptions import contents, stop_at, undisturbed

from oneshot import Config
from oneshot.errors import OutputError
from oneshot.pipeline import compress

Damage = Callable[[Path, random.Random], None]


def turn_bit(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def turn_digit(path: Path, chance: random.Random) -> None:
    """Turn the last bit of a digit or letter: JSON stays JSON."""
    content = bytearray(path.read_bytes())
    places = [place for place, byte in enumerate(content) if chr(byte).isalnum()]
    if places:
        content[chance.choice(places)] ^= 1
    path.write_bytes(content)


def cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content) or 1)])


def delete(path: Path, _: random.Random) -> None:
    path.unlink()


DAMAGES: tuple[Damage, ...] = (turn_bit, turn_digit, cut, delete)
RUNS: dict[str, dict[str, Any]] = {
    "stock": {},
    "per-layer": {"form": "per-layer", "round_to": 4},
    "nemotron-nas": {"form": "nemotron-nas", "round_to": 4},
    "gguf": {"form": "gguf", "round_to": 4},
    "hidden size": {"recipe": "group-pca", "correction": "two-stream"},
    "latency": {"budget": "latency", "form": "per-layer", "round_to": 4, "curvature": "none"},
    "small files": {"max_file_bytes": 20_000},
    "cast": {"save_dtype": "bfloat16", "up_steps": 2},
}
MOMENTS: tuple[int | str, ...] = ("expect", 0, 1, "finish", "commit")
NONE = ("gguf", "finish")  # its file is written at once
ALL = [
    pytest.param(name, moment, len(DAMAGES), marks=pytest.mark.grid)
    for name in RUNS
    for moment in MOMENTS
    if (name, moment) != NONE
]


def files_of(work: Path) -> dict[Path, bytes]:
    return {path.relative_to(work): path.read_bytes() for path in sorted(work.rglob("*")) if path.is_file()}


def parts_of(work: Path) -> list[str]:
    return sorted(path.name for path in work.glob("record-*.json"))


@pytest.mark.parametrize(("name", "moment", "each"), [("stock", 1, 1), ("per-layer", 1, 1), *ALL])
def test_a_damaged_file_of_an_unfinished_run_changes_no_result(
    name: str,
    moment: int | str,
    each: int,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With text of the model's own, so that everything which can be saved is there. `each`: damages of every file."""
    monkeypatch.setattr("oneshot.profiling.latency._least", invented_seconds(itertools.count()))
    sizes = {"num_sequences": 4, "sequence_length": 24, "calibration": f"{text_file}+self"}
    config = make_config(make_checkpoint(layers=2), **sizes | RUNS[name])
    wanted = None if name == "latency" else undisturbed(config)  # no two runs have the same times
    stop_at(moment, partial(compress, config))
    work = Path(f"{config.output}.incomplete")
    kept = Path(shutil.copytree(work, work.with_name("kept")))
    wanted = wanted or finished(config, kept)
    chance, count = random.Random(f"{name} {moment}"), 0
    for path in files_of(kept):
        for number in range(count, count + each):
            damage = DAMAGES[number % len(DAMAGES)]
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(kept, work)
            damage(work / path, chance)
            judge(f"{damage.__name__} of {path}", config, work, wanted)
        count += each
    assert count >= len(DAMAGES)


def invented_seconds(turn: Iterator[int]) -> Callable[[list[Any], Any], list[float]]:
    """Return what times calls: later ones, of larger sizes, take longer, and nothing takes as long as before."""
    return lambda calls, _: [1 + number + next(turn) / 1000 for number in range(len(calls))]


def finished(config: Config, kept: Path) -> dict[str, bytes]:
    compress(replace(config, resume=True))
    found = contents(Path(config.output))
    shutil.rmtree(config.output)
    return found


def judge(what: str, config: Config, work: Path, wanted: dict[str, bytes]) -> None:
    """Continue a damaged run: it ends with the bytes that are wanted, or with a sentence and all that it had."""
    output, before = Path(config.output), parts_of(work)
    try:
        compress(replace(config, resume=True))
        said = None
    except OutputError as error:
        said = str(error)
    if said is None:
        assert contents(output) == wanted, what
        shutil.rmtree(output)
    else:
        assert parts_of(work) == before, what
        assert "\n" not in said, what
        assert said.endswith("."), what
        assert str(work) in said, what
