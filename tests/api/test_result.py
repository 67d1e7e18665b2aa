"""`Result`: what it shows, loads, measures and uploads; `oneshot.predict`, `profile` and `evaluate`; progress."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from factories import MakeCheckpoint, build_model, topics
from families.cases import CASES

import oneshot
from oneshot.api.result import push
from oneshot.errors import ConfigError, OutputError

SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_sequences": 8, "sequence_length": 32}
IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def result(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> oneshot.Result:
    """Tests share it and do not write there."""
    return oneshot.compress(
        make_checkpoint(),
        tmp_path_factory.mktemp("result") / "out",
        sparsity=0.2,
        calibration=text_file,
        form="per-layer",
        round_to=1,
        progress=False,
        **SMALL,
    )


def test_a_result_is_five_lines_and_a_table(result: oneshot.Result) -> None:
    lines = repr(result).splitlines()
    assert len(lines) == 5
    stored = result.report.stored_parameters
    assert f"{stored['dense']:,} → {stored['compressed']:,}" in lines[2]
    assert str(result.output) in lines[1]
    assert "form per-layer" in lines[3]
    page = result._repr_html_()
    assert page.count("<tr>") == 4
    assert f"{stored['compressed']:,}" in page


def test_a_result_is_loaded_and_measured(result: oneshot.Result, other_text_file: Path) -> None:
    model = result.load(dtype=torch.float32)
    assert (
        sum(tensor.numel() for tensor in model.state_dict().values()) == result.report.stored_parameters["compressed"]
    )
    assert not model.training
    options: dict[str, Any] = {"sequence_length": 32, "max_windows": 2, "decode_tokens": 0, "device": "cpu"}
    measured, dense = result.evaluate(other_text_file, **options)
    assert measured.stored_parameters == result.report.stored_parameters["compressed"]
    assert dense.stored_parameters == result.report.stored_parameters["dense"]
    logits = model(IDS).logits
    assert logits.shape == (2, 24, 400)


def test_evaluation_takes_texts_and_models_in_memory(
    result: oneshot.Result, make_checkpoint: MakeCheckpoint, tokenizer: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"sequence_length": 32, "max_windows": 2, "decode_tokens": 0, "device": "cpu"}
    text = topics(30, 31)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    from_file = oneshot.evaluate(make_checkpoint(), tmp_path / "text.jsonl", baseline=result.output, **options)
    from_memory = oneshot.evaluate(build_model(), [text], baseline=result.load(), tokenizer=tokenizer, **options)
    for left, right in zip(from_file, from_memory, strict=True):
        assert list(left.perplexity.values()) == list(right.perplexity.values())
        assert list(right.perplexity) == list(right.texts) == ["given-text.jsonl"], "no path of a folder that is gone"
    assert [one.checkpoint for one in from_memory] == ["model/LlamaForCausalLM", "baseline/out"]
    with pytest.raises(oneshot.OneshotError, match="give evaluate the texts"):
        oneshot.evaluate(make_checkpoint(), IDS)


QUICK: dict[str, Any] = {"sequence_length": 32, "max_windows": 1, "decode_tokens": 0, "device": "cpu"}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((dtype, str(dtype)) for dtype in (torch.float32, torch.bfloat16)),
        *(("fp32", "torch.float32"), ("f32", "torch.float32"), ("torch.float32", "torch.float32")),
        *(("float32", "torch.float32"), ("bf16", "torch.bfloat16"), ("auto", "torch.float32")),
    ],
    ids=str,
)
def test_a_dtype_has_the_same_spellings_everywhere(
    given: Any, name: str, result: oneshot.Result, other_text_file: Path
) -> None:
    """As `compress` and the command line take them."""
    assert str(result.load(dtype=given, device=torch.device("cpu")).dtype) == name
    options = QUICK | {"device": torch.device("cpu")}
    [found] = oneshot.evaluate(result.output, other_text_file, dtype=given, **options)
    [expected] = oneshot.evaluate(result.output, other_text_file, dtype=name, **options)
    if given != "auto":
        assert found.perplexity == expected.perplexity
    assert str(oneshot.Config.of("a", sparsity=0.1, dtype=given).machine.dtype) in ("auto", name.removeprefix("torch."))


@pytest.mark.parametrize("given", ["fp16", "half", "float16", torch.float16], ids=str)
def test_a_result_is_loaded_in_a_dtype_that_nothing_is_computed_in(given: Any, result: oneshot.Result) -> None:
    assert result.load(dtype=given).dtype == torch.float16
    with pytest.raises(ConfigError, match=r"dtype='float16' is not one of auto, float32, bfloat16; did you mean"):
        oneshot.evaluate(result.output, dtype=given)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"dtype": "nonsense"}, "dtype='nonsense' is not one of auto, float32"),
        ({"dtype": 3}, "dtype=3 is of the type int"),
        ({"device": 3}, "device=3 is of the type int"),
        ({"device": "nonsense"}, "device='nonsense' is not understood; use cpu, cuda or cuda:1."),
        ({"kind": "nonsense"}, "kind='nonsense' is not one of causal, classification"),
        ({"sequence_length": "64"}, "sequence_length '64' is of the type str; give an integer"),
        ({"sequence_length": 1}, "sequence_length=1 is out of range: give at least 2"),
        ({"max_windows": 1.5}, "max_windows=1.5 is of the type float; give an integer"),
        ({"max_windows": 0}, "max_windows=0 is out of range"),
        ({"decode_tokens": 1.5}, "decode_tokens=1.5 is of the type float"),
        ({"decode_tokens": -1}, "decode_tokens=-1 is out of range"),
        ({"batch_size": "a"}, "batch_size 'a' is of the type str"),
        ({"batch_size": 0}, "batch_size=0 is out of range"),
        ({"tasks": [3]}, "tasks=3 is not the name of a task"),
        ({"tasks": 3}, "tasks=3 is of the type int; give a list of texts"),
        ({"tasks": ""}, "tasks '' is not the name of a task"),
        ({"max_window": 3}, "max_window is not an option of evaluate; did you mean max_windows?"),
    ],
    ids=str,
)
def test_a_wrong_option_of_an_evaluation_is_one_typed_sentence(
    wrong: dict[str, Any], reason: str, result: oneshot.Result, other_text_file: Path
) -> None:
    with pytest.raises(oneshot.OneshotError) as told:
        oneshot.evaluate(result.output, other_text_file, **QUICK | wrong)
    assert reason in str(told.value)
    assert "--" not in str(told.value)


@pytest.mark.parametrize(
    "wrong", [{"dtype": "nonsense"}, {"dtype": "long"}, {"dtype": "double"}, {"device": "nonsense"}], ids=str
)
def test_what_a_result_cannot_be_loaded_with_is_one_typed_sentence(
    wrong: dict[str, str], result: oneshot.Result
) -> None:
    with pytest.raises(oneshot.OneshotError) as told:
        result.load(**wrong)
    [(name, word)] = wrong.items()
    assert str(told.value).startswith(f"{name}='{word}' is not ")
    assert "--" not in str(told.value)


def test_one_task_is_one_name(result: oneshot.Result) -> None:
    options = QUICK | {"limit": 2}
    [found] = oneshot.evaluate(result.output, tasks="oneshot_facts", **options)
    [expected] = oneshot.evaluate(result.output, tasks=["oneshot_facts"], **options)
    assert found.tasks == expected.tasks
    assert found.tasks


@pytest.mark.parametrize(
    ("family", "form", "auto_class"),
    [
        ("llama", "per-layer", "AutoModelForCausalLM"),
        ("llama", "nemotron-nas", "AutoModelForCausalLM"),
        ("gemma2", "per-layer", "AutoModelForCausalLM"),  # in its family's class with other linears
        ("bert", "per-layer", "AutoModel"),
    ],
)
@torch.inference_mode()
def test_a_loaded_result_saves_its_modelling_file(
    family: str, form: str, auto_class: str, make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path
) -> None:
    made = oneshot.compress(
        make_checkpoint(**CASES[family].options),
        tmp_path / "out",
        sparsity=0.1,
        calibration=text_file,
        form=form,
        round_to=1,
        progress=False,
        **SMALL,
    )
    model = made.load()
    model.save_pretrained(tmp_path / "saved")
    again = getattr(transformers, auto_class).from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(again).__name__ == type(model).__name__
    assert type(again) is not type(model), "the file of the folder is run"
    assert torch.equal(again(IDS)[0], model(IDS)[0])


def test_a_gguf_result_says_who_opens_it(make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path) -> None:
    made = oneshot.compress(
        make_checkpoint(), tmp_path / "out", sparsity=0.2, calibration=text_file, form="gguf", progress=False, **SMALL
    )
    with pytest.raises(OutputError, match="GGUF file"):
        made.load()


def test_prediction_and_profile(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = make_checkpoint()
    predicted = oneshot.predict(checkpoint, sparsity=0.2, calibration=text_file, **SMALL)
    assert list(tmp_path.iterdir()) == []
    shown = str(predicted).splitlines()
    assert "per-layer" in shown[1]
    assert f"{predicted.stored_parameters['compressed']:,}" in shown[2]
    assert f"{predicted.host_bytes / 2**30:.2f} GiB" in shown[3]
    profile = oneshot.profile(checkpoint, calibration=text_file, progress=False, **SMALL)
    assert isinstance(profile, oneshot.Profile)
    assert repr(profile).startswith("Profile(2 layers, ")
    assert len(repr(profile)) < 1000
    with pytest.raises(ConfigError, match=r"read from its folder; give the output of oneshot\.profile\(\)"):
        oneshot.predict(checkpoint, sparsity=0.2, profile=profile)
    made = oneshot.compress(
        str(checkpoint),
        sparsity=0.2,
        calibration=text_file,
        form="per-layer",
        profile=tmp_path / f"{checkpoint.name}-profile",
        progress=False,
        **SMALL,
    )
    assert made.output == Path(f"{checkpoint.name}-oneshot-0.20")
    assert made.output.is_dir()
    assert made.report.stored_parameters["dense"] == predicted.stored_parameters["dense"]


def test_progress_is_told(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage is told, counts upwards, and none passes its total; nothing is on stderr."""
    told: list[oneshot.Progress] = []
    oneshot.compress(
        make_checkpoint(),
        tmp_path / "out",
        sparsity=0.2,
        calibration=text_file,
        form="per-layer",
        round_to=1,
        progress=told.append,
        **SMALL,
    )
    stages = list(dict.fromkeys(event.stage for event in told))
    for part in ("opening", "reading the text", "profile", "planning", "layer 1/2", "layer 2/2", "writing"):
        assert any(stage.startswith(part) for stage in stages), part
    assert all(event.total is None or event.done <= event.total for event in told)
    assert next(event.done for event in reversed(told) if event.stage == "layer 2/2") == 2 * 8 * 32
    assert "layer" not in capsys.readouterr().err


class FakeHub:
    """What `push` asks of `HfApi`: it keeps the files that a repository would have."""

    def __init__(self, refuses: bool = False) -> None:
        self.files: dict[str, bytes] = {}
        self.made: dict[str, Any] = {}
        self._refuses = refuses

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> Any:
        if self._refuses:
            raise ValueError("401 Client Error")
        self.made = {"repo_id": repo_id, "private": private, "exist_ok": exist_ok}
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, ignore_patterns: list[str]
    ) -> None:
        assert repo_id == "me/small"
        for path in folder_path.rglob("*"):
            if path.is_file() and path.name not in ignore_patterns:
                self.files[path.relative_to(folder_path).as_posix()] = path.read_bytes()


def test_an_upload_has_every_file_and_no_path_of_this_machine(
    result: oneshot.Result, make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path
) -> None:
    hub = FakeHub()
    push(result.output, result.report, "small", private=True, api=hub)
    assert hub.made == {"repo_id": "small", "private": True, "exist_ok": True}
    assert hub.files.keys() == {path.name for path in result.output.iterdir()}
    assert hub.files["model.safetensors"] == (result.output / "model.safetensors").read_bytes()
    for name, content in hub.files.items():
        for path in (text_file, make_checkpoint(), tmp_path):
            assert str(path.parent).encode() not in content, name
    assert f"calibration: {text_file.name}" in hub.files["recipe.yaml"].decode()
    with pytest.raises(OutputError, match=r"cannot be uploaded to small \(401 Client Error\)"):
        push(result.output, result.report, "small", api=FakeHub(refuses=True))
