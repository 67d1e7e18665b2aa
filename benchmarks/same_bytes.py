"""Compare the bytes of stored tensors between this tree and another checkout: families × forms × recipes.

`python benchmarks/same_bytes.py OTHER_TREE` compresses tiny random models of every family with both trees, each in a
process of its own, and prints a line for every case: equal, different (with the first tensor), or refused by both. The
files that tensors lie in may differ, unless `--files` also compares the weight files and their index. Exit code 1 if
any case differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")  # with every recipe; the others with one in the stock form
RECIPES = ("oneshot", "stat", "tcsp", "group-pca", "flap")
FORMS = ("stock", "per-layer")
OTHER_FORMS = ("nemotron-nas", "gguf")
SPARSITY = "0.1"
FILE = "file "  # before the name of a file among tensors
# Options beyond a recipe and a form; keys as `--set` takes them.
VARIANTS: dict[str, dict[str, str]] = {
    "heads": {"heads": "id"},
    "heads-obs": {"heads": "obs", "ffn": "obs"},
    "heads-only": {"heads": "id", "ffn": "none", "sparsity": "0.04"},
    "up-steps": {"up_steps": "2"},
    "damping-auto": {"damping": "auto"},
    "same-layer": {"correction": "same-layer"},
    "uncorrected": {"correction": "none", "ffn": "wanda", "heads": "leverage"},
    "depth": {"depth": "sensitivity"},
    "values": {"value_size": "4"},
    "queries-keys": {"query_key_size": "4"},
    "corrected-slices": {
        "sparsity": "0.25",
        "hidden": "pca",
        "hidden_size": "28",
        "correction": "two-stream",
        "heads": "id",
    },
    "group-slices": {"hidden": "pca", "group_size": "1", "ffn": "none", "shared_weight": "0.1"},
    "magnitude": {"ffn": "magnitude", "correction": "none"},
    "several-files": {"max_shard_size": "60KB"},
    "other-dtype": {"save_dtype": "bfloat16"},
    "tournament": {"pivoting": "tournament", "sketch": "sparse-sign"},
}


def table() -> dict[str, Any]:
    """Return the families of the tests' table whose text is packed."""
    sys.path.insert(0, str(ROOT / "tests"))
    from families.cases import CASES

    return {name: case for name, case in CASES.items() if case.packed}


def cases() -> list[dict[str, object]]:
    """Five families with every recipe and form, every variant with Llama and OPT, and all other decoders."""
    listed: list[dict[str, object]] = []
    for family in FAMILIES:
        for tied in (False, True):
            for form in FORMS:
                listed += [
                    {"family": family, "tied": tied, "form": form, "recipe": recipe, "options": {}, "name": recipe}
                    for recipe in RECIPES
                ]
    for family in ("llama", "opt"):
        for form in FORMS:
            listed += [
                {"family": family, "tied": True, "form": form, "recipe": "oneshot", "options": options, "name": name}
                for name, options in VARIANTS.items()
            ]
    listed += [
        {"family": family, "tied": tied, "form": form, "recipe": "oneshot", "options": {}, "name": "oneshot"}
        for family in ("llama", "qwen2")
        for tied in (False, True)
        for form in OTHER_FORMS
    ]
    listed += [
        {"family": family, "tied": tied, "form": "stock", "recipe": "oneshot", "options": {}, "name": "oneshot"}
        for family in table()
        if family not in FAMILIES
        for tied in (False, True)
    ]
    return listed


def make_models(folder: Path) -> None:
    """Save a tiny random model of every family, with a tokenizer and a text."""
    families = table()
    from factories import tiny_tokenizer, topics

    fast = tiny_tokenizer()
    for family, case in families.items():
        for tied in (False, True):
            sizes = {"width": 128, "layers": 3} if family in FAMILIES else {}
            model = case.build(**case.options | sizes | {"tied": tied})
            place = folder / f"{family}-{'tied' if tied else 'untied'}"
            model.save_pretrained(place)
            fast.save_pretrained(place)
    (folder / "text.txt").write_text(topics(0, 10))


def arguments_of(case: dict[str, object], models: Path, output: Path, *, new: bool) -> list[str]:
    """Return the command line of a case, in the spelling of the tree that runs it."""
    listed = [
        str(models / f"{case['family']}-{'tied' if case['tied'] else 'untied'}"),
        *("--output", str(output), "--recipe", str(case["recipe"]), "--tier", str(case["form"])),
        *("--calibration", str(models / "text.txt"), "--num-sequences", "16", "--sequence-length", "32"),
        *("--batch-size", "4", "--device", "cpu", "--dtype", "float32", "--quiet"),
    ]
    options = case["options"]
    assert isinstance(options, dict)
    if not options.keys() & {"value_size", "query_key_size", "sparsity"}:
        listed += ["--sparsity", SPARSITY]
    for key, value in options.items():
        visible = key in ("up_steps", "sparsity", "max_shard_size", "save_dtype") or not new
        listed += [f"--{key.replace('_', '-')}", value] if visible else ["--set", f"{key}={value}"]
    return listed


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every stored tensor, with its dtype and shape, and of every weight file."""
    from safetensors.torch import load_file

    paths = [*folder.glob("*.safetensors*"), *folder.glob("*.gguf")]
    found = {f"{FILE}{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            content = tensor.contiguous().flatten().view(__import__("torch").uint8).numpy().tobytes()
            found[name] = f"{hashlib.sha256(content).hexdigest()} {tensor.dtype} {list(tensor.shape)}"
    return found


def drive(models: Path, result: Path) -> None:
    """Run every case with the `oneshot` that Python finds; write checksums or the exit code."""
    import contextlib
    import io

    import torch

    import oneshot

    # an earlier design has no such folder; an editable install of this tree would still find it by name
    new = Path(oneshot.__file__).with_name("cli").is_dir()
    if new:
        from oneshot.cli.compress import main
    else:
        from oneshot.compress import main

    torch.set_num_threads(1)
    found: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(cases()):
            output = Path(scratch) / str(number)
            errors = io.StringIO()
            try:
                with contextlib.redirect_stderr(errors):
                    code = main(arguments_of(case, models, output, new=new))
            except SystemExit as error:
                code = int(error.code or 0)
            except (ValueError, IndexError, RuntimeError) as error:  # a defect of that tree, shown in the table
                found.append({"crashed": f"{type(error).__name__}: {error}"})
                continue
            if code:
                lines = errors.getvalue().strip().splitlines() or ["?"]
                found.append({"refused": next((line for line in lines if line.startswith("error")), lines[-1])})
            else:
                found.append(checksums(output))
    result.write_text(json.dumps(found))


def main() -> int:
    """Run both trees side by side and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--files", action="store_true", help="weight files must be equal, not only tensors")
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help="folder that keeps the other tree's checksums for the next call")
    arguments = parser.parse_args()
    if arguments.models:
        drive(arguments.models, arguments.result)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(exist_ok=True, parents=True)
        if not (folder / "text.txt").exists():
            make_models(folder)
        running = []
        for name, tree in (("other", arguments.other), ("this", ROOT)):
            result = folder / f"{name}.json"
            if name == "other" and result.exists():
                continue
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tree}:{tree / 'kernels'}"}
            command = [sys.executable, __file__, str(tree), "--models", str(folder), "--result", str(result)]
            running.append(subprocess.Popen(command, env=environment, cwd=tree))
        if any(process.wait() for process in running):
            return 1
        theirs, ours = (json.loads((folder / f"{name}.json").read_text()) for name in ("other", "this"))
    counts = {"equal": 0, "refused by both": 0, "different": 0}
    for case, old, new in zip(cases(), theirs, ours, strict=True):
        compared = [name for name in sorted(old.keys() | new.keys()) if arguments.files or not name.startswith(FILE)]
        names = [name for name in compared if old.get(name) != new.get(name)]
        verdict = "different" if names else "equal"
        if "refused" in new and old.keys() & {"refused", "crashed"}:
            verdict = "refused by both"
        counts[verdict] += 1
        tied = "tied" if case["tied"] else "untied"
        detail = ""
        if verdict == "different":
            detail = f": {names[0]} of {len(names)}: {old.get(names[0])} | {new.get(names[0])}"
        if verdict == "refused by both":
            detail = f": {new['refused']}"
        print(f"{case['family']:16} {tied:7} {case['form']:10} {case['name']:17} {verdict}{detail}")
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    return int(counts["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
