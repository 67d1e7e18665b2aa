"""What lies beside the weights: a config that older engines read, and every file that belongs to the input."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from damage import edit_config
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES
from transformers import AutoModelForCausalLM

from oneshot.checkpoint import Checkpoint, stock_config
from oneshot.errors import OutputError
from oneshot.export.older_keys import with_older_keys
from oneshot.pipeline import compress, predict

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FORMS = ["stock", "per-layer", "nemotron-nas", "gguf"]


@pytest.mark.parametrize("positions", [{"rope_type": "default", "rope_theta": 5000.0}, LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("form", FORMS)
def test_older_engines_find_the_positions(
    form: str, positions: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Transformers 4 takes a base of 10000 without `rope_theta`; today's reads the same positions as before."""
    config = make_config(make_checkpoint(layers=1, rope_parameters=positions), form=form, sparsity=0.0)
    compress(config)
    written = json.loads((Path(config.output) / "config.json").read_text())
    assert written["rope_theta"] == positions["rope_theta"]
    scaling = {name: value for name, value in positions.items() if name != "rope_theta"}
    assert written.get("rope_scaling") == (None if positions["rope_type"] == "default" else scaling)
    if form == "stock":
        from transformers import AutoConfig

        assert AutoConfig.from_pretrained(config.output).rope_parameters == positions


PLAIN = {"rope_type": "default", "rope_theta": 777.0}
LINEAR = {"rope_type": "linear", "rope_theta": 777.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 777.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 777.0}
PHI3 = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
WINDOWS = {"rope_type": "default", "rope_theta": 55.0}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
LONG_TEXT = {"max_position_embeddings": 512, "hidden_size": 32, "num_attention_heads": 4}


def of_kinds(full: dict[str, Any], windows: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": windows}


def scaled(rotary: dict[str, Any]) -> dict[str, Any]:
    return {"rope_scaling": {name: value for name, value in rotary.items() if name != "rope_theta"}}


@pytest.mark.parametrize(
    ("model_type", "rotary", "older"),
    [
        ("gemma3_text", of_kinds(PLAIN, WINDOWS), {"rope_theta": 777.0, "rope_local_base_freq": 55.0}),
        (
            "gemma3_text",
            of_kinds(LINEAR, WINDOWS),
            {"rope_theta": 777.0, "rope_local_base_freq": 55.0, **scaled(LINEAR)},
        ),
        ("modernbert", of_kinds(PLAIN, WINDOWS), {"global_rope_theta": 777.0, "local_rope_theta": 55.0}),
        ("modernbert", of_kinds(LINEAR, WINDOWS), {"global_rope_theta": 777.0, "local_rope_theta": 55.0}),
        ("olmo3", of_kinds(YARN, PLAIN), {"rope_theta": 777.0, **scaled(YARN)}),
        ("olmo3", of_kinds(YARN, WINDOWS), {}),  # its older class has one base
        ("gemma4_text", of_kinds(PLAIN, WINDOWS), {}),  # which transformers 4 does not know
        (
            "gpt_neox",
            LINEAR | {"partial_rotary_factor": 0.5},
            {"rotary_emb_base": 777.0, "rotary_pct": 0.5, **scaled(LINEAR)},
        ),
        ("phi", PLAIN | {"partial_rotary_factor": 0.25}, {"rope_theta": 777.0, "partial_rotary_factor": 0.25}),
        ("olmo2", LINEAR, {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
        ("olmo2", YARN, {"rope_theta": 777.0}),  # which its older class cannot have
        ("phi3", LONGROPE, {"rope_theta": 777.0, "rope_scaling": PHI3}),
        ("phi3", LONGROPE | {"original_max_position_embeddings": 256}, {"rope_theta": 777.0, "rope_scaling": PHI3}),
        ("phi3", LONGROPE | {"attention_factor": 1.5}, {"rope_theta": 777.0}),
        ("opt", None, {}),
    ],
)
def test_older_classes_find_the_positions_of_every_layer(
    model_type: str, rotary: dict[str, Any] | None, older: dict[str, Any]
) -> None:
    """The keys are those that classes of transformers 4.57 read; today's class reads what it reads without them."""
    config: dict[str, Any] = {"model_type": model_type, **LONG_TEXT, **LAYERS}
    config |= {} if rotary is None else {"rope_parameters": rotary}
    config |= {"original_max_position_embeddings": 256} if model_type == "phi3" else {}
    written = with_older_keys(copy.deepcopy(config))
    assert written == older | config
    if model_type != "opt":
        found, wanted = (stock_config(each).rope_parameters for each in (written, config))
        assert {name: value for name, value in found.items() if name != "type"} == wanted


def test_the_language_model_of_a_wrapper_has_older_keys() -> None:
    text = {"model_type": "qwen2_vl_text", "rope_parameters": PLAIN | {"mrope_section": [1, 1, 2]}}
    written = with_older_keys({"model_type": "qwen2_vl", "text_config": text})["text_config"]
    assert written["rope_theta"] == 777.0
    assert written["rope_scaling"] == {"rope_type": "default", "mrope_section": [1, 1, 2]}
    nested = {"model_type": "gemma3_text", "rope_parameters": of_kinds(PLAIN, WINDOWS)}
    assert (
        with_older_keys({"model_type": "gemma3", "text_config": nested})["text_config"]["rope_local_base_freq"] == 55.0
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_inputs_config_is_never_changed(
    form: str, own_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers adds keys to nested dictionaries that it is given; a config in the older spelling has such ones."""
    folder = own_checkpoint(rope_parameters=LLAMA3)
    path = folder / "config.json"
    stated = json.loads(path.read_text())
    scaling = stated.pop("rope_parameters")
    theta, scaling["type"] = scaling.pop("rope_theta"), scaling.pop("rope_type")
    path.write_text(json.dumps(stated | {"rope_theta": theta, "rope_scaling": scaling}))
    opened: list[tuple[dict[str, Any], dict[str, Any]]] = []
    plain = Checkpoint.__init__

    def remembering(self: Checkpoint, place: Path) -> None:
        plain(self, place)
        if place == folder:
            opened.append((self.config, copy.deepcopy(self.config)))

    monkeypatch.setattr(Checkpoint, "__init__", remembering)
    compress(make_config(folder, form=form, allocation="uniform"))
    assert opened
    assert all(now == before for now, before in opened)


def test_every_file_of_the_input_is_copied(own_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = own_checkpoint(layers=1)
    further = [
        "additional_chat_templates/tool_use.jinja",
        "NOTICE",
        "NOTICE.txt",
        "LICENSE.md",
        "USE_POLICY.md",
        "tokenizer.model.v3",
        "sentencepiece.bpe.model",
        "cl100k.tiktoken",
        "bpe.codes",
        "special_tokens_map.json",
        "added_tokens.json",
    ]
    for name in further:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    for name in ("weights.bin.index.txt", "train.py", "events.out"):
        (folder / name).write_text("not of the model")
    config = make_config(folder, sparsity=0.0)
    compress(config)
    output = Path(config.output)
    written = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert set(further) <= written
    assert not written & {"weights.bin.index.txt", "train.py", "events.out"}


# Settings of generation, which older checkpoints have in config.json alone

GENERATION: dict[str, dict[str, Any]] = {
    "settings": {
        "max_length": 33,
        "do_sample": True,
        "temperature": 0.2,
        "repetition_penalty": 1.7,
        "num_beams": 3,
        "min_p": 0.1,
        "output_hidden_states": True,
        "bad_words_ids": [[5]],
    },
    "null": {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    "several": {"eos_token_id": [5, 6]},
    "not stated": {"bos_token_id": "removed", "eos_token_id": "removed", "pad_token_id": "removed"},
}


USE: dict[str, Any] = {
    "bos_token_id": 3,
    "eos_token_id": 4,
    "id2label": {"0": "no", "1": "yes"},
    "label2id": {"no": 0, "yes": 1},
    "prefix": "Q: ",
    "problem_type": "regression",
    "sep_token_id": 7,
    "task_specific_params": {"summary": {"max_length": 9}},
    "tokenizer_class": "PreTrainedTokenizerFast",
}


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "stock"),
        ("llama", "per-layer"),
        ("mistral", "nemotron-nas"),
        ("gemma3_text", "per-layer"),
        ("bert", "per-layer"),
    ],
)
def test_what_a_config_says_of_a_models_use_stays(
    family: str, form: str, own_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = own_checkpoint(**CASES[family].options)
    edit_config(folder, **USE)
    compress(make_config(folder, form=form, recipe="magnitude"))
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: stated[name] for name in USE} == USE


@pytest.mark.parametrize(
    ("stated", "family"),
    [
        *((stated, family) for stated in GENERATION for family in ("llama", "qwen2")),
        *(
            (stated, "opt") for stated in GENERATION if stated != "not stated"
        ),  # the form states defaults of other classes
    ],
)
def test_a_result_writes_by_the_inputs_settings(
    stated: str, family: str, own_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = own_checkpoint(family=family, tied=True)
    (folder / "generation_config.json").unlink()
    edit_config(folder, **GENERATION[stated])
    expected = AutoModelForCausalLM.from_pretrained(folder)
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    forms = ["per-layer"] if family == "opt" else ["stock", "per-layer", "nemotron-nas"]
    for form in forms:
        compress(make_config(folder, form=form, sparsity=0.1, output=tmp_path / form))
    if family != "opt":
        compress(make_config(tmp_path / "per-layer", form="per-layer", output=tmp_path / "again"))
        forms.append("again")
    for form in forms:
        found = AutoModelForCausalLM.from_pretrained(tmp_path / form, trust_remote_code=True)
        assert found.generation_config.to_dict() == expected.generation_config.to_dict(), form
        if stated != "not stated" or family == "llama":  # whose defaults the forms have
            assert [getattr(found.config, name) for name in ends] == [getattr(expected.config, name) for name in ends]


# The place of the result


@pytest.mark.parametrize("length", [244, 245, 250, 255])
def test_a_name_that_is_too_long_is_refused_at_the_start(
    length: int, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The folder in which a run works has a longer name; the longest possible one works."""
    config = make_config(make_checkpoint(layers=1), output=str(tmp_path / ("n" * length)), sparsity=0.0)
    if length == 244:
        predict(config)
        return
    for call in (predict, compress):
        with pytest.raises(OutputError, match="cannot be used"):
            call(config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["/proc/out", "/proc/some/out", "file/out", "file/some/out"])
def test_an_impossible_place_is_refused_at_the_start(
    place: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before the text is read; a dry run only tells of it."""
    monkeypatch.setattr("oneshot.run.calibration.load_text", lambda *_, **__: pytest.fail("the run began"))
    (tmp_path / "file").write_text("a file")
    config = make_config(make_checkpoint(layers=1), output=str(tmp_path / place), sparsity=0.1)
    with pytest.raises(OutputError, match="cannot be"):
        compress(config)
    predict(config)
    assert "cannot be" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_place_in_new_folders_is_possible(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(make_checkpoint(layers=1), output=str(tmp_path / "some" / "new" / "out"), sparsity=0.0)
    predict(config)
    assert not list(tmp_path.iterdir())
    compress(config)
    assert Path(config.output).is_dir()
