"""Measure everything that only a GPU can tell, in one call of less than ten minutes.

`python benchmarks/gpu.py --output FOLDER` writes rows to `FOLDER/gpu.jsonl` as they come; it prints a table at the end.
Sections run in processes of their own, the most telling first. One that fails or takes too long costs its own rows.

It needs torch, transformers and scipy, and for some rows Triton, pytest and hypothesis; the first row says what is
missing. It needs no network, no `.git`, and no installed oneshot. `make gpu-bundle` puts into `.gpu` what a machine
cannot make itself: the first layers of SmolLM2 and the name of the commit.

`--tiny --device cpu` runs the same code without a GPU, with tiny matrices and models.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

from gpu_sections import ROOT, agree, compressed, env, kernels, sanitizer, tests

TOTAL_SECONDS = 560
# section -> seconds that it may take, in order of value; "compress MODEL FORM KERNELS"
SECTIONS = {
    "env": 45,
    "tests": 100,
    "compress 1.1B stock torch": 60,
    "compress 7B stock torch": 130,
    "kernels": 80,
    "agree": 70,
    "compress 7B per-layer torch": 130,
    "compress 1.1B stock triton": 50,
    "compress 8B stock torch": 110,
    "compress 70B stock torch": 70,
    "sanitizer": 40,
}
SAME_IF_TINY = {name for name in SECTIONS if name.startswith("compress")} - {
    "compress 1.1B stock torch",
    "compress 7B per-layer torch",
}


def make_do() -> None:
    """Stand in for small packages that a bare machine may lack: psutil, and matplotlib for the page of a report."""
    if importlib.util.find_spec("matplotlib") is None:
        page = types.ModuleType("oneshot.report.page")
        page.report_page = lambda *_, **__: ""  # type: ignore[attr-defined]
        sys.modules["oneshot.report.page"] = page
    if importlib.util.find_spec("psutil") is None:
        psutil = types.ModuleType("psutil")
        resident = types.SimpleNamespace(
            memory_info=lambda: types.SimpleNamespace(rss=_kilobytes("self/status", "VmRSS"))
        )
        psutil.Process = lambda: resident  # type: ignore[attr-defined]
        memory = types.SimpleNamespace(available=_kilobytes("meminfo", "MemAvailable"))
        psutil.virtual_memory = lambda: memory  # type: ignore[attr-defined]
        sys.modules["psutil"] = psutil


def _kilobytes(file: str, name: str) -> int:
    return int(Path(f"/proc/{file}").read_text().split(f"{name}:")[1].split()[0]) * 1024


def run_section(name: str, options: argparse.Namespace, seconds: float) -> str:
    """Run a section in a process; return what became of it."""
    command = [
        sys.executable,
        __file__,
        "--one",
        name,
        "--output",
        str(options.output),
        "--bundle",
        str(options.bundle),
    ]
    command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    environment.pop("ONESHOT_KERNELS", None)
    with (options.output / "log.txt").open("a") as log:
        log.write(f"=== {name}\n")
        log.flush()
        try:
            done = subprocess.run(command, env=environment, timeout=seconds, stdout=log, stderr=log, check=False)
        except subprocess.TimeoutExpired:
            return "timed out"
    return "done" if done.returncode == 0 else f"failed with {done.returncode}; see log.txt"


def main() -> int:
    """Run the sections within the time, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "gpu-out")))
    parser.add_argument("--bundle", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--tiny", action="store_true", help="tiny matrices and models, to try the program")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.one:
        make_do()
        words = options.one.split()
        if words[0] == "compress":
            compressed(options, *words[1:])
        else:
            {"env": env, "tests": tests, "kernels": kernels, "agree": agree, "sanitizer": sanitizer}[words[0]](options)
        return 0
    end, lines = time.monotonic() + options.seconds, []
    # with tiny models all names mean the same one
    named = [name for name in SECTIONS if not options.tiny or name not in SAME_IF_TINY]
    for name in options.sections or named:
        started, left = time.monotonic(), end - time.monotonic()
        state = run_section(name, options, min(SECTIONS[name], left)) if left > 5 else "no time left"
        lines.append(f"{name:28} {time.monotonic() - started:6.1f} s  {state}")
    print("\n".join(lines))
    path = options.output / "gpu.jsonl"
    for row in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        if row["kind"] == "compress":
            seconds, device = row["predicted"]["seconds"]["total"], row["predicted"]["device_bytes"]
            name = f"{row['model']} {row['form']} {row['kernels']}"
            memory = f"{row['peak_device_bytes'] / 1e9:.1f} GB of {device / 1e9:.1f} predicted"
            print(f"{name}: {row['wall_seconds']:.0f} s of {seconds:.0f} predicted, {memory}")
    return int(any(not line.endswith("done") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
