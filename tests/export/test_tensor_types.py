"""Types per tensor: the file keeps within its bytes, and the damage is the divergence that the rounded model has."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens
from families.cases import CASES

from oneshot.config import Config
from oneshot.errors import ConfigError, PlanError
from oneshot.evaluation import load_model
from oneshot.export import open_folder
from oneshot.export.quantisers import TYPES, bytes_of, quantise, rounded, seconds_of, types_of
from oneshot.export.tensor_types import TYPES_NAME, Priced, chosen_types, damage_of
from oneshot.linalg.allocation import least_damage
from oneshot.pipeline import compress, predict
from oneshot.report.summary import summary

pytest.importorskip("libgguf", reason="the extra `quantise`")
import gguf

OPTIONS: dict[str, Any] = {"form": "gguf", "sparsity": 0.0, "embedding": "none"}
# with a factor behind its embedding, and norms inside the branches
GEMMA3 = {**CASES["gemma3_text"].options, "head_dim": 32, "query_pre_attn_scalar": 32}


def log_probabilities(folder: str, scratch: Path, token_ids: torch.Tensor) -> torch.Tensor:
    model = load_model(open_folder(folder, scratch), device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        return model(token_ids).logits.double().log_softmax(-1)


@pytest.mark.parametrize(
    ("options", "bits"),
    [({"tied": False}, 5.2), ({"tied": True}, 5.2), (GEMMA3, 5.2), ({"hidden": 256, "width": 512}, 3.6)],
    ids=("untied", "tied", "gemma3", "blocks of 256"),
)
def test_the_damage_is_the_divergence_of_the_file(
    options: dict[str, Any],
    bits: float,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    caplog: Any,
) -> None:
    """Half the weighed squares of errors are the divergence from the whole model, which is measured here."""
    folder = make_checkpoint(**{"hidden": 64, "width": 96} | options)
    whole = make_config(folder, output=str(tmp_path / "whole"), **OPTIONS)
    config = make_config(folder, output=str(tmp_path / "small"), bits=bits, **OPTIONS)
    compress(whole)
    with caplog.at_level("INFO", logger="oneshot"):
        compress(config)
    told = float(caplog.text.split("types of the tensors cost ")[1].split(" nats")[0])
    reader = gguf.GGUFReader(Path(config.output) / "model.gguf")
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) == 2]
    assert sum(int(one.n_bytes) for one in matrices) * 8 <= bits * sum(int(one.n_elements) for one in matrices)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in matrices}
    assert len(set(kinds.values())) > 1
    assert any(gguf.GGML_QUANT_SIZES[tensor.tensor_type][0] == 256 for tensor in matrices) == (bits < 4)
    lines = dict(line.split("=") for line in (Path(config.output) / TYPES_NAME).read_text().splitlines())
    chosen = {name: [kind for pattern, kind in lines.items() if re.search(pattern, name)] for name in kinds}
    assert chosen == {name: [kind.lower()] for name, kind in kinds.items()}
    tokens = calibration_tokens(config)
    dense, small = (log_probabilities(each.output, tmp_path / each.output, tokens) for each in (whole, config))
    divergence = float((dense.exp() * (dense - small)).sum(-1).mean())
    assert 0.5 * divergence < told < 2 * divergence


def test_a_file_of_a_size(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = make_checkpoint(hidden=64, width=96)
    config = make_config(folder, gguf_bytes=90_000, **OPTIONS)
    report = compress(config)
    told = summary(report, weights=(200_000, 90_000), check=None, source="a model")
    assert "every matrix in a type of its own" in " ".join(told.split())
    assert "same dtype" not in told
    card = (Path(config.output) / "README.md").read_text()
    assert f"Weights are stored in a quantised type of its own for every matrix (`{TYPES_NAME}`)" in card
    size = (Path(config.output) / "model.gguf").stat().st_size
    assert 80_000 < size <= 90_000
    with pytest.raises(PlanError, match="smallest types of this model"):
        compress(make_config(folder, gguf_bytes=20_000, output=f"{config.output}-2", **OPTIONS))
    assert not Path(f"{config.output}-2").exists()


@pytest.mark.parametrize("name", TYPES)
def test_rounding_is_what_gguf_reads(name: str) -> None:
    """Of every type, by the package gguf; importance makes the errors that it weighs smaller."""
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(4, 512)).astype(np.float32)
    importance = np.exp(2 * generator.normal(size=512))
    stored = quantise(rows, name, importance)
    kind = gguf.GGMLQuantizationType[name]
    assert stored.nbytes == bytes_of(rows.shape, name)
    np.testing.assert_allclose(gguf.quants.dequantize(stored, kind), rounded(rows, name, importance), rtol=1e-5)
    weighed, plain = (((rounded(rows, name, one) - rows) ** 2 @ importance).sum() for one in (importance, None))
    assert weighed <= plain * (1.0 if name != "Q8_0" else 1.01)


def test_rows_that_no_block_divides_stay_whole() -> None:
    assert types_of(576) == ("Q8_0", "Q5_0", "Q4_0", "IQ4_NL")
    assert types_of(1536) == tuple(TYPES)
    assert types_of(100) == ("F16",)


@pytest.mark.parametrize("bits", [3.0, 3.8, 5.0])
def test_a_percent_of_damage_is_given_for_a_percent_of_seconds(bits: float) -> None:
    """Types that are slow on a CPU stay where they save more damage than time."""
    random, shape, weights = np.random.default_rng(0), (64, 256), 12 * 64 * 256
    sizes = np.array([bytes_of(shape, kind) for kind in TYPES], float)
    priced = []
    for number in range(12):
        damages = 4.0 ** -(sizes * 8 / (64 * 256)) * random.uniform(0.5, 20) * random.uniform(0.8, 1.2, len(sizes))
        priced.append(Priced(f"model.layers.{number}.mlp.up_proj", shape, None, None, tuple(TYPES), damages, sizes))
    budget = bits / 8 * weights
    kinds = chosen_types(priced, budget)
    least = least_damage([one.damages for one in priced], [one.bytes for one in priced], budget)
    assert least is not None
    of_least = {one.module: one.kinds[option] for one, option in zip(priced, least, strict=True)}

    def seconds(choice: dict[str, str]) -> float:
        return sum(seconds_of(shape, kind) for kind in choice.values())

    assert sum(bytes_of(shape, kind) for kind in kinds.values()) <= budget
    given = damage_of(priced, kinds) / damage_of(priced, of_least) - 1
    assert 0 <= given <= 1 - seconds(kinds) / seconds(of_least) + 1e-9
    assert seconds(kinds) < seconds(of_least)


def test_seconds_of_types_are_the_measured_ones() -> None:
    """Of the file with this type alone and of the file in F16 that was measured beside it."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "types_speed.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    speeds, measured = [f"{stage}_tokens_per_cpu_second" for stage in ("prefill", "decode")], dict[str, float]()
    for row in rows:
        if row["types"] == "F16":  # the first of a run
            whole = row
        elif row["types"].endswith(" alone"):
            measured[row["types"].removesuffix(" alone")] = sum(whole[speed] / row[speed] for speed in speeds)
    assert {kind: TYPES[kind] for kind in measured} == pytest.approx(measured, abs=0.006)
    assert TYPES.keys() - measured.keys() == {"IQ2_XXS"}
    assert TYPES["IQ2_XXS"] == TYPES["IQ2_S"]


def test_options_that_say_nothing_are_refused() -> None:
    for options, sentence in (
        ({"bits": 4.5}, "add --form gguf"),
        ({"bits": 0.0, "form": "gguf"}, "--bits 0.0 is out of range"),
        ({"bits": 4.5, "gguf_bytes": 9, "form": "gguf"}, "say the same; leave out --bits"),
        ({"bits": 4.5, "form": "gguf", "save_dtype": "q8_0"}, "leave out --save-dtype q8_0"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Config.of("model", sparsity=0.1, **options)


@pytest.mark.parametrize("asked", [{"bits": 16.0}, {"gguf_bytes": 200_000}], ids=("bits", "bytes"))
def test_a_dry_run_predicts_no_more_than_the_largest_types(
    asked: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(hidden=64, width=96), **OPTIONS, **asked)
    predicted = predict(config).result_bytes
    compress(config)
    reader = gguf.GGUFReader(Path(config.output) / "model.gguf")
    assert predicted == sum(int(tensor.n_bytes) for tensor in reader.tensors)


def test_kept_tensors_and_types_for_all_are_refused_together(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(hidden=64, width=96), bits=5.5, keep=("layers.0.*",), **OPTIONS)
    with pytest.raises(ConfigError, match="--keep does not go together with --bits"):
        compress(config)
    assert not Path(config.output).exists()
