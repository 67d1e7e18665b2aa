"""Evaluation against transformers' own loss, exact counts, and what the command line prints and writes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model
from safetensors.torch import load_file
from strategies import TOLERANCES

from oneshot import compress
from oneshot.evaluate import evaluate, load_windows, main, measure_latency, perplexity

OPTIONS: dict[str, Any] = {"sequence_length": 32, "max_windows": 6, "device": "cpu", "dtype": "float32"}


@torch.no_grad()
def reference_perplexity(model: Any, windows: torch.Tensor) -> float:
    """From transformers' own loss, window by window, in float64."""
    losses = [float(model(window.unsqueeze(0), labels=window.unsqueeze(0)).loss) for window in windows]
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("options", [{}, {"family": "mistral", "sliding_window": 8}, {"mlp_bias": True, "tied": True}])
def test_perplexity_equals_transformers_loss(batch_size: int, options: dict[str, Any]) -> None:
    model = build_model(**options)
    windows = torch.randint(0, 400, (5, 24))
    value, scored = perplexity(model, windows, batch_size=batch_size)
    assert value == pytest.approx(reference_perplexity(model, windows), rel=TOLERANCES["perplexity"])
    assert scored == 5 * 23


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity() -> None:
    model = build_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert perplexity(model, torch.randint(0, 400, (2, 10)))[0] == pytest.approx(400, rel=1e-5)


def test_windows_are_the_text_in_order(text_file: Path, tokenizer: Any) -> None:
    windows = load_windows(str(text_file), tokenizer, sequence_length=20, max_windows=3)
    tokens = tokenizer(text_file.read_text())["input_ids"]
    assert windows.tolist() == [tokens[start : start + 20] for start in (0, 20, 40)]
    everything = load_windows(str(text_file), tokenizer, sequence_length=20, max_windows=None)
    assert len(everything) in (len(tokens) // 20, len(tokens) // 20 + 1)


def test_numbers_of_two_models_side_by_side(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    other_text_file: Path,
    tokenizer: Any,
) -> None:
    folder = make_checkpoint()
    config = make_config(folder)
    report = compress(config)
    texts = [str(text_file), str(other_text_file)]
    results = evaluate([config.output, str(folder)], texts, decode_tokens=0, **OPTIONS)
    from transformers import AutoModelForCausalLM

    for result, path, name in zip(results, (Path(config.output), folder), ("compressed", "dense"), strict=True):
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        for text in texts:
            windows = load_windows(text, tokenizer, sequence_length=32, max_windows=6)
            assert result.perplexity[text] == pytest.approx(reference_perplexity(model, windows), rel=1e-4)
            assert result.tokens_scored[text] == 6 * 31
        files = sorted(path.glob("*.safetensors"))
        assert result.stored_parameters == sum(tensor.numel() for file in files for tensor in load_file(file).values())
        assert result.file_bytes == sum(file.stat().st_size for file in files)
        assert result.block_parameters == sum(parameter.numel() for parameter in model.model.layers.parameters())
        assert result.stored_parameters == report.stored_parameters[name]
        assert result.flops_per_token == report.flops_per_token[name]
        assert result.kv_bytes_per_token == report.kv_bytes_per_token[name]
        assert result.prefill_seconds is None
    assert results[0].perplexity != results[1].perplexity


def test_latency_is_measured_with_a_growing_cache() -> None:
    """Every decoded token is one forward pass over one token, with the cache of all before it."""
    model = build_model()
    lengths: list[tuple[int, int]] = []

    def watch(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = named.get("past_key_values")
        lengths.append((positional[0].shape[1], 0 if cache is None else int(cache.get_seq_length())))

    model.register_forward_pre_hook(watch, with_kwargs=True)
    ((prefill, decode),) = measure_latency([model], torch.ones(1, 20).long(), decode_tokens=3, rounds=2)
    assert prefill > 0
    assert decode > 0
    assert lengths == [(20, 0), (1, 20), (1, 21), (1, 22)] * 3


def test_the_command_line_prints_a_table_and_writes_json(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(make_checkpoint())
    compress(config)
    target = tmp_path / "numbers.json"
    arguments = [config.output, f"--baseline={config.checkpoint}", f"--text={text_file}", f"--output={target}"]
    arguments += ["--sequence-length=32", "--max-windows=4", "--decode-tokens=2", "--prefill-tokens=16", "--device=cpu"]
    assert main(arguments) == 0
    written = json.loads(target.read_text())
    assert [row["checkpoint"] for row in written] == [config.output, config.checkpoint]
    assert all(row["prefill_seconds"] > 0 and row["decode_seconds"] > 0 for row in written)
    printed = capsys.readouterr().out
    for part in ("stored parameters", "perplexity text.txt (124", "ratio", f"{written[0]['stored_parameters']:,}"):
        assert part in printed


def test_two_gguf_files_of_the_same_name_are_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are converted into one scratch folder; the second must not be taken for the first."""
    from oneshot import source

    seen = []

    def remember(path: Path, **_: Any) -> Any:
        seen.append(path)
        raise ValueError("enough")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", remember)
    scratch = tmp_path / "scratch"
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"GGUF")
    converted = scratch / "model"
    converted.mkdir(parents=True)
    (converted / "config.json").write_text("{}")
    with pytest.raises(source.CheckpointError, match="enough"):
        source.resolve_checkpoint(str(tmp_path / "second" / "model.gguf"), scratch)
    assert seen == [tmp_path / "second"]
