"""A report for others: paths of this machine become names."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from oneshot.report.records import Report
from oneshot.text import exists, file_of, split_sources

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_published(name: str) -> bool:
    """Return whether a name is one on the hub and not a local path."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def shared_name(source: str) -> str:
    """Return the last part of a local path; names on the hub, with columns and splits, stay."""
    is_local = source.startswith((".", "/", "~")) or exists(file_of(source)[0]) or source.count("/") > 1
    return Path(source).name if is_local else source


def shared_sources(calibration: str) -> str:
    """Return the sources of a mixture as names."""
    return "+".join(map(shared_name, split_sources(calibration)))


def told_sources(calibration: str) -> str:
    """Return the sources of a mixture as names for people, with the share of each if they differ."""
    sources = Counter(map(shared_name, split_sources(calibration)))
    if len(set(sources.values())) == 1:
        return "+".join(sources)
    return " + ".join(f"{count}/{sources.total()} {name}" for name, count in sources.items())


def without_local_paths(report: Report) -> Report:
    """Return the report with names in the place of local paths, also in its warnings."""
    config: dict[str, Any] = dict(report.config)
    text, machine = dict(config["text"]), dict(config["machine"])
    paths = [config["checkpoint"], config["output"], *split_sources(text["calibration"])]
    config |= {name: shared_name(config[name]) for name in ("checkpoint", "output")}
    if config["profile"] is not None:
        paths.append(config["profile"])
        config["profile"] = shared_name(config["profile"])
    text["calibration"] = shared_sources(text["calibration"])
    machine["offload_dir"] = None
    calibration = report.calibration
    if calibration is not None:
        calibration = calibration | {"source": shared_sources(str(calibration["source"]))}

    def cleaned(warnings: tuple[str, ...]) -> tuple[str, ...]:
        for path in sorted(paths, key=len, reverse=True):
            if path != shared_name(path):
                warnings = tuple(warning.replace(path, shared_name(path)) for warning in warnings)
        return warnings

    check = report.check
    if check is not None:
        check = replace(check, source=shared_name(check.source), skipped=cleaned((check.skipped,))[0])
    return replace(
        report,
        config=config | {"text": text, "machine": machine},
        calibration=calibration,
        check=check,
        warnings=cleaned(report.warnings),
        layers=tuple(replace(layer, warnings=cleaned(layer.warnings)) for layer in report.layers),
    )
