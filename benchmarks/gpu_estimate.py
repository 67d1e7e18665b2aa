"""Estimate seconds and memory of runs on GPUs that are not here, into `results/gpu_estimate.jsonl`.

Models are described by their configs, and cards by their rates and memory. The rest is what `--dry-run` computes: the
same formulas and the same bounds. Rows of the first run on a GPU have what was measured there beside what the model
says of that commit. `--card-gib 24 --host-gib 64 --model 70B` prints one plan instead.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Row, read_rows

from oneshot import Config
from oneshot.checkpoint import Checkpoint, Model, identify
from oneshot.errors import MemoryLimitError
from oneshot.export import FORMS
from oneshot.families import find_family
from oneshot.footprint import describe_work
from oneshot.footprint.bounds import Bounds, predict_footprint
from oneshot.footprint.rates import Rates
from oneshot.footprint.seconds import predicted_phases
from oneshot.footprint.work import Work, tensor_bytes
from oneshot.machine import Machine, Workers
from oneshot.planning import make_plan, parameter_budget
from oneshot.report.records import Footprint
from oneshot.schedule import make_schedule

GIB = 2**30
HELD_BYTES = 700 * 2**20  # of Python, torch and its CUDA libraries
DEVICE_SHARE = 0.9
SHARED = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
SIZES = {
    "1.1B": (2048, 5632, 22, 32, 4, 32000),
    "7B": (4096, 11008, 32, 32, 32, 32000),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "70B": (8192, 28672, 80, 64, 8, 128256),
}


KIMI_K2 = "Kimi-K2's sizes"  # its model type kimi_k2 is not known here; its layers are deepseek_v3's

# what models of a class have in common; the rest below, as their config.json on the Hub states it
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 40960,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-06,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": QWEN3_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "Qwen3-235B-A22B": QWEN3_MOE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "DeepSeek-V3": DEEPSEEK_V3
    | {
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
    },
    KIMI_K2: DEEPSEEK_V3
    | {
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 131072,
    },
}
MIXTURE_CARDS = {"Qwen3-30B-A3B": ("H100", "RTX 4090", "CPU"), "DeepSeek-V3": ("H100", "H200")}
SMOLLM2 = "SmolLM2-135M"
SMALL = {SMOLLM2: (576, 1536, 30, 9, 3, 49152)}
TIED = {"1.1B", SMOLLM2}  # embedding and output head
MEASURED = "H100"
SHARED_BY = (1, 4, 8)  # processes, each with a card
SHARED_ON_CPU = (1, 2, 4)  # processes of one thread
RUNS_ON_CPU = dict.fromkeys((SMOLLM2, "7B"), ("per-layer", "per-layer, self"))
SHARED_RUNS = {
    "70B": ("stock", "per-layer"),
    "Qwen3-235B-A22B": ("neurons", "neurons, per-layer"),
    KIMI_K2: ("neurons", "neurons, per-layer"),
}


@dataclass(frozen=True)
class Card:
    """A GPU's memory, and rates that large products reach there."""

    memory: int
    rates: Rates


PIVOT_SECONDS = 6.5e-6  # of one kernel in a graph: 6.9 at 4,096 columns and 6.3 at 11,008, on an H100
# the H100's are measured; the H200's are those with more bandwidth, the RTX 4090's 70 per cent of its maker's
CARDS = {
    "H100": Card(
        81559 * 2**20,
        Rates(499e12, 499e12, 50.4e12, 61.2e12, pivot_seconds=PIVOT_SECONDS, bandwidth=2.76e12, link=54.9e9),
    ),
    "H200": Card(
        141 * 10**9,
        Rates(499e12, 499e12, 50.4e12, 61.2e12, pivot_seconds=PIVOT_SECONDS, bandwidth=3.9e12, link=54.9e9),
    ),
    "RTX 4090": Card(
        24 * GIB,
        Rates(120e12, 120e12, 50e12, 1.1e12, pivot_seconds=PIVOT_SECONDS, bandwidth=0.85e12, link=20e9),
    ),
}
# no card: round numbers of a server's CPU
CPU, CPU_RATES = "CPU", Rates(1e12, 1e12, 0.5e12, 0.5e12, pivoted=50e9)
# Commit 2449bf0, on the H100: 15 launches for a pivot, and at the end the host read, hashed and wrote all parts again.
FIRST_PIVOT_SECONDS = 165e-6
FIRST_BYTES_PER_SECOND = 0.62e9
FIRST_RUN = "first compression"  # the section of its rows in gpu.jsonl
RUNS: dict[str, dict[str, Any]] = {
    "stock": {"form": "stock"},
    "per-layer": {"form": "per-layer"},
    "per-layer, self": {"form": "per-layer", "calibration": "builtin+self"},
}


# 32 tokens for each neuron of an expert of mean load of Qwen3-30B-A3B
MIXTURE_RUNS: dict[str, dict[str, Any]] = {
    "neurons": {"num_sequences": 192},
    "neurons, per-layer": {"num_sequences": 192, "form": "per-layer"},
    "96 of 128 experts": {
        "num_sequences": 192,
        "experts": "effects",
        "num_experts": 96,
        "ffn": "none",
        "sparsity": None,
    },
}
# sequences of 2,048 tokens that pass together; a device starts every operation of an expert for each of such batches
BATCHES = {"Qwen3-30B-A3B": {"batch_size": 16}, "Qwen3-235B-A22B": {"batch_size": 8}}


class Described(Checkpoint):
    """A checkpoint that is only described: names, sizes and dtypes without files."""

    def __init__(self, name: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder = Path(name)
        sizes = MIXTURES.get(name) or dict(zip(NAMES, (SIZES | SMALL)[name], strict=True))
        self.config = SHARED | sizes | {"tie_word_embeddings": name in TIED}
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config))
            states = find_family(self.config).layers_to_files(model.state_dict()).items()
        unstored = {"lm_head.weight"} if name in TIED else set()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in states if name not in unstored}
        self.dtypes = dict.fromkeys(self.shapes, "BF16")
        self._stored_names = {}


def described_work(
    model: Model, memory: int | None, changes: dict[str, Any], *, processes: int = 1
) -> tuple[Config, Work]:
    """Return the config and the work of a run on cards with so much memory, one for each process; None: on a CPU."""
    usual: dict[str, Any] = {"sparsity": 0.2, "form": "stock", "calibration": "builtin"}
    options = usual | {"num_sequences": 128, "sequence_length": 2048} | changes
    options |= {"device": "cpu"} if memory is None else {"device": "cuda", "max_device_memory_bytes": memory}
    config = Config.of("described", "out", **options)
    grid = FORMS[config.form].grid(model)
    method = grid.settle(config.method, config.target)
    plan = make_plan(grid, method, config.target, budget=parameter_budget(config.target, model.shape.stack()))
    schedule = make_schedule(method, plan, grid, num_tokens=config.text.num_tokens, has_profile=False)
    device = torch.device("cpu") if memory is None else torch.device("cuda", 0)
    machine = Machine(device, torch.bfloat16, Path(), Workers(size=processes), batch_size=config.machine.batch_size)
    return config, describe_work(config, model, method, grid, schedule, plan, machine)


def footprint_of(config: Config, work: Work, memory: int | None, host: int | None) -> Footprint:
    """Return what a run takes of a card (None: there is none) and a host (None: as much as it likes).

    Raises `MemoryLimitError` if it does not fit.
    """
    allowed = 2**50 if host is None else host
    bounds = Bounds(HELD_BYTES, 0, allowed, True, 0, 0, round(DEVICE_SHARE * (memory or 0)), True, scratch_free=2**50)
    return predict_footprint(work, bounds, config.machine, result_bytes=0, measure_time=False)


def in_groups(work: Work, footprint: Footprint) -> Work:
    """Return the work with as many experts together as the memory of the footprint holds."""
    return replace(work, machine=replace(work.machine, experts_together=footprint.experts_together))


def estimate(name: str, model: Model, card: str, run: str, *, processes: int = 1) -> dict[str, Any]:
    """Return the row of a model, a card for each process or a CPU, and a run."""
    memory, rates = (None, CPU_RATES) if card == CPU else (CARDS[card].memory, CARDS[card].rates)
    changes = (RUNS | MIXTURE_RUNS)[run] | BATCHES.get(name, {})
    config, work = described_work(model, memory, changes, processes=processes)
    row: dict[str, Any] = {"model": name, "card": card, "run": run, "tokens": work.num_tokens, "rates": asdict(rates)}
    row["batch_size"] = config.machine.batch_size
    try:
        footprint = footprint_of(config, work, memory, None)
    except MemoryLimitError as error:
        return row | {"fits": False, "reason": str(error)}
    phases = predicted_phases(in_groups(work, footprint), rates, footprint.store)
    total = sum(sum(seconds.values()) for seconds in phases.values())
    memory_of: Row = {
        "device_bytes": footprint.device_bytes,
        "device_stage": footprint.device_stage,
        "host_bytes": footprint.host_bytes,
        "scratch_bytes": footprint.scratch_bytes,
        "store": footprint.store,
    }
    if name in MIXTURES:
        memory_of["expert_groups"] = footprint.expert_groups
    return row | {"fits": True, "phases": phases, "total": total, "documents": work.documents_together, **memory_of}


def first_run(model: Model, measured: Row) -> Row:
    """Return the row of a compression of the first commit that ran on a GPU: predicted stages beside measured ones."""
    card, run = CARDS[MEASURED], measured["form"]
    config, work = described_work(model, card.memory, RUNS[run])
    rates = replace(card.rates, pivot_seconds=FIRST_PIVOT_SECONDS)
    phases = predicted_phases(work, rates, footprint_of(config, work, card.memory, None).store)
    phases["write"] = {"read, hashed and written again": measured["predicted"]["result_bytes"] / FIRST_BYTES_PER_SECOND}
    total = sum(sum(seconds.values()) for seconds in phases.values())
    return {
        **{"model": measured["model"], "card": MEASURED, "run": run, "commit": measured["commit"]},
        **{"rates": asdict(rates), "phases": phases, "total": total},
        **{"measured": measured["seconds"], "measured_total": measured["wall_seconds"]},
    }


def print_plan(name: str, card_gib: float, host_gib: float) -> int:
    """Print whether a model fits a card and a host, and how."""
    model = identify(Described(name))
    for run, changes in (MIXTURE_RUNS if name in MIXTURES else RUNS).items():
        config, work = described_work(model, round(card_gib * GIB), changes | BATCHES.get(name, {}))
        try:
            found = footprint_of(config, work, round(card_gib * GIB), round(host_gib * GIB))
        except MemoryLimitError as error:
            print(f"{run}: {error}")
            continue
        print(
            f"{run}: fits; device {found.device_bytes / GIB:.1f} GiB ({found.device_stage}), host "
            f"{found.host_bytes / GIB:.1f} GiB ({found.host_stage}), activations on {found.store}, scratch "
            f"{found.scratch_bytes / GIB:.1f} GiB, {found.expert_groups} groups of experts"
        )
    return 0


def main() -> int:
    """Write all rows anew, or print one plan."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", choices=[*SIZES, *MIXTURES], default="70B")
    options.add_argument("--card-gib", type=float)
    options.add_argument("--host-gib", type=float, default=64)
    arguments = options.parse_args()
    if arguments.card_gib:
        return print_plan(arguments.model, arguments.card_gib, arguments.host_gib)
    models = {name: identify(Described(name)) for name in SIZES}
    cards = {name: list(CARDS) if name not in TIED else [MEASURED] for name in SIZES}
    rows = [estimate(name, model, card, run) for name, model in models.items() for card in cards[name] for run in RUNS]
    for name in MIXTURE_CARDS:
        model = identify(Described(name))
        runs = [run for run in MIXTURE_RUNS if run.startswith("neurons") or name == "Qwen3-30B-A3B"]
        rows += [estimate(name, model, card, run) for card in MIXTURE_CARDS[name] for run in runs]
    for name, runs in SHARED_RUNS.items():
        model = identify(Described(name))
        rows += [
            estimate(name, model, MEASURED, run, processes=count)
            | {"processes": count, "model_bytes": sum(tensor_bytes(model.checkpoint).values())}
            for run in runs
            for count in SHARED_BY
        ]
    for name, runs in RUNS_ON_CPU.items():
        model = identify(Described(name))
        counted = [(run, count) for run in runs for count in SHARED_ON_CPU]
        rows += [estimate(name, model, CPU, run, processes=count) | {"processes": count} for run, count in counted]
    rows += [first_run(models[row["model"]], row) for row in read_rows("gpu") if row["section"] == FIRST_RUN]
    (RESULTS / "gpu_estimate.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
