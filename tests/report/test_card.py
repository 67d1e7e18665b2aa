"""The model card: metadata that the hub reads, inherited from the input's card, and a text without surprises."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from factories import MakeCheckpoint, MakeConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from oneshot import Report
from oneshot.checkpoint import card_metadata
from oneshot.export import FORMS
from oneshot.pipeline import compress
from oneshot.report.card import CODE_NEEDS, model_card, python_usage, task_of
from oneshot.text import load_tokenizer

OURS = {
    "library_name": "transformers",
    "pipeline_tag": "text-generation",
    "tags": ["oneshot", "compressed", "structured-pruning"],
}
OPENING = {"title": "A title", "loading": "It loads.", "usage": "Open it.", "task": "text-generation"}
INPUT_CARD = """---
license: other
license_name: tiny-licence
license_link: https://example.org/licence
language:
- en
- de
datasets:
- org/training-text
base_model: org/ancestor
pipeline_tag: image-classification
tags:
- secret
widget:
- text: hello
---
# Tiny
"""


def front_matter(card: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n# ", card, re.DOTALL)
    assert match is not None
    metadata: dict[str, Any] = yaml.safe_load(match[1])
    return metadata


@pytest.fixture
def report(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> Report:
    return compress(make_config(make_checkpoint(), recipe="magnitude"))


def metadata_for(report: Report, checkpoint: str, source: str | None, inherited: dict[str, Any]) -> dict[str, Any]:
    """Return the card's metadata for this name of the input and this source of the text."""
    calibration = None if source is None else {"source": source, "num_tokens": 512, "token_hash": "c5a8"}
    changed = replace(report, config=report.config | {"checkpoint": checkpoint}, calibration=calibration)
    return front_matter(model_card(changed, inherited, **OPENING))


def test_a_result_inherits_licence_languages_and_data_sets(
    own_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = own_checkpoint()
    (folder / "README.md").write_text(INPUT_CARD)
    report = compress(make_config(folder))
    card = (Path(report.config["output"]) / "README.md").read_text()
    assert front_matter(card) == OURS | {
        "license": "other",
        "license_name": "tiny-licence",
        "license_link": "https://example.org/licence",
        "language": ["en", "de"],
        "datasets": ["org/training-text"],
        "base_model": "org/ancestor",
    }
    assert f"{report.stored_parameters['compressed']:,}" in card
    assert "A stock checkpoint, made smaller" in card
    assert card_metadata(Path(report.config["output"])) == card_metadata(folder)


@pytest.mark.parametrize(
    ("model_type", "model_class", "inner", "auto_class", "task"),
    [
        ("gpt2", "GPT2LMHeadModel", {}, "AutoModelForCausalLM", "text-generation"),
        ("llama", "LlamaModel", {}, "AutoModel", "feature-extraction"),
        ("t5", "T5ForConditionalGeneration", {}, "AutoModelForSeq2SeqLM", "text2text-generation"),
        (
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            {"text_config": {}},
            "AutoModelForImageTextToText",
            "image-text-to-text",
        ),
    ],
)
def test_the_card_names_the_class_that_opens_a_model_type(
    model_type: str, model_class: str, inner: dict[str, Any], auto_class: str, task: str
) -> None:
    config = {"model_type": model_type, "architectures": [model_class], **inner}
    assert task_of(config) == task
    assert f"{auto_class}.from_pretrained(name)" in python_usage(task)
    opened = getattr(transformers, auto_class)._model_mapping
    assert CONFIG_MAPPING[model_type] in opened
    assert opened[CONFIG_MAPPING[model_type]].__name__ == model_class


@pytest.mark.parametrize("form", FORMS)
def test_the_code_of_the_card_opens_the_result(
    form: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a question whether to run code, and without a warning of transformers."""
    checkpoint = make_checkpoint()
    config = make_config(checkpoint, recipe="magnitude", form=form)
    compress(config)
    [code] = re.findall(r"```(?:python)?\n(.*?)```", (Path(config.output) / "README.md").read_text(), re.DOTALL)
    if FORMS[config.form].opened_by == "llama.cpp":
        assert code == "llama-server -m FOLDER/model.gguf\n"
        return
    assert (f"needs transformers {CODE_NEEDS} or later" in code) == ("trust_remote_code" in code) == (form != "stock")
    found: dict[str, Any] = {}
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks something"))
    caplog.clear()
    exec(code.replace('"..."', repr(config.output)), found)
    assert found["model"].config.num_hidden_layers == 2
    wanted = load_tokenizer(checkpoint)("Some text.").input_ids
    assert found["tokenizer"]("Some text.").input_ids == wanted
    assert load_tokenizer(Path(config.output))("Some text.").input_ids == wanted
    assert caplog.text == ""


def test_without_a_card_of_the_input_there_is_only_our_own_metadata(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint()
    assert not (folder / "README.md").exists()
    config = make_config(folder)
    compress(config)
    assert front_matter((Path(config.output) / "README.md").read_text()) == OURS


@pytest.mark.parametrize(
    ("checkpoint", "base_model"),
    [
        ("org/model-1.5B", "org/model-1.5B"),
        ("/models/org/model", None),
        ("./org/model", None),
        ("model.gguf", None),
        ("org/model/part", None),
        ("org/model\nlicense: mit", None),
    ],
)
def test_a_name_on_the_hub_is_the_base_model(checkpoint: str, base_model: str | None, report: Report) -> None:
    expected = OURS if base_model is None else OURS | {"base_model": base_model}
    assert metadata_for(report, checkpoint, None, {}) == expected


def test_a_local_folder_with_the_form_of_a_hub_name_is_no_base_model(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert metadata_for(report, "org/model", "data/text.jsonl", {}) == OURS


@pytest.mark.parametrize(
    ("source", "inherited", "datasets"),
    [
        ("c4", [], ["allenai/c4"]),
        ("c4", "org/a", ["org/a", "allenai/c4"]),
        ("wikitext2+self+builtin", ["org/a"], ["org/a", "Salesforce/wikitext"]),
        ("org/text:config:train:column+c4", [], ["org/text", "allenai/c4"]),
        ("c4+self", ["allenai/c4", "org/a"], ["allenai/c4", "org/a"]),
        ("/data/text.txt", [], None),
        (None, ["org/a"], ["org/a"]),
    ],
)
def test_calibration_texts_of_the_hub_are_among_the_data_sets(
    source: str | None, inherited: Any, datasets: list[str] | None, report: Report
) -> None:
    found = metadata_for(report, "tiny", source, {"datasets": inherited} if inherited else {})
    assert found == (OURS if datasets is None else OURS | {"datasets": datasets})


@pytest.mark.parametrize(
    "card",
    [
        b"",
        b"# A card without metadata\n\nlicense: mit\n",
        b"---\nlicense: mit\n",
        b"---\n- license\n---\n",
        b"---\nlicense: {mit\n---\n",
        b"---\nlicense: !!python/object/apply:os.system [exit]\n---\n",
        b"---\nlicense: \xff\xfe\n---\n",
        b"---\nlicense: " + b"[" * 5000 + b"\n---\n",
        b"---\nlicense: " + b"m" * 2**20 + b"\n---\n",
        b"---\nlicense: "
        + b"m" * 201
        + b"\nlanguage: 3\ndatasets: [[a]]\nlicense_name: {a: b}\nlicense_link: []\n---\n",
        b"---\ndatasets: [" + b"a, " * 101 + b"]\n---\n",
    ],
    ids=lambda card: repr(card[:40]),
)
def test_damaged_cards_and_odd_values_are_ignored(card: bytes, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(card)
    assert card_metadata(tmp_path) == {}


def test_a_card_outside_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (tmp_path / "private.md").write_text(INPUT_CARD)
    (checkpoint / "README.md").symlink_to(tmp_path / "private.md")
    assert card_metadata(checkpoint) == {}


def test_a_card_in_the_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    """Lay the files as the hub's cache does: the card is a link from `snapshots` to `blobs`."""
    blob, snapshot = tmp_path / "blobs" / "c5a8", tmp_path / "snapshots" / "main"
    blob.parent.mkdir()
    snapshot.mkdir(parents=True)
    blob.write_text(INPUT_CARD)
    (snapshot / "README.md").symlink_to("../../blobs/c5a8")
    assert card_metadata(snapshot)["license_name"] == "tiny-licence"


@pytest.mark.parametrize(
    "value",
    [
        "mit\n---\n# Injected",
        "a: b",
        "- a",
        "yes",
        "1.5",
        "null",
        "",
        "\ud800",
        "\r---\r",
        "<script>",
        "'\"{}[]&*#?|",
        "ä",
    ],
    ids=repr,
)
def test_inherited_values_stay_values(value: str, report: Report) -> None:
    """Check that no value ends the metadata, becomes another key, or changes its type."""
    found = metadata_for(report, "tiny", None, {"license": value, "language": [value, "en"]})
    assert found == OURS | {"license": value, "language": [value, "en"]}


def test_names_stay_text_in_the_card(report: Report) -> None:
    hostile = "/models/a`b*c|d[e](f)<g>\n# Injected"
    config = report.config | {"checkpoint": hostile}
    calibration = {"source": "text``.txt\n# Injected", "num_tokens": 512, "token_hash": "c5a8"}
    card = model_card(
        replace(report, config=config, calibration=calibration),
        {},
        **OPENING,
    )
    headings = [line for line in card.splitlines() if line.startswith("#")]
    assert headings == [r"# Compressed from a\`b\*c\|d\[e\](f)\<g\>\\n# Injected"]
    assert "tokens of ``` text``.txt\\n# Injected ``` (SHA-256 `c5a8`)" in card
