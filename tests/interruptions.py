"""Runs that are interrupted at a known moment, and what they leave beside what an undisturbed run writes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oneshot import Config
from oneshot.checkpoint import Journal
from oneshot.compression import LayerCompressor
from oneshot.pipeline import compress
from oneshot.report.card import REPORT_NAME

WEIGHTLESS = {REPORT_NAME, "report.html", "README.md"}  # these contain seconds and peak memory


class Killed(BaseException):
    """Raised where a process would have been killed."""


def stop_before(layer: int, run: Callable[[], Any]) -> None:
    """Run, and press Ctrl-C when a layer is about to be compressed."""
    original = LayerCompressor.compress_layer

    def interrupted(self: LayerCompressor, index: int, *rest: Any) -> Any:
        if index == layer:
            raise KeyboardInterrupt
        return original(self, index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCompressor, "compress_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in WEIGHTLESS}


def undisturbed(config: Config) -> dict[str, bytes]:
    beside = replace(config, output=f"{config.output}-undisturbed")
    compress(beside)
    return contents(Path(beside.output))


def stop_at(moment: int | str, run: Callable[[], Any]) -> None:
    """Run, and stop before a layer, or before the journal's step of this name (`expect`, `finish`, `commit`)."""
    if isinstance(moment, int):
        stop_before(moment, run)
        return

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, moment, killed)
        with pytest.raises(Killed):
            run()
