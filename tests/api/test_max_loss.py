"""`--max-loss`: the size that a profile predicts, and once more by what the check of the result has measured."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig, small_config
from families.cases import CASES
from safetensors.torch import load_file

import oneshot
from oneshot import Config, Report
from oneshot.cli.compress import main
from oneshot.config import Target
from oneshot.errors import ConfigError, PlanError
from oneshot.job import Job
from oneshot.max_loss import compress_within
from oneshot.parsing import parse_share
from oneshot.pipeline import compress, predict
from oneshot.planning.predicted import LOST_FOR_PREDICTED, with_share
from oneshot.report.additions import add_check
from oneshot.report.card import CARD_NAME, PAGE_NAME, REPORT_NAME
from oneshot.report.records import Check
from oneshot.report.summary import summary
from oneshot.settings import read_recipe, recipe_text

MODEL: dict[str, Any] = {"layers": 3}
OPTIONS: dict[str, Any] = {"form": "per-layer", "round_to": 1, "embedding": "none"}


def measuring(*lost: float) -> tuple[Callable[[Config, Report], Report], list[Report]]:
    """Return a check that finds these losses in nats, one for every result, and the reports that it got."""
    reports: list[Report] = []

    def check(config: Config, report: Report) -> Report:
        reports.append(report)
        ratio = math.exp(lost[len(reports) - 1])
        kinds = {kind: {"dense": 2.0, "compressed": 2.0 * ratio} for kind in ("prose", "code")}
        return add_check(Path(config.output), report, Check(kinds=kinds))

    return check, reports


@pytest.fixture(scope="module")
def loss_of_a_fifth(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> float:
    """The loss that the profile predicts for a fifth of the parameters."""
    output = tmp_path_factory.mktemp("first") / "out"
    config = small_config(make_checkpoint(**MODEL), text_file, output=output, **OPTIONS)
    divergence = compress(config).predicted_divergence
    assert divergence is not None
    return math.expm1(LOST_FOR_PREDICTED * divergence["plan"])


@pytest.fixture
def asked(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, loss_of_a_fifth: float) -> Config:
    return make_config(make_checkpoint(**MODEL), sparsity=None, max_loss=loss_of_a_fifth, **OPTIONS)


def tensors(output: str) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in load_file(Path(output) / "model.safetensors").items()}


def share_of(report: Report) -> float:
    return 1 - report.stored_parameters["compressed"] / report.stored_parameters["dense"]


def test_the_size_is_the_smallest_whose_predicted_loss_is_allowed(asked: Config) -> None:
    allowed = math.log1p(asked.target.max_loss or 0)
    check, reports = measuring(0.9 * allowed)
    report = compress_within(asked, check)
    assert len(reports) == 1
    assert report.predicted_divergence is not None
    assert LOST_FOR_PREDICTED * report.predicted_divergence["plan"] <= allowed * (1 + 1e-9)
    found = round(share_of(report) * 200) / 200  # the steps of shares
    assert found >= 0.19, "which the fixture has found to be allowed"
    same = replace(asked, output=f"{asked.output}-same", target=with_share(asked.target, found))
    compress(same)
    assert tensors(asked.output) == tensors(same.output)
    more = replace(asked, output=f"{asked.output}-more", target=with_share(asked.target, found + 0.005))
    divergence = compress(more).predicted_divergence
    assert divergence is not None
    assert LOST_FOR_PREDICTED * divergence["plan"] > allowed


@pytest.mark.parametrize(("factor", "is_corrected"), [(3.0, True), (0.6, False), (0.2, True)])
def test_a_second_size_follows_what_was_measured(factor: float, is_corrected: bool, asked: Config) -> None:
    allowed = math.log1p(asked.target.max_loss or 0)
    check, reports = measuring(factor * allowed, 0.9 * allowed)
    report = compress_within(asked, check)
    assert len(reports) == 1 + is_corrected
    first = reports[0].predicted_divergence
    assert first is not None
    if is_corrected:
        scale = max(factor, 0.25) * allowed / first["plan"]
        assert report.config["target"]["loss_scale"] == pytest.approx(scale)
        assert report.predicted_divergence is not None
        assert scale * report.predicted_divergence["plan"] <= allowed * (1 + 1e-9)
        assert (share_of(report) < share_of(reports[0])) == (factor > 1)
    assert Report.from_dict(json.loads((Path(asked.output) / REPORT_NAME).read_text())).check


@pytest.mark.parametrize(("lost", "said"), [(None, "could not be judged"), (3.0, "was allowed"), (0.99, None)])
def test_a_limit_that_is_not_met_is_in_the_report_and_on_the_card(
    lost: float | None, said: str | None, asked: Config, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = math.log1p(asked.target.max_loss or 0)

    def check(config: Config, report: Report) -> Report:
        kinds = {} if lost is None else {"prose": {"dense": 2.0, "compressed": 2.0 * math.exp(lost * allowed)}}
        return add_check(
            Path(config.output), report, Check(kinds=kinds, skipped="" if kinds else "llama.cpp opens it.")
        )

    report, folder = compress_within(asked, check), Path(asked.output)
    texts = (
        caplog.text,
        "".join(report.all_warnings),
        (folder / CARD_NAME).read_text(),
        (folder / PAGE_NAME).read_text(),
    )
    for text in texts:
        assert ("could not be judged" in text) == (said == "could not be judged")
        assert ("for a smaller --max-loss" in text) == (said == "was allowed")
    assert Report.read(folder / REPORT_NAME).unmet_limit == report.unmet_limit


def test_it_continues_wherever_it_ended(asked: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = math.log1p(asked.target.max_loss or 0)
    whole = replace(asked, output=f"{asked.output}-whole")
    expected = compress_within(whole, measuring(2 * allowed, allowed)[0])
    check, _ = measuring(2 * allowed, allowed)
    step = oneshot.max_loss.compress_job
    calls = []

    def ends_in_the_second(*given: Any) -> Report:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return step(*given)

    with monkeypatch.context() as patch:
        patch.setattr("oneshot.max_loss.compress_job", ends_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            compress_within(asked, check)
    again = replace(asked, resume=True)
    second, reports = measuring(allowed)
    report = compress_within(again, second)
    assert len(reports) == 1, "the first result has its check"
    assert report.config["target"] == expected.config["target"]
    assert tensors(asked.output) == tensors(whole.output)
    finished, reports = measuring()
    assert compress_within(again, finished).check == report.check
    assert not reports


def test_what_cannot_be_judged_is_refused(
    asked: Config, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="leaves out"):
        compress(asked)
    with pytest.raises(ConfigError, match="planned by a profile"):
        predict(replace(asked, form="stock"))
    with pytest.raises(PlanError, match=r"--max-loss 1e-07% is allowed"):
        compress_within(replace(asked, target=replace(asked.target, max_loss=1e-9)), measuring()[0])
    assert not Path(asked.output).exists()
    with pytest.raises(ConfigError, match="exactly one target"):
        make_config(Path(asked.checkpoint), max_loss="5%", sparsity=0.1)
    for words, what in ((["--max-loss=much"], "not a share"), (["--max-loss=5%", "--no-check"], "--no-check")):
        assert main([asked.checkpoint, f"--output={tmp_path / 'out'}", *words]) == 1
        assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "options", "remedy"),
    [
        ("llama", {"form": "stock"}, "none; leave out --form, --recipe and choices of the method, or ask for a size."),
        ("phi3", {"serve": "engine=llama.cpp"}, "none; leave out engine=llama.cpp of --serve, --form, --recipe and "),
        ("modernbert", {}, "this run makes none; ask for a size."),
    ],
)
def test_what_makes_a_run_planned_by_a_profile_is_advised(
    family: str, options: dict[str, Any], remedy: str, make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path
) -> None:
    options = {"form": "auto", "sparsity": None, "max_loss": 0.05} | options
    folder = make_checkpoint(**{"family": family} | CASES[family].options)
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        predict(small_config(folder, text_file, output=tmp_path / "out", **options))


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), (" 12.5 % ", 0.125), ("150%", 1.5)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "5%%", "5% x", "five"])
def test_other_words_are_no_shares(text: str) -> None:
    with pytest.raises(ConfigError, match="not a share"):
        parse_share(text)


@pytest.mark.parametrize("text", ["5", "1", "20.0"])
def test_a_share_without_its_sign_is_asked_for(text: str) -> None:
    """Refuse what would remove nearly all if it is meant in per cent."""
    with pytest.raises(ConfigError, match=f"write {text}%, or "):
        parse_share(text)


def test_from_python_the_result_is_checked(asked: Config) -> None:
    report = oneshot.compress(asked.checkpoint, f"{asked.output}-python", max_loss=9.0, **python_options(asked)).report
    assert report.check is not None
    assert report.check.lost_nats is not None
    assert report.config["target"]["max_loss"] == 9.0
    rise = math.expm1(report.check.lost_nats)
    text = summary(report, weights=(None, None), check=report.check, source="a model")
    assert f"perplexity {rise:+.1%} over the kinds of text, 900% was allowed" in text


def python_options(config: Config) -> dict[str, Any]:
    return OPTIONS | {
        "calibration": config.text.calibration,
        "num_sequences": config.text.num_sequences,
        "sequence_length": config.text.sequence_length,
        "dtype": "float32",
        "progress": False,
    }


@pytest.mark.parametrize(("option", "is_kept"), [("output", True), ("max_loss", False), ("checkpoint", False)])
def test_what_a_run_has_measured_is_not_another_runs(option: str, is_kept: bool, asked: Config, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(replace(asked, target=replace(asked.target, loss_scale=0.5))))
    assert ("loss_scale" in read_recipe(path, {option: "other"})) == is_kept


@pytest.mark.parametrize("stated", [None, 0.7])
def test_a_resumed_run_has_no_others_scale(
    stated: float | None, asked: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its output is a result of the same target, but of other options; or its recipe states a scale."""
    config = replace(asked, target=replace(asked.target, loss_scale=stated), overwrite=True, resume=True)
    if stated is None:
        shutil.copytree(asked.checkpoint, asked.output)
        told = {"config": {"target": {"max_loss": asked.target.max_loss, "loss_scale": 0.5}}}
        (Path(asked.output) / REPORT_NAME).write_text(json.dumps(told))
    started = []

    def ends(job: Job) -> Report:
        started.append(job.config.target.loss_scale)
        raise KeyboardInterrupt

    monkeypatch.setattr("oneshot.max_loss.compress_job", ends)
    with pytest.raises(KeyboardInterrupt):
        compress_within(config, measuring()[0])
    assert started == [stated]


def test_a_measured_scale_has_no_other_target() -> None:
    with pytest.raises(ConfigError, match="is of --max-loss"):
        Target(sparsity=0.2, loss_scale=0.5)


@pytest.mark.parametrize(
    ("family", "serve", "form"),
    [
        ("deepseek_v3", None, "per-layer"),
        ("qwen3_next", None, "per-layer"),
        ("bert", None, "per-layer"),
        ("llama", "engine=sglang", "nemotron-nas"),
        ("llama", "engine=llama.cpp", "gguf"),
    ],
)
def test_the_form_is_one_that_a_profile_plans(
    family: str, serve: str | None, form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    width = {"width": 512} if form == "nemotron-nas" else {}  # other engines round its widths up to multiples of 256
    folder = make_checkpoint(**CASES[family].options | width)
    config = make_config(folder, sparsity=None, max_loss="50%", form="auto", serve=serve)
    assert predict(config).form == form


def test_every_process_reads_the_text_of_a_finished_run(tmp_path: Path) -> None:
    """Reading it is shared work, which must not happen inside what the first process does alone."""
    order: list[str] = []

    class Finished(SimpleNamespace):
        @property
        def fingerprint(self) -> dict[str, Any]:
            order.append("fingerprint")
            return {}

    (tmp_path / REPORT_NAME).write_text("{}")
    workers = SimpleNamespace(share=lambda _root, _alone: order.append("share"))
    run = SimpleNamespace(machine=SimpleNamespace(workers=workers))
    job: Any = Finished(config=SimpleNamespace(resume=True), output=tmp_path, run=run, _finished=lambda: None)
    Job.finished_report(job)
    assert order == ["fingerprint", "share"]
