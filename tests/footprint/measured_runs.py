"""Runs in processes that fork from one that has imported everything, each with its peak of resident memory."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def measure(runs: Sequence[dict[str, Any]], found: Path) -> None:
    """Write a line of JSON for each run: predicted bytes, measured bytes, and the stage of the predicted peak.

    A peak begins at the resident memory of the fork, so what runs import is there already, and so is what every run
    would make once: the names of all classes of transformers, and the report's template.

    Args:
        runs: flat options. `max_memory_bytes` 1 means as much as the refusal names. With `check` a second line has the
            check of the result.
    """
    import datasets  # noqa: F401
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from oneshot import Config
    from oneshot.api.check import quick_check
    from oneshot.errors import MemoryLimitError
    from oneshot.machine.memory import peak_bytes
    from oneshot.pipeline import compress, predict
    from oneshot.report.page import _template

    torch.set_num_threads(1)
    get_checkpoint_conversion_mapping("llama")
    _template()
    for options in runs:
        child = os.fork()
        if child > 0:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, options
            continue
        if options["max_memory_bytes"] == 1:
            try:
                predict(Config.of(**options))
            except MemoryLimitError as error:
                options["max_memory_bytes"] = int(str(error).rpartition("--max-memory ")[2][:-4]) * 2**20
        is_checked = options.pop("check", False)
        config = Config.of(**options)
        report = compress(config)
        footprint = report.footprint
        stage = f"{footprint.host_stage}, {footprint.expert_groups} groups of experts"
        lines = [(footprint.host_bytes, peak_bytes(), stage)]
        if is_checked:
            check = quick_check(config, report)
            assert check.perplexity, check.skipped
            lines.append((footprint.check_bytes, check.peak_bytes, "the check, 1 groups of experts"))
        with found.open("a") as file:
            for line in lines:
                print(json.dumps(line), file=file)
        os._exit(0)
