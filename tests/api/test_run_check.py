"""The end of a run: held-out text, answers before and after, and a summary; bounded, or with the reason."""

import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from oneshot import Config, Report
from oneshot.api.check import _together, quick_check, weight_bytes
from oneshot.checkpoint import locate_checkpoint
from oneshot.cli.main import main
from oneshot.errors import CheckpointError
from oneshot.evaluation import perplexity
from oneshot.footprint.check import ANSWER_TOKENS
from oneshot.pipeline import compress
from oneshot.report.additions import add_check
from oneshot.report.card import QUALITY, REPORT_NAME
from oneshot.report.records import Check
from oneshot.report.sharing import without_local_paths
from oneshot.report.summary import summary
from oneshot.report.words import CUT, LANGUAGES, far_kind, verdict
from oneshot.text import load_text, load_tokenizer
from oneshot.text.kinds import CHECKED as KINDS_FILE
from oneshot.text.languages import KNOWN, languages

NAME_COLUMNS = 14  # of a line of the summary


@pytest.fixture
def run(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> tuple[Config, Report]:
    config = make_config(make_checkpoint(), num_sequences=40)
    return config, compress(config)


def test_the_check_is_the_perplexity_on_text_that_the_run_did_not_read(run: tuple[Config, Report]) -> None:
    config, report = run
    steps: list[str] = []
    check = quick_check(config, report, question="Who are you?", step=steps.append)
    assert (check.question, steps) == ("Who are you?", ["checking the original", "checking the result"])
    options = {"sequence_length": 32, "seed": config.seed}
    tokenizer = load_tokenizer(Path(config.checkpoint))
    ids = load_text(config.text.calibration, tokenizer, num_sequences=42, **options).token_ids
    assert torch.equal(ids[:40], calibration_tokens(config))
    assert (check.source, check.tokens, check.skipped) == (config.text.calibration, 2 * 32, "")
    for name, folder in (("dense", config.checkpoint), ("compressed", config.output)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        assert check.perplexity is not None
        assert check.perplexity[name] == pytest.approx(perplexity(model, ids[40:])[0], rel=1e-4)
        for row in map(json.loads, KINDS_FILE.read_text().splitlines()):
            text = tokenizer(row["text"], return_tensors="pt")["input_ids"][0, : 384 // 32 * 32].view(-1, 32)
            loss = model(text, labels=text).loss  # of windows of one length: the mean over all
            assert check.kinds[row["kind"]][name] == pytest.approx(float(loss.exp()), rel=1e-4)
        chat = [{"role": "user", "content": check.question}]
        inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True, add_generation_prompt=True)
        written = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        ids_written = written[0, inputs["input_ids"].shape[1] :]
        answer = tokenizer.decode(ids_written, skip_special_tokens=True).strip()
        is_cut = len(ids_written) == ANSWER_TOKENS and ids_written[-1] != tokenizer.eos_token_id
        assert check.answers[name] == (answer + CUT if is_cut and answer else answer)
        assert is_cut


def test_without_more_text_there_are_only_answers(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("A few words about very little. " * 40)
    config = make_config(make_checkpoint(), calibration=f"{short}+{short}", num_sequences=1000)
    check = quick_check(config, compress(config))
    assert check.perplexity is None
    assert check.skipped == ""
    assert check.answers.keys() == {"dense", "compressed"}
    assert check.kinds.keys() == {"prose", "dialogue", "code", "mathematics", LANGUAGES}
    assert list(check.ratios.values()) == sorted(check.ratios.values())


def test_languages_that_the_original_knows_are_a_kind_of_text(run: tuple[Config, Report]) -> None:
    """A model of random weights loses as much as a passage has tokens, so some languages count as known."""
    config, report = run
    check = quick_check(config, report)
    tokenizer, known, nats = load_tokenizer(Path(config.checkpoint)), dict[str, int](), dict[str, dict[str, float]]()
    for name, folder in (("dense", config.checkpoint), ("compressed", config.output)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        nats[name] = {}
        for one in languages():
            ids = tokenizer(one.passage, return_tensors="pt")["input_ids"]
            if ids.shape[1] <= model.config.max_position_embeddings:
                known[one.name] = ids.shape[1] - 1
                with torch.no_grad():
                    nats[name][one.name] = float(model(ids, labels=ids).loss) * known[one.name]
    limit = KNOWN * nats["dense"]["English"]
    spoken = [name for name, lost in nats["dense"].items() if name != "English" and lost <= limit]
    assert 0 < len(spoken) < len(languages()) - 1
    for name, lost in nats.items():
        mean = sum(lost[language] for language in spoken) / sum(known[language] for language in spoken)
        assert check.kinds[LANGUAGES][name] == pytest.approx(math.exp(mean), rel=1e-4)


def test_a_gguf_input_is_not_converted_again(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress(make_config(make_checkpoint(tied=True), form="gguf", sparsity=0, output=tmp_path / "file"))
    config = make_config(tmp_path / "file" / "model.gguf", num_sequences=40)
    report = compress(config)
    converted = locate_checkpoint(config.checkpoint, tmp_path)
    monkeypatch.setattr("oneshot.checkpoint.locate.convert_gguf", lambda *_: pytest.fail("it is converted again"))
    check = quick_check(config, report)
    ids = load_text(config.text.calibration, load_tokenizer(converted), num_sequences=42, sequence_length=32, seed=0)
    model: Any = AutoModelForCausalLM.from_pretrained(converted)
    assert check.perplexity is not None
    assert check.perplexity["dense"] == pytest.approx(perplexity(model, ids.token_ids[40:])[0], rel=1e-6)


def fits(line: str) -> bool:
    """Return whether a line has at most 80 columns, or a path that no line can hold beside the line's name."""
    return len(line) <= 80 or max(map(len, line.split())) > 80 - NAME_COLUMNS


def test_a_check_that_does_not_fit_or_is_not_possible_has_a_reason(
    run: tuple[Config, Report], make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    config, report = run
    (Path(config.output) / "config.json").unlink()
    assert "not possible" in quick_check(config, report).skipped
    encoder = make_config(
        make_checkpoint(family="bert", model_class="BertForMaskedLM"), sparsity=0.1, output=tmp_path / "encoder"
    )
    assert "write text" in quick_check(encoder, compress(encoder)).skipped
    bounded = make_config(make_checkpoint(), output=tmp_path / "bounded")
    report = compress(bounded)
    small = Config.from_dict(bounded.to_dict() | {"machine": bounded.to_dict()["machine"] | {"max_memory_bytes": 1}})
    assert "because it loads the whole original and needs" in quick_check(small, report).skipped


@pytest.mark.parametrize(
    ("model_class", "head", "reason"),
    [
        ("LlamaForCausalLM", 1e30, "which has no perplexity"),  # its exponential is beyond float64
        ("LlamaModel", 1.0, "the original's config states no such class"),  # so its class leaves the head out
    ],
)
def test_models_without_a_perplexity_have_a_reason(
    model_class: str, head: float, reason: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_checkpoint(), tmp_path / "odd"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][7] *= head
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"architectures": [model_class]}))
    config = make_config(folder, num_sequences=40)
    assert reason in quick_check(config, compress(config)).skipped


def test_a_head_that_is_not_stored_is_told(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """As embedding models are stored: under names without prefix, with a config of the class that predicts tokens."""
    folder = Path(shutil.copytree(make_checkpoint(), tmp_path / "odd"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    warnings = compress(make_config(folder, sparsity=0)).warnings
    assert any("has no output head, although config.json states LlamaForCausalLM" in warning for warning in warnings)


def test_the_command_ends_with_a_summary_and_the_card_has_the_quality(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = make_checkpoint(), tmp_path / "out"
    options = ["--num-sequences=4", "--sequence-length=16", "--device=cpu", "--dtype=float32"]
    command = ["compress", str(folder), "--sparsity=0.2", f"--calibration={text_file}", *options]
    assert main([*command, "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    names = [line[:NAME_COLUMNS].strip() for line in printed.splitlines() if line[0] != " "]
    assert names == ["result", "parameters", "form", "weight files", "time", "quality", "by kind", "asked", *names[8:]]
    assert names[8:10] == ["before", "after"]
    assert names[-1] == "next"
    assert "warning" in names, "16 tokens are too few"
    assert all(map(fits, printed.splitlines()))
    card = (output / "README.md").read_text()
    assert QUALITY not in card
    assert "tokens of `text.txt` that the run did not read" in card
    assert re.search(r"By kind of text, .*, and worst [a-z]+ × \d", card)
    assert re.search(r"<p>By kind of text, .*, and worst [a-z]+ × \d", (output / "report.html").read_text())
    assert "Warning of the run: 64 calibration tokens are few" in card
    assert "AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True" in card
    report = Report.from_dict(json.loads((output / "oneshot_report.json").read_text()))
    assert report.check is not None
    assert report.check.perplexity is not None
    assert f"{report.check.perplexity['dense']:.2f} before" in card
    assert report.check.source == str(text_file)
    assert report.footprint is not None
    assert report.check.peak_bytes <= min(report.peak_bytes, report.footprint.check_bytes)
    assert report.seconds["total"] > report.seconds["check"] == report.check.seconds > 0
    shared = without_local_paths(report).check
    assert shared is not None
    assert shared.source == text_file.name
    assert main([*command, "-o", str(tmp_path / "quick"), "--no-check", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "error by layer" in printed
    assert "\nasked " not in printed
    assert QUALITY in (tmp_path / "quick" / "README.md").read_text()
    assert json.loads((output / "oneshot_report.json").read_text())["fingerprint"]


@pytest.mark.parametrize(
    ("ratios", "is_far"),
    [
        ({"prose": 1.08, "dialogue": 1.10, "mathematics": 1.12, "code": 2.68}, True),
        ({"prose": 1.05, "dialogue": 1.06, "code": 1.24}, False),  # a kind that hardly loses
        ({"prose": 1.30, "dialogue": 1.35, "code": 1.60}, False),  # all lose alike
        ({"prose": 0.98, "code": 1.25}, True),
        ({"code": 9.0}, False),
    ],
)
def test_a_kind_that_loses_far_more_than_the_others_is_a_warning(ratios: dict[str, float], is_far: bool) -> None:
    assert (far_kind(ratios) is not None) == is_far


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), 1e6])
def test_passages_without_a_perplexity_are_refused_as_other_text_is(lost: float) -> None:
    with pytest.raises(CheckpointError, match="which has no perplexity"):
        _together({"German": 1.0, "Polish": lost}, {"German": [1, 2], "Polish": [3, 4]})


def test_lost_languages_have_a_remedy_of_their_own() -> None:
    warning = far_kind({"prose": 1.03, "code": 1.06, LANGUAGES: 2.91})
    assert warning is not None
    assert warning.startswith("Text in other languages loses far more than the others (× 2.91")
    assert "add text in those that you use" in warning


def test_the_kind_that_loses_most_is_told_everywhere(run: tuple[Config, Report]) -> None:
    config, report = run
    kinds = {"prose": {"dense": 2.0, "compressed": 2.2}, "code": {"dense": 2.0, "compressed": 5.0}}
    report = add_check(Path(config.output), report, Check(skipped="There is no text.", kinds=kinds))
    [warning] = (one for one in report.all_warnings if "code" in one)
    assert "(× 2.50, where their mean is × 1.10)" in warning
    assert "add text of this kind" in warning
    text = summary(report, weights=(None, None), check=report.check, source="a model")
    assert "prose × 1.10, and worst code × 2.50" in text
    assert warning in " ".join(text.split())
    card = (Path(config.output) / "README.md").read_text()
    assert QUALITY not in card, "also without held-out text"
    assert warning in card
    assert warning in (Path(config.output) / "report.html").read_text()


def test_the_summary_of_long_names_and_answers_fits(run: tuple[Config, Report]) -> None:
    _, report = run
    check = Check("a b.txt", 10, {"dense": 2.0, "compressed": 3.0}, "Why?", {"dense": "word " * 99, "compressed": ""})
    text = summary(report, weights=(None, 5), check=check, source="a model")
    assert all(map(fits, text.splitlines()))
    assert "× 1.50" in text
    assert f"\n{' ' * NAME_COLUMNS}{verdict(1.5)[:20]}" in text
    assert "\nafter         (nothing)\n" in text
    assert "oneshot chat" in text
    few, again = "few tokens", "(also in"
    report = replace(report, warnings=(few, "another"))
    texts = [summary(report, weights=(None, 5), check=None, source="a model", told=told) for told in ([], [few])]
    assert [(few in text, "another" in text, again in text) for text in texts] == [
        (True, True, False),
        (False, True, True),
    ]
    assert "--baseline 'a model'" in " ".join(text.split())
    assert "weight files" not in text
    report.config["save_dtype"] = "bfloat16"
    text = summary(report, weights=(98_400_000, 216_000_000), check=None, source="a model")
    assert "weight files  98 MB → 216 MB, stored as bfloat16\n" in text
    alike = 216 * report.stored_parameters["dense"] / report.stored_parameters["compressed"]
    assert f"same dtype    {alike:.0f} MB → 216 MB" in text, "a quantised input is not the larger file"
    text = summary(report, weights=(1_440_000, 412_000), check=None, source="a model")
    assert "weight files  1.4 MB → 412 KB" in text
    text = summary(report, weights=(None, None), check=None, source="a model", gguf="an out/model.gguf")
    assert "llama-perplexity -m 'an out/model.gguf' -f" in text
    assert "oneshot chat" not in text
    assert "oneshot evaluate" not in text


def test_a_complete_result_is_told_whatever_its_chat_template_does(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that raises, writes nothing, or takes long, for which a stand-in sleeps: exit code 0, and a sentence."""
    folder = Path(shutil.copytree(make_checkpoint(), tmp_path / "model"))
    options = ["--num-sequences=4", "--sequence-length=16", "--device=cpu", "--dtype=float32", "--sparsity=0.2"]
    command = ["compress", str(folder), f"--calibration={text_file}", *options]
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    assert main([*command, "-o", str(tmp_path / "out")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "quality perplexity" in printed
    assert "asked Nothing was asked (The tokenizer's chat template does not take a question (roles must" in printed
    report = Report.from_dict(json.loads((tmp_path / "out" / REPORT_NAME).read_text()))
    config = Config.from_dict(report.config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oneshot.text.bounded.MOST_SECONDS", 0.1)
        patch.setattr(PreTrainedTokenizerBase, "apply_chat_template", lambda *_, **__: time.sleep(0.5))
        check = quick_check(config, report)
    assert check.answers == {}
    assert "takes more than 0.1 seconds" in check.skipped
    (folder / "chat_template.jinja").write_text("{{ '' }}")
    check = quick_check(config, report)
    assert check.perplexity is not None
    assert "writes nothing of a question" in check.skipped
    (folder / "generation_config.json").write_text(json.dumps({"cache_implementation": "of no kind"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    refused = quick_check(config, report).skipped
    assert "The check was not possible" in refused
    assert "does not open" in refused


def test_weight_bytes(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint()
    assert weight_bytes(folder) == (folder / "model.safetensors").stat().st_size
    assert weight_bytes("org/model") is None
