"""Measure what only a GPU can tell, in calls of less than four minutes.

`python benchmarks/gpu.py --output FOLDER --sections NAME …` writes rows to `FOLDER/gpu.jsonl` as they come, and prints
a table at the end. Sections run in processes of their own. One that fails or takes too long costs its own rows.
Without names it runs those that `results/gpu.jsonl` has no rows of yet, the most telling first; with `--again` all.

It needs torch, transformers and scipy, and for some rows Triton, pytest and hypothesis. It needs no network, no `.git`,
and no installed oneshot. `--tiny --device cpu` runs the same code without a GPU, with tiny matrices and models.
"""

# How to measure on a machine that is lent for minutes, to which a copy of the working tree travels:
#
#   make gpu-bundle DATA_DIR=folder     here, at the commit that is measured: .gpu/1 and .gpu/2, 56 and 50 MiB
#
# Call 1, with the ignored folder .gpu/1; about 220 seconds. The machine keeps .gpu/1 for call 2.
#   python3 benchmarks/gpu.py --output $OUT --seconds 280 --sections "pivots" "7B stock" "7B per-layer" "1.1B stock"
#
# Call 2, at once, with the ignored folder .gpu/2; about 230 seconds. If the machine went back since, a call of `true`
# with .gpu/1 comes first.
#   python3 benchmarks/gpu.py --output $OUT --seconds 280 --sections "quality" "agree" "forms" "70B stock"
#
# With time left, each section within the seconds of SECTIONS:
#   python3 benchmarks/gpu.py --output $OUT --sections "8B stock" "compiled forms" "tests" "7B per-layer+self"
#
# With the files of other models in the bundle (gpu_bundle.py --coder --gemma) a call of `true` carries each of its
# folders but the last, in about four seconds. The card is shared well where only quality counts:
#   python3 benchmarks/gpu.py --output $OUT --seconds 500 --at-once 3 --sections "quality, coder, seed 1" …
#
# "healing" needs "quality" or one of its seeds in the same call. At the end append the rows of $OUT/gpu.jsonl to
# benchmarks/results/gpu.jsonl, and run gpu_estimate.py and render.py.

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpu_bundle import CODER, GEMMA, SMOLLM2, packages_folder
from gpu_common import ROOT, Job, scratch_folder
from gpu_forms import big_forms, compiled_forms, forms, graph_forms
from gpu_kernels import pivots, tests
from gpu_real import flap, healing, make_models, other_model, quality, stock_form, tasks
from gpu_runs import agree, compressed, ranks

TOTAL_SECONDS = 240
LEAST_SECONDS = 5  # of a section; importing takes as long
RESULTS = ROOT / "benchmarks" / "results" / "gpu.jsonl"


@dataclass(frozen=True)
class Section:
    """A measurement, the seconds that it may take, and its arguments, such as a model, a form and settings."""

    measure: Callable[..., None]
    seconds: float
    arguments: tuple[str, ...] = ()

    @property
    def model(self) -> str | None:
        """Return the name of the model of random weights, which is made once; None without one."""
        return self.arguments[0] if self.measure in (compressed, big_forms) else None


SECTIONS = {
    "pivots": Section(pivots, 50),
    "7B stock": Section(compressed, 90, ("7B", "stock")),
    "7B per-layer": Section(compressed, 170, ("7B", "per-layer")),
    "1.1B stock": Section(compressed, 50, ("1.1B", "stock")),
    "30B-A3B stock": Section(compressed, 90, ("30B-A3B", "stock", "batch_size=16")),
    "30B-A3B per-layer": Section(compressed, 110, ("30B-A3B", "per-layer", "batch_size=16")),
    "30B-A3B experts": Section(compressed, 110, ("30B-A3B", "stock", "experts=effects", "ffn=none", "batch_size=16")),
    "30B-A3B batches": Section(compressed, 90, ("30B-A3B", "stock", "batch_size=32")),
    "quality": Section(quality, 120),
    "healing": Section(healing, 120),
    "quality, seed 1": Section(quality, 120, ("1",)),
    "quality, seed 2": Section(quality, 120, ("2",)),
    "quality, coder": Section(other_model, 220, (CODER, "general.jsonl+self", "0")),
    "quality, coder, seed 1": Section(other_model, 220, (CODER, "general.jsonl+self", "1")),
    "quality, coder, seed 2": Section(other_model, 220, (CODER, "general.jsonl+self", "2")),
    "quality, coder, own text": Section(other_model, 180, (CODER, "self", "0")),
    "quality, coder, stock": Section(stock_form, 220, (CODER,)),
    "quality, coder, flap": Section(flap, 220, (CODER,)),
    "quality, gemma": Section(other_model, 220, (GEMMA, "general.jsonl+self", "0")),
    "quality, gemma, seed 1": Section(other_model, 220, (GEMMA, "general.jsonl+self", "1")),
    "quality, gemma, seed 2": Section(other_model, 220, (GEMMA, "general.jsonl+self", "2")),
    "quality, gemma, stock": Section(stock_form, 220, (GEMMA,)),
    "quality, gemma, flap": Section(flap, 220, (GEMMA,)),
    "quality, coder, stock, own text too": Section(stock_form, 220, (CODER, "general.jsonl+self")),
    "quality, builtin": Section(other_model, 220, (SMOLLM2, "builtin+self", "0")),
    "quality, coder, builtin": Section(other_model, 220, (CODER, "builtin+self", "0")),
    "quality, tasks": Section(tasks, 300, (SMOLLM2, "per-layer", "0")),
    "quality, stock, tasks": Section(tasks, 300, (SMOLLM2, "stock", "0")),
    "quality, coder, tasks": Section(tasks, 400, (CODER, "per-layer", "1")),
    "quality, gemma, tasks": Section(tasks, 400, (GEMMA, "per-layer", "0")),
    "agree": Section(agree, 70),
    "forms": Section(forms, 105),
    "70B stock": Section(compressed, 70, ("70B", "stock")),
    "8B stock": Section(compressed, 100, ("8B", "stock")),
    "tests": Section(tests, 100),
    "graphs": Section(graph_forms, 90),
    "7B graphs": Section(big_forms, 90, ("7B", "graphs")),
    "compiled forms": Section(compiled_forms, 100),
    "7B per-layer+self": Section(compressed, 100, ("7B", "per-layer+self")),
    "ranks": Section(ranks, 60),
}
# with tiny models; "ranks" is left out, because tests of the package compare processes
ONE_OF_A_KIND = {name for name, section in SECTIONS.items() if not section.arguments} - {"ranks"} | {
    "7B per-layer+self",
    "30B-A3B experts",
}


def run_section(name: str, job: Job, seconds: float) -> str:
    """Run a section in a process; return what became of it."""
    command = [sys.executable, __file__, "--one", name, "--device", job.device, *(["--tiny"] if job.tiny else [])]
    command += [f"--output={job.output}", f"--bundle={job.bundle}", f"--scratch={job.scratch}"]
    command += [f"--at-once={job.at_once}"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*code_folders(job.bundle), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    environment.pop("ONESHOT_KERNELS", None)
    if job.at_once > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // job.at_once))
    with (job.output / "log.txt").open("a") as log:
        log.write(f"=== {name}\n")
        log.flush()
        try:
            done = subprocess.run(command, env=environment, timeout=seconds, stdout=log, stderr=log, check=False)
        except subprocess.TimeoutExpired:
            return "timed out"
    return "done" if done.returncode == 0 else f"failed with {done.returncode}; see log.txt"


def run_by_name(name: str, job: Job, end: float, *, in_process: bool) -> str:
    """Run a section before the clock says `end`; say and return what became of it."""
    started, left = time.monotonic(), end - time.monotonic()
    if in_process:
        SECTIONS[name].measure(replace(job, section=name), *SECTIONS[name].arguments)
        state = "done"
    elif left > LEAST_SECONDS:
        state = run_section(name, job, min(job.at_once * SECTIONS[name].seconds, left))
    else:
        state = "no time left"
    print(f"{name:26} {time.monotonic() - started:6.1f} s  {state}", flush=True)
    return state


def code_folders(bundle: Path) -> list[str]:
    """Return where the packages are, of which none need be installed."""
    return [str(folder) for folder in (ROOT, ROOT / "kernels", ROOT / "benchmarks", packages_folder(bundle))]


def measured_already() -> set[str]:
    """Return the sections that have rows from a GPU."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {row["section"] for row in rows if row["device"] != "cpu"}


def chosen(names: Sequence[str] | None, *, tiny: bool, again: bool) -> list[str]:
    """Return the sections to run; with tiny models those that differ."""
    if names:
        return list(names)
    if tiny:
        return [name for name in SECTIONS if name in ONE_OF_A_KIND or name == "7B stock"]
    done = set() if again else measured_already()
    return [name for name in SECTIONS if name not in done]


def show(path: Path) -> None:
    """Print time and memory of whole runs beside the predictions."""
    for row in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        if row["kind"] == "compress":
            seconds, device = row["predicted"]["seconds"]["total"], row["predicted"]["device_bytes"]
            memory = f"{row['peak_device_bytes'] / 1e9:.1f} GB of {device / 1e9:.1f} predicted"
            stages = ", ".join(f"{stage} {taken:.1f}" for stage, taken in row["seconds"].items())
            print(f"{row['section']}: {row['wall_seconds']:.1f} s of {seconds:.0f} predicted ({stages}), {memory}")


def main() -> int:
    """Run sections within the time, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "gpu-out")))
    parser.add_argument("--bundle", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="of all sections together")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--again", action="store_true", help="also sections that results/gpu.jsonl has rows of")
    parser.add_argument("--at-once", type=int, default=1, help="processes that share the device: quality, no timing")
    parser.add_argument("--in-process", action="store_true", help="no processes, and no limits of time")
    parser.add_argument("--tiny", action="store_true", help="tiny matrices and models, to try the program")
    parser.add_argument("--scratch", type=Path, help="folder for models and results; it is removed at the end")
    parser.add_argument("--one", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    scratch = options.scratch or scratch_folder(f"oneshot-gpu-{os.getpid()}")
    job = Job(options.one or "", options.output, options.bundle, scratch, options.device, options.tiny, options.at_once)
    sys.path[:0] = code_folders(options.bundle)
    if options.one:
        SECTIONS[options.one].measure(job, *SECTIONS[options.one].arguments)
        return 0
    scratch.mkdir(parents=True)
    names = chosen(options.sections, tiny=options.tiny, again=options.again)
    end, states = time.monotonic() + options.seconds, []
    try:
        if options.at_once > 1:
            make_models(job)
        with ThreadPoolExecutor(options.at_once) as pool:
            run = partial(run_by_name, job=job, end=end, in_process=options.in_process)
            for position, (name, state) in enumerate(zip(names, pool.map(run, names), strict=True)):
                states.append(state)
                model = SECTIONS[name].model
                if model and model not in {SECTIONS[later].model for later in names[position + 1 :]}:
                    shutil.rmtree(scratch / model, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    show(options.output / "gpu.jsonl")
    return int(any(state != "done" for state in states))


if __name__ == "__main__":
    sys.exit(main())
