"""Compare the bytes that this tree and another checkout store: families × forms × recipes × ways of a run.

`python benchmarks/same_bytes.py OTHER_TREE` compresses tiny random models of every family of the tests' table with both
trees, each in a process of its own, and prints a line for every case: equal, different (with the first tensor), or
refused by both. The files that tensors lie in may differ, unless `--files` also compares the weight files and their
index. Exit code 1 if any case differs.
"""

import argparse
import contextlib
import fnmatch
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from families.cases import CASES, OTHER_CLASSES  # noqa: E402

WIDE = ("llama", "mistral", "qwen2", "qwen3", "opt")  # families with every recipe and form
RECIPES = ("oneshot", "stat", "tcsp", "group-pca", "flap")
FILE = "file "  # before the name of a file among tensors
PAIRED = ("t5",)  # families that read pairs of text
GGUF_INPUTS = ("llama", "mistral", "qwen2", "qwen3")
# Options beyond a recipe and a form; keys of `--set`, or flags.
VARIANTS: dict[str, dict[str, str]] = {
    "heads": {"heads": "id"},
    "heads-obs": {"heads": "obs", "ffn": "obs"},
    "heads-only": {"heads": "id", "ffn": "none", "--sparsity": "0.04"},
    "up-steps": {"--up-steps": "2"},
    "damping-auto": {"damping": "auto"},
    "same-layer": {"correction": "same-layer"},
    "uncorrected": {"correction": "none", "ffn": "tcsp-score", "heads": "activation-norm"},
    "depth": {"depth": "sensitivity"},
    "sublayers": {"depth": "sublayers", "--sparsity": "0.3"},
    "inner-sizes": {"inner_sizes": "sensitivity", "ranks": "none"},
    "values": {"value_size": "4"},
    "queries-keys": {"query_key_size": "4"},
    "slices": {"hidden": "pca", "hidden_size": "28", "correction": "two-stream", "heads": "id", "--sparsity": "0.25"},
    "group-slices": {"hidden": "pca", "group_size": "1", "ffn": "none", "shared_weight": "0.1"},
    "magnitude": {"ffn": "magnitude", "correction": "none"},
    "several-files": {"--max-shard-size": "60KB"},
    "other-dtype": {"--save-dtype": "bfloat16"},
    "latency": {"--budget": "flops"},
    "tournament": {"pivoting": "tournament", "sketch": "count"},
    "self-text": {"--calibration": "text.txt+self"},
    "resumed": {},
    "two-processes": {"--sparsity": "0.2"},
}


@dataclass(frozen=True)
class Case:
    """A run: its model's folder among the models, its form and recipe, and further options."""

    model: str
    form: str = "stock"
    recipe: str = "oneshot"
    name: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the name that the table and `--only` have."""
        return f"{self.model} {self.form} {self.recipe} {self.name}".strip()

    def arguments(self, models: Path, output: Path) -> list[str]:
        """Return its command line."""
        family = self.model.partition("/")[0]
        listed = [str(models / self.model), "--output", str(output), "--recipe", self.recipe, "--form", self.form]
        listed += ["--num-sequences", "16", "--sequence-length", "32", "--batch-size", "4", "--quiet", "--no-check"]
        listed += ["--device", "cpu", "--dtype", "float32"]
        options = {"--calibration": "pairs.jsonl" if family in PAIRED else "text.txt", **self.options}
        options["--calibration"] = str(models / options["--calibration"])
        if not options.keys() & {"value_size", "query_key_size"}:
            options.setdefault("--sparsity", "0.1")
        for key, value in options.items():
            listed += [key, value] if key.startswith("--") else ["--set", f"{key}={value}"]
        return listed


def cases() -> Iterator[Case]:
    """Yield five families with every recipe, Llama and OPT with every variant, and every family in both forms."""
    for family, case in CASES.items():
        untied, tied = [f"{family}/{kind if case.packed else 'as-is'}" for kind in ("untied", "tied")]
        experts = "sketch" in case.refused  # as of every mixture
        if family in WIDE:
            runs = [(model, form) for model in (untied, tied) for form in ("stock", "per-layer")]
            yield from (Case(*run, recipe) for run in runs for recipe in RECIPES)
        else:
            yield Case(untied)
            if "per-layer form" not in case.refused:
                yield Case(tied, "per-layer")
            if "heads" not in case.refused and not experts:
                yield Case(untied, "stock", "stat")
        if experts:
            yield Case(untied, "stock", "oneshot", "whole experts", {"experts": "effects", "ffn": "none"})
            if "heads" not in case.refused:
                yield Case(untied, "stock", "oneshot", "heads", {"heads": "id"})
            if "per-layer form" not in case.refused:
                yield Case(untied, "per-layer", "oneshot", "experts", {"experts": "effects"})
        for form in ("stock", "per-layer"):
            if family in ("llama", "opt"):
                for name, options in VARIANTS.items():
                    yield Case(tied, form, "oneshot", name, options)
        for form in ("nemotron-nas", "gguf") if family in ("llama", "qwen2") else ():
            yield Case(untied, form)
            yield Case(tied, form)
        if family in GGUF_INPUTS:
            yield Case(f"{family}/gguf/model.gguf")
    for name in OTHER_CLASSES:
        yield Case(f"{name}/as-is")


def make_models(folder: Path) -> None:
    """Save a tiny random model of every case, with a tokenizer and texts."""
    from drawn_runs import Drawn, save
    from factories import topics
    from t5_models import write_pairs

    from oneshot.cli.compress import main as compress
    from oneshot.cli.options import silence_libraries

    silence_libraries()
    (folder / "text.txt").write_text(topics(0, 10))
    write_pairs(folder / "pairs.jsonl")
    for model in sorted({case.model for case in cases()}, key=lambda name: (name.endswith(".gguf"), name)):
        family, kind, *_ = model.split("/")
        case_options = OTHER_CLASSES[family] if family in OTHER_CLASSES else CASES[family].options
        sizes = {"width": 128, "layers": 3} if family in WIDE else {}
        tied = {} if kind == "as-is" else {"tied": kind == "tied"}
        if kind == "gguf":
            dense = Case(f"{family}/untied", "gguf", options={"--sparsity": "0"})
            if compress(dense.arguments(folder, folder / family / "gguf")):
                raise RuntimeError(f"{family} has no GGUF file")
        else:
            save(Drawn(0, family, case_options | sizes | tied, "one file", {}), folder / family / kind)


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every stored tensor, with its dtype and shape, and of every weight file."""
    import torch
    from safetensors.torch import load_file

    paths = [*folder.glob("*.safetensors*"), *folder.glob("*.gguf")]
    found = {f"{FILE}{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            found[name] = f"{hashlib.sha256(content).hexdigest()} {tensor.dtype} {list(tensor.shape)}"
    return found


def run_case(case: Case, models: Path, output: Path) -> int:
    """Run a case with the `oneshot` that Python finds, and return the exit code; its message goes to stderr."""
    from oneshot.cli.compress import main as compress
    from oneshot.compression import LayerCompressor

    arguments = case.arguments(models, output)
    if case.name == "two-processes":
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return subprocess.run([*launched, "-m", "oneshot.compress", *arguments], capture_output=True).returncode
    if case.name == "resumed":
        original = LayerCompressor.compress_layer

        def interrupted(self: LayerCompressor, index: int, *rest: object) -> object:
            if index == 1:
                raise KeyboardInterrupt
            return original(self, index, *rest)  # type: ignore[arg-type]

        LayerCompressor.compress_layer = interrupted  # type: ignore[assignment,method-assign]
        try:
            assert compress(arguments) == 130
        finally:
            LayerCompressor.compress_layer = original  # type: ignore[method-assign]
        arguments.append("--resume")
    return compress(arguments)


def drive(models: Path, result: Path, only: str) -> None:
    """Run every case and write checksums, or the refusal, or the exception of a defect."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(cases()):
            if not fnmatch.fnmatch(case.title, only):
                continue
            output, errors = Path(scratch) / str(number), io.StringIO()
            try:
                with contextlib.redirect_stderr(errors):
                    code = run_case(case, models, output)
            except SystemExit as end:
                code = int(end.code or 0)
            except Exception as error:  # a defect of that tree, shown in the table
                found[case.title] = {"crashed": f"{type(error).__name__}: {error}"}
                continue
            lines = [line for line in errors.getvalue().splitlines() if "error: " in line] or ["?"]
            found[case.title] = {"refused": lines[-1]} if code else checksums(output)
    result.write_text(json.dumps(found))


def main() -> int:
    """Run both trees side by side and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--files", action="store_true", help="weight files must be equal, not only tensors")
    parser.add_argument("--only", default="*", help="pattern of the cases' titles, such as '*per-layer*'")
    parser.add_argument("--keep", type=Path, help="folder that keeps models and the other tree's checksums")
    parser.add_argument("--drive", nargs=2, type=Path, help=argparse.SUPPRESS)  # models and the file of the result
    arguments = parser.parse_args()
    if arguments.drive:
        drive(*arguments.drive, arguments.only)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        if not (folder / "text.txt").exists():
            folder.mkdir(exist_ok=True, parents=True)
            make_models(folder)
        running = []
        for name, tree in (("other", arguments.other.resolve()), ("this", ROOT)):
            if name == "other" and (folder / "other.json").exists():
                continue
            places = [str(folder), str(folder / f"{name}.json")]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tree}:{tree / 'kernels'}"}
            command = [sys.executable, __file__, str(tree), "--only", arguments.only, "--drive", *places]
            running.append(subprocess.Popen(command, env=environment, cwd=tree))
        codes = [process.wait() for process in running]
        if any(codes):
            return 1
        theirs, ours = (json.loads((folder / f"{name}.json").read_text()) for name in ("other", "this"))
    counts = {"equal": 0, "refused by both": 0, "different": 0}
    for title, new in ours.items():
        old = theirs.get(title, {})
        compared = [name for name in sorted(old.keys() | new.keys()) if arguments.files or not name.startswith(FILE)]
        names = [name for name in compared if old.get(name) != new.get(name)]
        verdict, detail = (
            ("different", f": {names[0]} of {len(names)}: {old.get(names[0])} | {new.get(names[0])}")
            if names
            else ("equal", "")
        )
        if "refused" in new and old.keys() & {"refused", "crashed"}:
            verdict, detail = "refused by both", f": {new['refused']}"
        counts[verdict] += 1
        print(f"{title:50} {verdict}{detail}")
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    return int(counts["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
