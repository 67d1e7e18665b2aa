"""Evaluation against transformers' own loss and SciPy, exact counts, and the output of the command line."""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model
from safetensors.torch import load_file
from scipy.special import log_softmax, rel_entr
from strategies import TOLERANCES
from transformers import AutoConfig

from oneshot.cli.evaluate import main
from oneshot.errors import CheckpointError, ConfigError, OutputError
from oneshot.evaluation import (
    evaluate,
    load_windows,
    measure_latency,
    perplexity,
    print_evaluations,
    relative_score,
    score_windows,
    write_json,
)
from oneshot.evaluation.comparison import text_record
from oneshot.evaluation.scoring import POSITIONS
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer

OPTIONS: dict[str, Any] = {"sequence_length": 32, "max_windows": 6, "device": "cpu", "dtype": "float32"}


@torch.no_grad()
def reference_losses(model: Any, windows: torch.Tensor) -> list[float]:
    """Return transformers' own loss of every window."""
    return [float(model(window.unsqueeze(0), labels=window.unsqueeze(0)).loss) for window in windows]


def reference_perplexity(model: Any, windows: torch.Tensor) -> float:
    """Return the perplexity from transformers' own losses."""
    losses = reference_losses(model, windows)
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("options", [{}, {"family": "mistral", "sliding_window": 8}, {"mlp_bias": True, "tied": True}])
def test_perplexity_equals_transformers_loss(batch_size: int, options: dict[str, Any]) -> None:
    model = build_model(**options)
    windows = torch.randint(0, 400, (5, 24))
    value, scored = perplexity(model, windows, batch_size=batch_size)
    assert value == pytest.approx(reference_perplexity(model, windows), rel=TOLERANCES["perplexity"])
    assert scored == 5 * 23


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    model = build_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert perplexity(model, torch.randint(0, 400, (2, 10)))[0] == pytest.approx(400, rel=1e-5)


@torch.no_grad()
def reference_agreement(model: Any, baseline: Any, windows: torch.Tensor) -> tuple[float, float, float]:
    """Return top-1 agreement, mean KL(baseline ‖ model) and acceptance, by SciPy in float64, in one batch.

    What is accepted is one minus the total variation.
    """
    p, q = (log_softmax(one(windows).logits[:, :-1].double().numpy(), axis=-1) for one in (model, baseline))
    agreement = np.mean(p.argmax(-1) == q.argmax(-1))
    varied = np.abs(np.exp(p) - np.exp(q)).sum(-1).mean() / 2
    return float(agreement), float(rel_entr(np.exp(q), np.exp(p)).sum(-1).mean()), float(1 - varied)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_agreement_equals_scipy(batch_size: int) -> None:
    """Also if a window is longer than the slice of positions that is converted to float32."""
    baseline = build_model(seed=0)
    near = build_model(seed=0)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.005 * torch.randn_like(parameter))
    far = build_model(seed=1)
    windows = torch.randint(0, 400, (4, POSITIONS + 50))
    scores = score_windows([near, far], windows, baseline=baseline, batch_size=batch_size)
    assert len(scores) == 3
    for score, model in zip(scores, (near, far, baseline), strict=True):
        assert score.tokens_scored == 4 * (POSITIONS + 49)
        assert score.perplexity == pytest.approx(reference_perplexity(model, windows), rel=TOLERANCES["perplexity"])
        assert score.window_losses == pytest.approx(reference_losses(model, windows), rel=1e-5)
    for score, model in zip(scores[:2], (near, far), strict=True):
        agreement, divergence, accepted = reference_agreement(model, baseline, windows)
        assert score.acceptance == pytest.approx(accepted, abs=1e-5)
        assert score.top1_agreement == pytest.approx(agreement, abs=2 / score.tokens_scored), "ties by rounding"
        assert score.kl_divergence == pytest.approx(divergence, rel=1e-4)
    assert scores[0].top1_agreement is not None
    assert 0.5 < scores[0].top1_agreement < 1, "the case is neither trivial nor hopeless"
    assert scores[2].top1_agreement is scores[2].kl_divergence is scores[2].acceptance is None


def test_every_model_runs_once_over_a_window() -> None:
    models = [build_model(seed=seed) for seed in range(3)]
    calls: list[int] = []
    for position, model in enumerate(models):
        model.register_forward_pre_hook(lambda *_, position=position: calls.append(position))
    score_windows(models[:2], torch.randint(0, 400, (2, 8)), baseline=models[2])
    assert sorted(calls[:3]) == sorted(calls[3:]) == [0, 1, 2]


def test_logits_of_another_width_have_no_agreement() -> None:
    model = build_model()
    wider = build_model()
    wider.resize_token_embeddings(408)
    (score, _) = score_windows([wider], torch.randint(0, 400, (2, 8)), baseline=model)
    assert score.top1_agreement is score.kl_divergence is None
    assert score.perplexity > 1


def test_score_is_the_geometric_mean_of_ratios() -> None:
    score, worst, ratio = relative_score({"a": 20.0, "b": 90.0}, {"a": 10.0, "b": 20.0})
    assert (score, worst, ratio) == (pytest.approx(3.0), "b", 4.5)


def test_a_model_as_its_own_baseline(make_checkpoint: MakeCheckpoint, text_file: Path, other_text_file: Path) -> None:
    folder = str(make_checkpoint())
    texts = [str(text_file), str(other_text_file)]
    same, dense = evaluate([folder], texts, baseline=folder, decode_tokens=0, **OPTIONS)
    assert same.top1_agreement == dict.fromkeys(texts, 1.0)
    assert same.kl_divergence == dict.fromkeys(texts, 0.0)
    assert same.acceptance == pytest.approx(dict.fromkeys(texts, 1.0))
    assert same.score == same.worst_ratio == pytest.approx(1.0, abs=1e-12)
    assert dense.score is dense.worst_ratio is dense.top1_agreement is dense.kl_divergence is None
    (alone,) = evaluate([folder], texts, decode_tokens=0, **OPTIONS)
    assert alone == dense, "a baseline changes nothing in the other numbers"


def test_a_batch_size_is_of_windows_and_of_requests_of_tasks(
    make_checkpoint: MakeCheckpoint, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    rows: list[int] = []
    forward = LlamaForCausalLM.forward

    def counted(model: Any, input_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        rows.append(len(input_ids))
        return forward(model, input_ids, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    folder, text = str(make_checkpoint()), str(text_file)
    (alone,) = evaluate([folder], [text], decode_tokens=0, **OPTIONS)
    assert set(rows) == {1}
    rows.clear()
    (together,) = evaluate([folder], [text], decode_tokens=0, batch_size=4, **OPTIONS)
    assert rows == [4, 2], "of six windows"
    assert together.perplexity == pytest.approx(alone.perplexity, rel=1e-5)
    rows.clear()
    evaluate([folder], [], decode_tokens=0, batch_size=4, tasks=["builtin"], limit=4)
    assert max(rows) == 4


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
    results = evaluate([config.output], texts, baseline=str(folder), decode_tokens=0, **OPTIONS)
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (config.output, folder)]
    paths, names = (Path(config.output), folder), ("compressed", "dense")
    for result, path, name, model in zip(results, paths, names, models, strict=True):
        for text in texts:
            windows = load_windows(text, tokenizer, sequence_length=32, max_windows=6)
            assert result.perplexity[text] == pytest.approx(reference_perplexity(model, windows), rel=1e-4)
            assert result.tokens_scored[text] == 6 * 31
        files = sorted(path.glob("*.safetensors"))
        assert result.stored_parameters == sum(tensor.numel() for file in files for tensor in load_file(file).values())
        assert result.file_bytes == sum(file.stat().st_size for file in files)
        assert result.layer_parameters == sum(parameter.numel() for parameter in model.model.layers.parameters())
        assert result.stored_parameters == report.stored_parameters[name]
        assert result.flops_per_token == report.flops_per_token[name]
        assert result.kv_bytes_per_token == report.kv_bytes_per_token[name]
        assert result.prefill_seconds is None
    compressed, dense = results
    ratios = [compressed.perplexity[text] / dense.perplexity[text] for text in texts]
    assert ratios[0] != 1
    assert compressed.score == pytest.approx(float(np.exp(np.mean(np.log(ratios)))))
    assert compressed.worst_ratio == max(ratios)
    for text in texts:
        windows = load_windows(text, tokenizer, sequence_length=32, max_windows=6)
        agreement, divergence, accepted = reference_agreement(*models, windows)
        assert compressed.acceptance is not None
        assert compressed.acceptance[text] == pytest.approx(accepted, abs=1e-5)
        assert compressed.top1_agreement is not None
        assert compressed.kl_divergence is not None
        assert compressed.top1_agreement[text] == pytest.approx(agreement, abs=1 / (6 * 31))
        assert compressed.kl_divergence[text] == pytest.approx(divergence, rel=1e-3)


def test_latency_is_measured_with_a_growing_cache() -> None:
    """Every decoded token is one forward pass over one token, with the cache of all tokens before it."""
    model = build_model()
    lengths: list[tuple[int, int]] = []

    def watch(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = named.get("cache", named.get("past_key_values"))
        lengths.append((positional[0].shape[1], 0 if cache is None else int(cache.get_seq_length())))

    model.register_forward_pre_hook(watch, with_kwargs=True)
    ((prefill, decode),) = measure_latency([model], torch.ones(2, 20).long(), decode_tokens=3, rounds=2)
    assert prefill > 0
    assert decode > 0
    assert lengths == [(20, 0), (1, 20), (1, 21), (1, 22)] * 3


def test_the_timed_prefill_is_as_long_as_is_asked_for(
    make_checkpoint: MakeCheckpoint, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the windows of the text are shorter, or there is no text."""
    timed: list[torch.Size] = []

    def measure(models: list[Any], token_ids: torch.Tensor, **_: Any) -> list[tuple[float, float]]:
        timed.append(token_ids.shape)
        return [(1.0, 1.0) for _ in models]

    monkeypatch.setattr("oneshot.evaluation.by_window.measure_latency", measure)
    for texts in ([str(text_file)], []):
        evaluate([str(make_checkpoint())], texts, sequence_length=16, max_windows=1, prefill_tokens=40, device="cpu")
    assert timed == [(1, 40), (1, 40)]


@pytest.mark.parametrize("encoder_first", [True, False])
def test_a_model_that_writes_text_is_not_compared_with_an_encoder(
    encoder_first: bool, make_checkpoint: MakeCheckpoint, text_file: Path
) -> None:
    names = [str(make_checkpoint(family="bert", groups=4, model_class="BertForMaskedLM")), str(make_checkpoint())]
    reason = f"{names[1]} writes text, but {names[0]} does not; give models of one kind"
    first, second = names if encoder_first else reversed(names)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        evaluate([first], [str(text_file)], baseline=second, device="cpu")
    with pytest.raises(ConfigError, match=re.escape(reason)):  # a masked language model sees what it predicts
        evaluate([first, second], [str(text_file)], device="cpu")


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_bound_the_lengths(family: str, make_checkpoint: MakeCheckpoint, text_file: Path) -> None:
    checkpoint = make_checkpoint(family=family)
    positions = AutoConfig.from_pretrained(checkpoint).max_position_embeddings
    options: dict[str, Any] = {"max_windows": 1, "device": "cpu"}
    (found,) = evaluate(
        [str(checkpoint)],
        [str(text_file)],
        sequence_length=positions,
        prefill_tokens=positions - 2,
        decode_tokens=2,
        **options,
    )
    assert found.decode_seconds is not None
    (unstated,) = evaluate([str(checkpoint)], [str(text_file)], sequence_length=positions, **options)
    assert unstated.prefill_seconds is not None  # of fewer than 512 tokens
    with pytest.raises(ConfigError, match=f"--sequence-length {positions + 1} is beyond the {positions} positions"):
        evaluate([str(checkpoint)], [str(text_file)], sequence_length=positions + 1, decode_tokens=0, **options)
    with pytest.raises(ConfigError, match=f"--prefill-tokens {positions} with --decode-tokens 1 is beyond"):
        evaluate([str(checkpoint)], [], prefill_tokens=positions, decode_tokens=1, **options)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_windows_beyond_rotary_positions_are_told(
    family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path, caplog: Any
) -> None:
    """As `compress` tells of them; of every checkpoint, also of one of the per-layer form."""
    checkpoint = make_checkpoint(family=family)
    config = make_config(checkpoint, form="per-layer", sparsity=0.03)
    compress(config)
    positions = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    options: dict[str, Any] = {"max_windows": 1, "decode_tokens": 0, "device": "cpu"}
    caplog.clear()
    evaluate([str(checkpoint), config.output], [str(text_file)], sequence_length=positions, **options)
    assert caplog.text == ""
    evaluate([str(checkpoint), config.output], [str(text_file)], sequence_length=positions + 1, **options)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"--sequence-length {positions + 1} is beyond the {positions} positions that {name} is made for; give a "
        "smaller one."
        for name in (checkpoint, config.output)
    ]


def test_the_command_line_prints_a_table_and_writes_json(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    tokenizer: Any,
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
    rows = written["evaluations"]
    assert [row["checkpoint"] for row in rows] == [config.output, config.checkpoint]
    assert all(row["prefill_seconds"] > 0 and row["decode_seconds"] > 0 for row in rows)
    assert 0 <= rows[0]["top1_agreement"][str(text_file)] < 1
    assert rows[0]["score"] == rows[0]["worst_ratio"], "one text"
    assert rows[1]["score"] is None
    windows = load_windows(str(text_file), tokenizer, sequence_length=32, max_windows=4)
    digest = hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest()
    assert written["texts"] == {str(text_file): {"windows": 4, "tokens": 128, "token_hash": digest}}
    assert set(written) == {"date", "versions", "settings", "texts", "evaluations"}
    assert written["versions"]["torch"] == torch.__version__
    assert written["settings"] | {"baseline": config.checkpoint, "max_windows": 4} == written["settings"]
    assert not list(tmp_path.glob(".*")), "no partial file stays"
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("stored parameters", "perplexity text.txt", "ratio", f"{rows[0]['stored_parameters']:,}"):
        assert part in printed
    for part in ("top-1 agreement", "KL divergence", "worst text", f"× {rows[0]['score']:.2f} on this text"):
        assert part in printed
    assert "Texts begin without BOS, as the tokenizer leaves it out." in printed
    assert [row["bos"] for row in rows] == ["", ""]
    assert f"Added to the report of the result: {config.output}/report.html" in printed
    (kept,) = json.loads((Path(config.output) / "oneshot_report.json").read_text())["evaluations"]
    assert kept["rows"]["stored parameters"] == [[row["stored_parameters"], None] for row in rows]
    assert kept["rows"]["score: perplexity ÷ baseline's, geometric mean"] == [[rows[0]["score"], None], None]
    assert kept["texts"] == {"text.txt": written["texts"][str(text_file)]}
    assert kept["settings"].items() >= {"sequence_length": 32, "max_windows": 4, "decode_tokens": 2}.items()
    assert str(tmp_path) not in json.dumps(kept), "names, and no paths"
    assert list(Path(config.checkpoint).glob("*report*")) == [], "the baseline is no result"


def test_the_bos_of_the_tokenizer_is_said(
    own_checkpoint: MakeCheckpoint,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """transformers reads it in tokenizer.json, and not in tokenizer_config.json; every window has it."""
    folder = own_checkpoint()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True}))
    options: dict[str, Any] = {"sequence_length": 16, "max_windows": 1, "decode_tokens": 0, "device": "cpu"}
    (found,) = evaluate([str(folder)], [str(text_file)], **options)
    assert found.bos == ""
    assert "states add_bos_token true, but transformers reads tokenizer.json, which puts no BOS" in caplog.text
    beginning = load_tokenizer(folder)
    beginning.add_bos_token = True
    beginning.save_pretrained(folder)
    (found,) = evaluate([str(folder)], [str(text_file)], **options)
    print_evaluations([found])
    assert "Texts begin with the BOS <s>, as the tokenizer puts it there." in capsys.readouterr().out
    tokenizer = load_tokenizer(folder)
    windows = load_windows(str(text_file), tokenizer, sequence_length=16, max_windows=1)
    assert windows[0, 0] == tokenizer.bos_token_id
    assert found.texts[str(text_file)].token_hash == text_record(windows).token_hash


def test_an_unwritable_result_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "numbers.json").mkdir()
    with pytest.raises(OutputError, match=r"numbers\.json"):
        write_json(tmp_path / "numbers.json", [], {})
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"]


def test_two_gguf_files_of_the_same_name_are_two_models(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path, tmp_path: Path
) -> None:
    """Both are converted in one scratch folder, and the second is not confused with the first."""
    names = []
    for seed in (0, 1):
        output = tmp_path / str(seed)
        compress(make_config(make_checkpoint(seed=seed, layers=1), form="gguf", sparsity=0, output=str(output)))
        names.append(str(output / "model.gguf"))
    found = evaluate(names, [str(text_file)], decode_tokens=0, **OPTIONS)
    assert [result.file_bytes for result in found] == [Path(name).stat().st_size for name in names]
    assert found[0].perplexity != found[1].perplexity


def test_the_folder_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"give .*model\.gguf itself"):
        evaluate([str(tmp_path)], [])


@pytest.mark.parametrize("text", ["self", "one.txt+builtin"])
def test_texts_of_calibration_alone_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/no/such/model", f"--text={text}"]) == 1
    assert f"--text {text} is for --calibration alone" in capsys.readouterr().err


def test_a_file_may_have_a_plus_in_its_name(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "c++.jsonl").write_text(json.dumps({"said": "one two three " * 99}))
    given = f"{tmp_path / 'c++.jsonl'}:said"
    [found] = evaluate([str(make_checkpoint())], [given], sequence_length=16, max_windows=1, decode_tokens=0)
    assert list(found.perplexity) == [given]
