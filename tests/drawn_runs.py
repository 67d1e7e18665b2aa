"""Runs of the command line with drawn models and options, and what must hold of each: a result, or one sentence.

`python tests/drawn_runs.py 1000 1100` runs these seeds, prints a line of JSON for each, and nothing is written to stay.
"""

import contextlib
import io
import json
import random
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from advice import advised, mentions
from factories import assert_cache_changes_nothing, calibration_tokens, tiny_tokenizer, topics
from families.cases import CASES, OTHER_CLASSES, Case, variants
from last_states import keep_last_states
from safetensors.torch import load_file
from t5_models import save_t5, write_pairs
from vocabularies import SETTINGS

Options = dict[str, str]  # of the command line, by flag; `--set KEY` for settings
PAIRED = ("t5", "mt5")
MOST_FOLLOWED = 5  # refusals of one run, each for another cause
saved_tokenizer = cache(tiny_tokenizer)  # training it takes longer than a run's text
BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")


@dataclass(frozen=True)
class Drawn:
    """A run: the name and the options of a model, how it is stored, and the options of the command line."""

    seed: int
    name: str
    model: dict[str, Any]
    stored: str
    options: Options
    interrupted: bool = False


@dataclass
class Outcome:
    """What came of a run: an exit code, the last line of the error stream, and what does not hold."""

    code: int = 0
    message: str = ""
    faults: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)


@cache
def models() -> dict[str, tuple[Case, dict[str, Any]]]:
    """Return the case of a family and the options of its model, for every variant of every family."""
    listed = {name: (CASES[name.partition("-")[0]], options) for name, options in variants().items()}
    listed |= {name: (case, case.options) for name, case in CASES.items() if name not in listed}
    return listed | {name: (Case(), options) for name, options in OTHER_CLASSES.items()}


def draw(seed: int) -> Drawn:
    """Return the run of a seed."""
    dice = random.Random(seed)
    name = dice.choice(sorted(models()))
    case, options = models()[name]
    changed: dict[str, Any] = {"seed": seed % 7}
    if case.build.__name__ == "build_model":
        free = not any(key in options for key in (*BY_LAYER, "sliding_window", "layers"))
        if free and dice.random() < 0.4:
            changed["layers"] = dice.choice((1, 2, 3))
        if dice.random() < 0.3 and "width" not in options:
            changed["width"] = dice.choice((48, 72, 96))
        if dice.random() < 0.3:
            changed["dtype"] = dice.choice((torch.bfloat16, torch.float16))
    return Drawn(
        seed,
        name,
        options | changed,
        dice.choice(("one file", "one file", "shards", "torch")),
        draw_options(dice, case),
        dice.random() < 0.15,
    )


def draw_options(dice: random.Random, case: Case) -> Options:
    """Return options of the command line: a target, a form, and others; mostly those that most models can have."""
    wild = dice.random() < 0.35
    options: Options = {}
    target = dice.random()
    if target < 0.15:
        options["--sparsity"] = "0"
    elif target < 0.8 or not wild:
        options["--sparsity"] = dice.choice(("0.03", "0.05", "0.1", "0.15", *(("0.3", "0.5", "0.8") if wild else ())))
    elif target < 0.9:
        options["--params"] = dice.choice(("12k", "20k", "30k", "45k", "1M"))
    if dice.random() < 0.65:
        options["--form"] = dice.choice(
            ("stock", "per-layer", "per-layer", *(("nemotron-nas", "gguf") if wild else ()))
        )
    if dice.random() < 0.35:
        options["--recipe"] = dice.choice(RECIPES if wild else ("stat", "activation-norm", "magnitude", "random"))
    for key in dice.sample(sorted(SETTINGS), dice.choice((0, 1, 2, 3) if wild else (0, 0, 1))):
        options[f"--set {key}"] = dice.choice(SETTINGS[key])
    if len({"--sparsity", "--params"} & options.keys()) == 0 and not any(key.endswith(SIZES) for key in options):
        options["--sparsity"] = "0.1"
    for flag, values, share in OTHERS:
        if dice.random() < (share if wild or flag not in ("--tie", "--up-steps") else 0):
            options[flag] = dice.choice(values if wild or flag != "--round-to" else ("1", "4", "8"))
    return options


RECIPES = ("stat", "tcsp", "group-pca", "flap", "activation-norm", "magnitude", "random")
OTHERS = (
    ("--round-to", ("1", "4", "8", "16", "64"), 0.25),
    ("--budget", ("bytes", "flops", "latency"), 0.1),
    ("--save-dtype", ("float32", "bfloat16", "float16", "q8_0"), 0.15),
    ("--dtype", ("bfloat16",), 0.15),
    ("--up-steps", ("1",), 0.05),
    ("--max-shard-size", ("60KB",), 0.1),
    ("--num-sequences", ("2", "4", "9"), 0.3),
    ("--sequence-length", ("8", "24"), 0.2),
    ("--batch-size", ("1", "3"), 0.3),
    ("--tie", ("",), 0.05),
    ("--seed", ("5",), 0.1),
)
SIZES = ("hidden_size", "intermediate_size", "value_size", "query_key_size", "num_experts", "_rate")


def arguments_of(options: Mapping[str, str]) -> list[str]:
    """Return options as a command line has them."""
    found = []
    for flag, value in options.items():
        if flag.startswith("--set "):
            found += ["--set", f"{flag.removeprefix('--set ')}={value}"]
        else:
            found += [flag, value] if value else [flag]
    return found


def save(drawn: Drawn, folder: Path) -> Path:
    """Make the checkpoint of a run."""
    case, _ = models()[drawn.name]
    model = case.build(**drawn.model)
    if drawn.name in PAIRED:
        save_t5(model, folder)
    else:
        model.save_pretrained(folder, max_shard_size="60KB" if drawn.stored == "shards" else "5GB")
        saved_tokenizer().save_pretrained(folder)
    if drawn.stored == "torch" and (folder / "model.safetensors").exists():
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return folder


class Place:
    """A folder for runs, with the texts that they read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text, self.pairs = folder / "text.txt", folder / "pairs.jsonl"
        self.text.write_text(topics(0, 10)[:10_000])
        write_pairs(self.pairs)

    def command(self, drawn: Drawn, checkpoint: Path, output: Path, options: Mapping[str, str]) -> list[str]:
        """Return the command line of a run; what is not drawn is small."""
        small = {"--num-sequences": "4", "--sequence-length": "16", "--device": "cpu", "--dtype": "float32"}
        small["--calibration"] = str(self.pairs if drawn.name in PAIRED else self.text)
        return [str(checkpoint), "--quiet", "--output", str(output), *arguments_of(small | dict(options))]


def call(command: list[str]) -> Outcome:
    """Run the command line in this process."""
    from oneshot.cli.compress import main

    out, err = io.StringIO(), io.StringIO()
    outcome = Outcome()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            outcome.code = main(command)
        except SystemExit as end:  # argparse's
            outcome.code = int(end.code or 0)
        except Exception:
            outcome.code, outcome.faults = 1, [f"traceback: {traceback.format_exc()[-1500:]}"]
            return outcome
    lines = [line for line in err.getvalue().splitlines() if not line.startswith(("WARNING", "usage"))]
    if outcome.code:
        outcome.message = lines[-1] if lines else ""
        is_sentence = outcome.message.startswith(("error: ", "oneshot compress: error: ")) and len(lines) == 1
        if not is_sentence or (not outcome.message.endswith(".") and outcome.code == 1):
            outcome.faults.append(f"no sentence: {lines}")
        if "please report" in outcome.message:
            outcome.faults.append(f"asks to report: {outcome.message}")
    return outcome


def check_run(drawn: Drawn, place: Place) -> Outcome:
    """Run, and return what does not hold of the result, or of the refusal and its advice."""
    import pytest

    checkpoint, output = place.folder / "in", place.folder / "results" / "out"
    for folder in (checkpoint, output.parent):
        shutil.rmtree(folder, ignore_errors=True)
    output.parent.mkdir()
    save(drawn, checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        last = keep_last_states(patch)
        outcome = call(place.command(drawn, checkpoint, output, drawn.options))
    if outcome.code:
        if any(output.parent.iterdir()):
            outcome.faults.append(f"left: {[path.name for path in output.parent.iterdir()]}")
        if not outcome.faults:
            outcome.faults += refused_again(drawn, place, checkpoint, outcome.message)
        return outcome
    try:
        for fault in faults_of_result(drawn, checkpoint, output, last, outcome.compared):
            outcome.faults.append(fault)
        if drawn.interrupted:
            outcome.faults += faults_of_resumed(drawn, place, checkpoint, output)
            outcome.compared.append("resumed")
    except Exception:
        outcome.faults.append(f"result: {traceback.format_exc()[-1500:]}")
    return outcome


def refused_again(drawn: Drawn, place: Place, checkpoint: Path, message: str) -> list[str]:
    """Follow every advice of a refusal to the letter, and return what is wrong with it.

    A run that is then refused for another cause is followed further. Advice is wrong if that refusal is one of before,
    or names an option that the advice has set.
    """
    faults, waiting = [], [(message, drawn.options, (message,))]
    while waiting:
        message, options, before = waiting.pop()
        for changed in advised(message, options):
            output = place.folder / "followed" / "out"
            shutil.rmtree(output.parent, ignore_errors=True)
            again = call(place.command(drawn, checkpoint, output, changed))
            if not again.code:
                continue
            chosen = {flag for flag in changed if changed[flag] != options.get(flag)}
            named = {flag for flag, _ in mentions(again.message.rpartition("; ")[0])}
            if again.message in before or chosen & named or again.faults or len(before) == MOST_FOLLOWED:
                faults.append(f"wrong advice: {message} || {sorted(chosen)} || {again.message} {again.faults}")
            else:
                waiting.append((again.message, changed, (*before, again.message)))
    return faults


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the safetensors files in a folder."""
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in folder.glob("pytorch_model.bin"):
        found |= torch.load(path)
    return found


def open_result(output: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model of a result and what transformers says about its tensors."""
    import transformers

    config = json.loads((output / "config.json").read_text())
    [stated] = config["architectures"]
    options: dict[str, Any] = {"output_loading_info": True}
    if "auto_map" in config:
        auto = next(name for name, place in config["auto_map"].items() if place.endswith(f".{stated}"))
        model, info = getattr(transformers, auto).from_pretrained(output, trust_remote_code=True, **options)
    else:
        model, info = getattr(transformers, stated).from_pretrained(output, **options)
    return model.eval(), info


@torch.inference_mode()
def faults_of_result(
    drawn: Drawn, checkpoint: Path, output: Path, last: list[torch.Tensor], compared: list[str]
) -> Iterator[str]:
    """Yield what does not hold of a result."""
    report = json.loads((output / "oneshot_report.json").read_text())
    counts = report["stored_parameters"]
    if drawn.options.get("--form") == "gguf":
        return
    stored = stored_tensors(output)
    if counts["compressed"] != sum(tensor.numel() for tensor in stored.values()):
        yield f"parameters: reported {counts}, stored {sum(tensor.numel() for tensor in stored.values())}"
    model, info = open_result(output)
    unread = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if unread:
        yield f"opened: {unread}"
    model = model.float()
    yield from faults_of_config(checkpoint, output, model)
    ids = torch.arange(3, 15).unsqueeze(0)
    given = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :5]} if drawn.name in PAIRED else {})
    found = model(**given)
    values = getattr(found, "logits", None)
    values = found[0] if values is None else values
    if not values.isfinite().all():
        yield "logits: not finite"
    config = json.loads((output / "config.json").read_text())
    if "ForCausalLM" in config["architectures"][0]:
        compared.append("cached")
        try:
            assert_cache_changes_nothing(model, 5, input_ids=ids[:, :5])
        except AssertionError:
            yield "cached generation differs"
    sizes_differ = drawn.options.get("--save-dtype", "keep") not in ("keep", "float32")
    exact = drawn.options.get("--dtype", "float32") == "float32" and not sizes_differ and "dtype" not in drawn.model
    case, _ = models()[drawn.name]
    if last and exact and case.packed and report["plan"].get("hidden") is None:
        yield from faults_of_stream(drawn, checkpoint, model, last[0], compared)
    removes = drawn.options.get("--sparsity") != "0" or any(key.endswith(SIZES) for key in drawn.options)
    if not removes and report["config"]["form"] == "stock" and not sizes_differ and "--save-dtype" not in drawn.options:
        compared.append("same bits")
        dense = stored_tensors(checkpoint)
        if "auto_map" not in config and (
            any(name not in dense or not torch.equal(tensor, dense[name]) for name, tensor in stored.items())
        ):
            yield "nothing removed, but other bits"
    if removes and counts["compressed"] >= counts["dense"] and not report["warnings"]:
        yield f"asked for less, and nothing was removed without a word: {counts}"


def faults_of_stream(
    drawn: Drawn, checkpoint: Path, model: Any, last: torch.Tensor, compared: list[str]
) -> Iterator[str]:
    """Yield whether the result has other states after its last layer than the stream of the run."""
    from oneshot.config import Config

    small = {"num_sequences": "--num-sequences", "sequence_length": "--sequence-length", "seed": "--seed"}
    chosen = {name: int(drawn.options[flag]) for name, flag in small.items() if flag in drawn.options}
    text = checkpoint.parent / "text.txt"
    config = Config.of(
        str(checkpoint),
        "out",
        calibration=str(text),
        sparsity=0.1,
        **{"num_sequences": 4, "sequence_length": 16} | chosen,
    )
    hidden: list[torch.Tensor] = []
    base = model.get_submodule(model.base_model_prefix) if hasattr(model, model.base_model_prefix) else model
    base = getattr(base, "decoder", base)
    layers = next((getattr(base, name) for name in ("layers", "h", "layer") if hasattr(base, name)), None)
    if layers is None:
        return
    handle = layers[-1].register_forward_hook(
        lambda _, __, output: hidden.append(output[0] if isinstance(output, tuple) else output)
    )
    model(calibration_tokens(config))
    handle.remove()
    if hidden[0].shape != last.shape:
        return
    compared.append("stream")
    if drawn.name.startswith("opt"):  # whose per-layer form keeps states without their mean
        hidden[0], last = (states - states.mean(-1, keepdim=True) for states in (hidden[0], last))
    difference = float((hidden[0] - last).abs().max() / last.abs().max())
    if difference > 1e-3:
        yield f"stream differs by {difference:.1e}"


def faults_of_config(checkpoint: Path, output: Path, model: Any) -> Iterator[str]:
    """Yield what a config states that is not stored: further layers, and lists with entries of layers that are gone."""
    config = model.config.get_text_config()
    dense = json.loads((checkpoint / "config.json").read_text())
    dense = dense.get("text_config", dense)
    layers = getattr(config, "num_hidden_layers", None)
    before = dense.get("num_hidden_layers", layers)
    for name, value in json.loads((output / "config.json").read_text()).items():
        if isinstance(value, list) and layers != before and len(value) == before and name in dense:
            yield f"config: {name} has {before} entries for {layers} layers"
        if {"mtp", "nextn"} & set(name.split("_")) and value:
            yield f"config: {name} is {value}"


def faults_of_resumed(drawn: Drawn, place: Place, checkpoint: Path, output: Path) -> list[str]:
    """Interrupt the same run before its second layer, continue it, and compare the bytes."""
    import pytest

    from oneshot.compression import LayerCompressor

    original, again = LayerCompressor.compress_layer, output.parent / "again"
    command = place.command(drawn, checkpoint, again, drawn.options)

    def interrupted(self: LayerCompressor, index: int, *rest: Any) -> Any:
        if index >= 1:
            raise KeyboardInterrupt
        return original(self, index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCompressor, "compress_layer", interrupted)
        first = call(command)
    if first.code != 130:
        return []
    second = call([*command, "--resume"])
    if second.code:
        return [f"resume: {second.message} {second.faults}"]
    names = [
        path.name for path in output.iterdir() if path.suffix in (".safetensors", ".gguf") or path.name == "config.json"
    ]
    different = [name for name in names if (output / name).read_bytes() != (again / name).read_bytes()]
    return [f"resume: {different} differ"] if different else []


def main(first: int, stop: int) -> None:
    """Run the seeds from the first one up to `stop`, and print a line of JSON for each."""
    import tempfile
    import time

    import oneshot.report.page
    from oneshot.cli.options import silence_libraries

    silence_libraries()
    torch.set_num_threads(1)
    oneshot.report.page.find_spec = lambda _: None  # type: ignore[attr-defined,assignment]  # no plots
    with tempfile.TemporaryDirectory(prefix="oneshot-drawn-") as folder:
        place = Place(Path(folder))
        for seed in range(first, stop):
            drawn, start = draw(seed), time.process_time()
            try:
                outcome = check_run(drawn, place)
            except Exception:
                outcome = Outcome(1, "", [f"drawn: {traceback.format_exc()[-1500:]}"])
            record = {"seed": seed, "model": drawn.name, "options": drawn.options, "stored": drawn.stored}
            record |= {"code": outcome.code, "message": outcome.message, "faults": outcome.faults}
            record |= {"compared": outcome.compared, "seconds": round(time.process_time() - start, 2)}
            record |= {
                "changed": {
                    key: str(value)
                    for key, value in drawn.model.items()
                    if value is not models()[drawn.name][1].get(key)
                }
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
