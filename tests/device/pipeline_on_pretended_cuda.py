"""Whole runs on the pretended device; prints a JSON line for each: kernels, waits and bytes by stage, and the error.

PYTHONPATH=.:kernels:tests:tests/device python tests/device/pipeline_on_pretended_cuda.py [NAME …] [--table]
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers' threads would not know of the pretended device
    os.environ.pop("ONESHOT_KERNELS", None)

import torch
from factories import build_model, tiny_tokenizer, topics
from oneshot_kernels.pivoted_qr import torch_panel
from pretend_cuda import Log, pretend
from torch.utils._python_dispatch import _disable_current_modes

import oneshot.footprint.bounds
import oneshot.run.run
import oneshot.text.self_written
from oneshot import Config, Report
from oneshot.errors import MemoryLimitError
from oneshot.footprint.rates import Rates
from oneshot.pipeline import compress
from oneshot.profiling import measure_curvature


def on_host(model: Any, text: Any, machine: Any, **options: Any) -> Any:
    """Measure output curvature on the host: torch's backward passes need the streams of a real device."""
    return measure_curvature(model, text, replace(machine, device=torch.device("cpu"), store="host"), **options)


take_pivots_in_torch_ = torch_panel.take_pivots_


def take_pivots_(panel: Any) -> None:
    """Take the pivots of a panel all at once: a GPU has one kernel of Triton a pivot, without waits.

    `kernels_on_pretended_cuda.py` takes them by torch's many small kernels, which were half of the time here.
    """
    on_host = {name: getattr(value, "host", value) for name, value in vars(panel).items()}
    with _disable_current_modes():
        take_pivots_in_torch_(SimpleNamespace(**on_host, width=panel.width))


ATTEMPTS = 4  # at a run whose bounds leave kilobytes
SLACK_BYTES = 16 * 2**10  # of the many small tensors, beside which tiny models are no more than they


def prepare_package() -> None:
    """Replace what this process cannot do or wait for; the tests of other processes keep the package as it is."""
    oneshot.run.run.measure_curvature = on_host
    torch_panel.take_pivots_ = take_pivots_
    oneshot.footprint.bounds.DEVICE_SLACK_BYTES = SLACK_BYTES
    oneshot.text.self_written.DOCUMENT_TOKENS = 16  # every token is a pass through the model
    oneshot.footprint.bounds.measure_rates = lambda *_: Rates(1.0, 1.0, 1.0, 1.0)  # nothing says how fast a device is


# The stage of a line of the project, by the longest beginning of its path that is listed.
STAGES = {
    "oneshot/checkpoint/stock.py": "forward",
    "kernels/oneshot_kernels/gram": "sums",
    "kernels/oneshot_kernels/count_sketch": "sums",
    "oneshot/compression/statistics.py": "sums",
    "oneshot/compression/overflow.py": "sums",
    "kernels/oneshot_kernels/pivoted_qr": "selection",
    "oneshot/selection": "selection",
    "oneshot/linalg/pivoted_qr.py": "selection",
    "oneshot/linalg/elimination.py": "selection",
    "oneshot/compression/curvature.py": "curvature",
    "oneshot/profiling/curvature.py": "curvature",
    "oneshot/compression/correction.py": "correction",
    "oneshot/compression/inner_heads.py": "inside heads",
    "oneshot/compression/layer_reports.py": "correction",
    "oneshot/compression/one_writer.py": "correction",
    "oneshot/compression/ranks.py": "ranks",
    "oneshot/compression/sublayer.py": "correction",
    "oneshot/compression/up_proj.py": "up_proj",
    "oneshot/compression/fold.py": "fold",
    "oneshot/compression/layer.py": "fold",
    "oneshot/compression/layer_folder.py": "fold",
    "oneshot/compression/tasks.py": "correction",
    "oneshot/compression/subspaces.py": "hidden size",
    "oneshot/compression/embedding.py": "embedding",
    "oneshot/linalg/pca.py": "hidden size",
    "oneshot/linalg/low_rank.py": "inside heads",
    "oneshot/linalg/conjugate_gradients.py": "up_proj",
    "oneshot/linalg": "correction",
    "oneshot/stream": "forward",
    "oneshot/machine": "upload",
    "oneshot/profiling": "profile",
    "oneshot/text": "text",
    "oneshot/export": "write",
    "oneshot/checkpoint": "write",
    "oneshot/report": "write",
    "oneshot/footprint": "prediction",
}

SIZES: dict[str, Any] = {"num_sequences": 16, "sequence_length": 32, "batch_size": 8, "sparsity": 0.2}
NARROW = {"moe_intermediate_size": 32}
GLM = NARROW | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "wide": {"width": 128},
    "deep": {"layers": 3},
    "tied": {"tied": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "no groups": {"groups": 4},
    "opt": {"family": "opt"},
    "qwen3": {"family": "qwen3", "tied": True, "head_dim": 8},
    "mistral": {"family": "mistral", "sliding_window": 8},
    "mixture": {"family": "qwen3_moe", "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, **NARROW},
    "twice the experts": {"family": "qwen3_moe", "head_dim": 8, "num_experts": 16, "num_experts_per_tok": 4, **NARROW},
    "shared experts": {"family": "glm4_moe", "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, **GLM},
    "norms inside": {"family": "gemma3_text", "head_dim": 8},
    "hybrid": {"family": "lfm2", "layer_types": ["conv", "full_attention"]},
    "large": {"hidden": 96, "width": 384, "heads": 6, "groups": 3, "vocabulary": 2048, "tied": True},
}
PER_LAYER = {"form": "per-layer", "embedding": "none"}
WHOLE = {"ranks": "none"}
LONG = {"sequence_length": 128, "batch_size": 4}
ENOUGH = {"num_sequences": 32}  # 16 tokens for each neuron; with fewer held-out tokens choose how much is corrected

# name -> (model, options)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "oneshot": ("llama", ENOUGH),
    "oneshot, twice the neurons": ("wide", {"num_sequences": 64}),
    "oneshot, twice the batches": ("llama", {"num_sequences": 64}),
    "oneshot, twice the tokens": ("llama", ENOUGH | {"sequence_length": 64}),
    "oneshot, a layer more": ("deep", ENOUGH),
    "oneshot, little text": ("llama", {}),
    "oneshot, biases": ("biased", {"dtype": "float32"}),
    "oneshot, qwen3": ("qwen3", {}),
    "oneshot, a window": ("mistral", {}),
    "per-layer": ("llama", PER_LAYER | WHOLE),
    "per-layer, twice the neurons": ("wide", PER_LAYER | WHOLE | {"num_sequences": 32}),
    "per-layer, twice the batches": ("llama", PER_LAYER | WHOLE | {"num_sequences": 32}),
    "per-layer, a layer more": ("deep", PER_LAYER | WHOLE),
    "ranks": ("llama", PER_LAYER),
    "ranks, a layer more": ("deep", PER_LAYER),
    "ranks, biases": ("biased", PER_LAYER | {"dtype": "float32"}),
    "ranks, large": ("large", PER_LAYER | {"num_sequences": 8, **LONG}),
    "ranks, no curvature": ("llama", PER_LAYER | {"curvature": "none"}),
    "per-layer, embedding": ("tied", PER_LAYER | {"embedding": "low-rank", "num_sequences": 8}),
    "per-layer, embedding beside a head": ("llama", PER_LAYER | {"embedding": "low-rank", "num_sequences": 8}),
    "per-layer, heads": ("llama", PER_LAYER | {"heads": "id"}),
    "per-layer, depth": ("llama", PER_LAYER | {"depth": "sensitivity"}),
    "per-layer, latency": ("llama", PER_LAYER | {"budget": "latency", "sparsity": 0.0}),
    "up_proj": ("llama", {"up_steps": 3}),
    "held-out damping": ("llama", {"damping": "auto"}),
    "own text": ("llama", {"calibration": "self", "num_sequences": 2, "sequence_length": 8}),
    "activations on the host": ("llama", {"max_device_memory_bytes": "host"}),
    "activations on disk": (
        "llama",
        {"max_device_memory_bytes": "host", "max_memory_bytes": "disk", "num_sequences": 256, "batch_size": 64},
    ),
    "recipe flap": ("biased", {"recipe": "flap"}),
    "recipe tcsp, corrected": ("llama", {"recipe": "tcsp", "correction": "two-stream", "sparsity": 0.3}),
    "recipe group-pca": ("llama", {"recipe": "group-pca", "shared_weight": 0.1}),
    "recipe magnitude": ("llama", {"recipe": "magnitude"}),
    **{f"heads {each}": ("llama", {"heads": each}) for each in ("id", "obs", "flap")},
    "heads id, whole groups": ("llama", {"heads": "id", "head_unit": "kv-group"}),
    **{f"ffn {each}": ("llama", {"ffn": each}) for each in ("obs", "wanda")},
    "sketch, qr": ("llama", {"sketch": "sparse-sign", "pivoting": "qr"}),
    "sketch, tournament": ("llama", {"sketch": "count", "pivoting": "tournament", "pivot_group_size": 16}),
    "gram, grouped": ("llama", {"pivoting": "grouped", "pivot_group_size": 16}),
    "same-layer": ("llama", {"correction": "same-layer"}),
    "smaller values": ("llama", PER_LAYER | {"value_size": 6}),
    "smaller queries and keys": ("llama", PER_LAYER | {"query_key_size": 4}),
    "smaller queries and keys, opt": ("opt", PER_LAYER | {"query_key_size": 4}),
    "planned sizes inside heads": ("llama", PER_LAYER | {"inner_sizes": "sensitivity"}),
    "experts": ("mixture", {"sequence_length": 128}),  # more tokens for each expert than neurons
    "twice the experts": ("twice the experts", {"sequence_length": 128}),
    "whole experts": ("shared experts", {"experts": "reap", "num_experts": 3, "sparsity": 0.3}),
    "experts by a profile": ("mixture", PER_LAYER | {"experts": "effects", "sparsity": 0.3}),
    "norms inside": ("norms inside", PER_LAYER | {"num_sequences": 8}),
    "hybrid": ("hybrid", PER_LAYER | {"num_sequences": 8}),
    "large": ("large", {"num_sequences": 16, **LONG}),  # two streams
    "large, flap": ("large", {"recipe": "flap", "num_sequences": 8, **LONG}),
    "large, stat": ("large", {"recipe": "stat", "sketch_size": 300, "num_sequences": 8, **LONG}),
    "large, tcsp": ("large", {"recipe": "tcsp", "num_sequences": 8, **LONG}),
}


def stage_of(site: str) -> str:
    """Return the stage of a "file:line …" of the log."""
    return next((stage for path, stage in STAGES.items() if site.startswith(path)), "other")


def by_stage(counts: Counter[str]) -> dict[str, int]:
    """Return counts summed over the lines of each stage."""
    total: Counter[str] = Counter()
    for site, count in counts.items():
        total[stage_of(site)] += count
    return dict(total)


def make_models(folder: Path, names: Iterable[str]) -> None:
    """Save the models in bfloat16, and a text."""
    (folder / "text.txt").write_text(topics(0, 10)[:10_000])
    for name in sorted(set(names)):
        build_model(dtype=torch.bfloat16, **MODELS[name]).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)


def config_of(name: str, folder: Path) -> Config:
    """Return the config of a run."""
    model, changes = RUNS[name]
    options = {"calibration": str(folder / "text.txt"), "device": "cuda"} | SIZES | _form(changes) | changes
    if options.get("max_device_memory_bytes") == "host":
        options |= _tight(name, folder)
    if changes.keys() & {"value_size", "query_key_size"}:
        del options["sparsity"]
    return Config.of(str(folder / model), str(folder / f"{name}.out"), **options)


def _form(changes: dict[str, Any]) -> dict[str, str]:
    """Return the stock form if a run states neither another one nor a recipe."""
    return {} if changes.keys() & {"form", "recipe"} else {"form": "stock"}


def _tight(name: str, folder: Path) -> dict[str, int]:
    """Return bounds that let activations stay on no device (and not in host memory either, for the disk)."""
    from oneshot.pipeline import predict

    model, changes = RUNS[name]
    gc.collect()  # what an earlier run left must not be freed between both predictions
    free = {key: value for key, value in changes.items() if not key.startswith("max_")}
    base = {"calibration": str(folder / "text.txt"), "device": "cuda"} | SIZES | _form(free) | free
    with torch.no_grad():
        loose = predict(Config.of(str(folder / model), str(folder / "none"), **base))
    found = {"max_device_memory_bytes": loose.device_bytes - 1}
    if "max_memory_bytes" in changes:
        found["max_memory_bytes"] = loose.host_bytes + 3 * 2**17  # half of the activations
    return found


def _compressed(name: str, folder: Path, log: Log) -> Report:
    """Return the report of a run; it starts again where this process has grown beyond tight bounds meanwhile."""
    for attempts_left in range(ATTEMPTS)[::-1]:
        config = config_of(name, folder)
        log.reset()
        try:
            return compress(config)
        except MemoryLimitError:
            if not attempts_left:
                raise
    raise AssertionError("there is a first attempt")


def run(name: str, folder: Path, log: Log) -> dict[str, Any]:
    """Return what a run did, or the error that ended it."""
    found: dict[str, Any] = {"name": name}
    log.reset()
    started = time.perf_counter()
    try:
        report = _compressed(name, folder, log)
    except Exception as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "wt-gpu" in frame.filename or "oneshot" in frame.filename
        ]
        lines = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[::-1][:5])
        return found | {"error": f"{type(error).__name__}: {str(error)[:300]} @ {lines}"}
    assert report.footprint is not None
    return found | {
        "error": "",
        "seconds": round(time.perf_counter() - started, 2),
        "store": report.footprint.store,
        "layers": len(report.layers),
        "kernels": by_stage(log.kernels),
        "waits": by_stage(log.waits),
        "waits_by_line": dict(log.waits),
        "converted_on_host": dict(log.converted_on_host),
        "by_chance": dict(log.by_chance),
        "by_magma": dict(log.by_magma),
        "linalg_library": log.linalg_library,
        "to_device_bytes": by_stage(log.to_device_bytes),
        "from_device_bytes": by_stage(log.from_device_bytes),
        "peak_bytes": log.peak_bytes,
        "peak_site": log.peak_site,
        "predicted_bytes": report.footprint.device_bytes,
        "predicted_stage": report.footprint.device_stage,
        "live_bytes": log.live_bytes,
        "errors": [asdict(each) for each in report.layers[0].sublayers],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the counts as a table: kernels and waits by stage, numbers converted on the host, peak over prediction."""
    lines = [f"{'run':34} {'kernels':>8} {'waits':>6} {'converted':>10} {'peak':>6}  waits by stage"]
    for row in rows:
        if row["error"]:
            lines.append(f"{row['name']:34} {row['error']}")
            continue
        stages = ", ".join(f"{stage} {count}" for stage, count in sorted(row["waits"].items()))
        lines.append(
            f"{row['name']:34} {sum(row['kernels'].values()):8} {sum(row['waits'].values()):6} "
            f"{sum(row['converted_on_host'].values()):10} {row['peak_bytes'] / row['predicted_bytes']:6.2f}  {stages}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run everything, or the named runs."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*")
    options.add_argument("--table", action="store_true")
    arguments = options.parse_args()
    names = arguments.names or list(RUNS)
    torch.set_num_threads(1)
    prepare_package()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        make_models(Path(scratch), (RUNS[name][0] for name in names))
        with pretend() as log:
            for name in names:
                rows.append(run(name, Path(scratch), log))
                if not arguments.table:
                    print(json.dumps(rows[-1]), flush=True)
    if arguments.table:
        print(table(rows))


if __name__ == "__main__":
    sys.exit(main())
