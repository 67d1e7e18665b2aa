"""`oneshot.compress` on objects in memory does what it does on the files that hold the same."""

import json
import re
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from damage import edit_config
from datasets import Dataset
from factories import MakeCheckpoint, build_model, topics
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModel, AutoModelForCausalLM

import oneshot
from oneshot.checkpoint.pooling import write_pooling
from oneshot.errors import CalibrationError, CheckpointError, ConfigError, OneshotError, cause
from oneshot.text import load_text

SMALL: dict[str, Any] = {"sparsity": 0.2, "form": "stock", "device": "cpu", "dtype": "float32", "progress": False}
SMALL |= {"batch_size": 16}
DENSE = "sentence_transformers.models.Dense"
SIZES = {"num_sequences": 16, "sequence_length": 32}
TEXTS = [topics(start, start + 1) for start in range(12)]


@pytest.fixture
def weights(tmp_path: Path) -> Any:
    """`weights(name)`: the stored tensors of the result of this name."""
    return lambda name: load_file(tmp_path / name / "model.safetensors")


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_a_model_in_memory_gives_the_bytes_of_its_folder_and_stays_as_it_is(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, weights: Any
) -> None:
    folder = make_checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder)
    before, config = deepcopy(model.state_dict()), model.config.to_dict()
    for given, name in ((folder, "from-folder"), (model, "from-memory")):
        oneshot.compress(given, tmp_path / name, calibration=text_file, **SMALL, **SIZES)
    assert_same(weights("from-folder"), weights("from-memory"))
    assert_same(before, model.state_dict())
    assert model.config.to_dict() == config
    recipe = (tmp_path / "from-memory" / "recipe.yaml").read_text()
    assert "checkpoint: null" in recipe
    assert "in memory" in recipe
    report = json.loads((tmp_path / "from-memory" / "oneshot_report.json").read_text())
    assert Path(report["config"]["checkpoint"]).name == folder.name


BESIDE = {
    "LICENSE": "a licence",
    "preprocessor_config.json": "{}",
    "config_sentence_transformers.json": '{"similarity_fn_name": "cosine"}',
    "README.md": "---\nlicense: mit\n---\n",
}


@pytest.fixture
def with_files_beside(own_checkpoint: MakeCheckpoint) -> Path:
    """A sentence encoder with a pooling, a linear behind it, a licence, a card and the file of a processor."""
    folder = own_checkpoint(family="bert", model_class="BertModel", groups=4)
    write_pooling(folder, "cls", 32)
    modules = [*json.loads((folder / "modules.json").read_text()), {"path": "2_Dense", "type": DENSE}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text("{}")
    save_file({"linear.weight": torch.zeros(2, 32)}, folder / "2_Dense" / "model.safetensors")
    for name, content in BESIDE.items():
        (folder / name).write_text(content)
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the files of a result that tell neither of its run nor of where its tokenizer was."""
    told = ("report.html", "oneshot_report.json", "recipe.yaml", "README.md", "tokenizer_config.json")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in told]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_what_lies_beside_the_checkpoint_of_a_model_in_memory_is_copied(
    with_files_beside: Path, text_file: Path, tmp_path: Path
) -> None:
    for given, name in ((with_files_beside, "path"), (AutoModel.from_pretrained(with_files_beside), "memory")):
        oneshot.compress(given, tmp_path / name, calibration=text_file, **SMALL, **SIZES)
        assert "license: mit" in (tmp_path / name / "README.md").read_text()
    found = files_in(tmp_path / "memory")
    assert found == files_in(tmp_path / "path")
    assert {"LICENSE", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= found.keys()


def test_the_cache_of_the_hub_also_has_them(
    with_files_beside: Path,
    tokenizer: Any,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model that transformers opened does not tell its revision, so there may be only one in the cache."""
    place, commits = tmp_path / "cache" / "models--someone--model", ["a" * 40, "b" * 40]
    for commit in commits:
        shutil.copytree(with_files_beside, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commits[0])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"calibration": text_file, "tokenizer": tokenizer, **SMALL, **SIZES}
    copied = {"LICENSE", "2_Dense/model.safetensors"}
    oneshot.compress(AutoModel.from_pretrained("someone/model", revision=commits[1]), tmp_path / "of two", **options)
    assert not copied & files_in(tmp_path / "of two").keys()
    assert "the hub's cache has 2 revisions of someone/model instead of one; load the model from a" in caplog.text
    caplog.clear()
    shutil.rmtree(place / "snapshots" / commits[0])
    oneshot.compress(AutoModel.from_pretrained("someone/model", revision=commits[1]), tmp_path / "of one", **options)
    assert copied <= files_in(tmp_path / "of one").keys()
    assert "left out" not in caplog.text


def test_the_tokenizer_is_of_the_revision_that_the_cache_of_the_hub_has(
    own_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main revision is not in the cache, and is not asked for."""
    commit = "b" * 40
    shutil.copytree(own_checkpoint(), tmp_path / "cache" / "models--someone--model" / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = AutoModelForCausalLM.from_pretrained("someone/model", revision=commit)
    oneshot.compress(model, tmp_path / "out", calibration=text_file, **SMALL, **SIZES)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_files_that_cannot_be_read_beside_a_model_in_memory_are_told(
    with_files_beside: Path, text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (with_files_beside / "LICENSE").unlink()
    (with_files_beside / "LICENSE").symlink_to("/etc/hostname")
    model = AutoModel.from_pretrained(with_files_beside)
    oneshot.compress(model, tmp_path / "out", calibration=text_file, **SMALL, **SIZES)
    assert "LICENSE leads to" in caplog.text
    assert not {"LICENSE", "modules.json"} & files_in(tmp_path / "out").keys()


def test_a_model_that_was_never_stored_has_no_card(
    tokenizer: Any, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the process is not where it came from."""
    for name, content in BESIDE.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    oneshot.compress(build_model(), tmp_path / "out", tokenizer=tokenizer, calibration=text_file, **SMALL, **SIZES)
    assert not BESIDE.keys() - {"README.md"} & files_in(tmp_path / "out").keys()
    assert "license: mit" not in (tmp_path / "out" / "README.md").read_text()


OUTPUT_FLAGS: list[dict[str, Any]] = [
    {"output_attentions": True, "output_hidden_states": True, "use_cache": False},
    {"return_dict": False, "torchscript": True},
]


@pytest.mark.parametrize("flags", OUTPUT_FLAGS, ids=", ".join)
@pytest.mark.parametrize("form", ["stock", "per-layer"])
@pytest.mark.parametrize(("family", "auto_class"), [("llama", AutoModelForCausalLM), ("bert", AutoModel)])
def test_what_a_config_says_of_outputs_changes_no_weights(
    family: str,
    auto_class: Any,
    form: str,
    flags: dict[str, Any],
    own_checkpoint: MakeCheckpoint,
    text_file: Path,
    tmp_path: Path,
    weights: Any,
) -> None:
    """Checkpoints that were saved from training state such flags; attention of today returns no weights."""
    folder = own_checkpoint(family=family, model_class=auto_class.__name__, groups=4)
    options: dict[str, Any] = {"calibration": text_file, **SMALL, **SIZES, "form": form}
    oneshot.compress(folder, tmp_path / "plain", **options)
    edit_config(folder, **flags)
    for given, name in ((folder, "from-folder"), (auto_class.from_pretrained(folder), "from-memory")):
        result = oneshot.compress(given, tmp_path / name, **options)
        assert_same(weights("plain"), weights(name))
        auto_class.from_pretrained(tmp_path / name, trust_remote_code=True)
        if family == "llama":
            scores, *_ = result.evaluate(text_file, max_windows=1, sequence_length=32, decode_tokens=2)
            assert scores.perplexity


def test_a_model_that_was_never_stored_needs_a_tokenizer(
    tokenizer: Any, tokenizer_folder: Path, text_file: Path, tmp_path: Path, weights: Any
) -> None:
    model = build_model()
    with pytest.raises(CalibrationError, match="tokenizer"):
        oneshot.compress(model, tmp_path / "out", calibration=text_file, **SMALL, **SIZES)
    assert list(tmp_path.iterdir()) == []
    for given, name in ((tokenizer, "object"), (tokenizer_folder, "path")):
        oneshot.compress(model, tmp_path / name, tokenizer=given, calibration=text_file, **SMALL, **SIZES)
    assert_same(weights("object"), weights("path"))
    assert (tmp_path / "object" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (torch.nn.Linear(2, 2), "type Linear is not a model of transformers; give one"),
        (torch.nn.Sequential(), "not a model of transformers"),
        (3, "type int is not a model"),
    ],
    ids=str,
)
def test_other_objects_are_refused(model: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        oneshot.compress(model, tmp_path / "out", **SMALL)


def test_an_adapter_is_refused_with_its_remedy(tmp_path: Path) -> None:
    class Adapted(torch.nn.Module):
        def merge_and_unload(self) -> None: ...

    with pytest.raises(CheckpointError, match="merge_and_unload"):
        oneshot.compress(Adapted(), tmp_path / "out", **SMALL)
    with torch.device("meta"), pytest.raises(CheckpointError, match="meta"):
        oneshot.compress(AutoModelForCausalLM.from_config(build_model().config), tmp_path / "out", **SMALL)


@pytest.mark.parametrize(("name", "stock"), [("model.layers.1.mlp.act_fn", "SiLUActivation"), ("lm_head", "Linear")])
def test_a_module_of_another_class_is_refused(name: str, stock: str, tokenizer: Any, tmp_path: Path) -> None:
    model = build_model()
    model.set_submodule(name, torch.nn.Tanh())
    with pytest.raises(
        CheckpointError, match=rf"The module {name} of the model is a Tanh, but .* makes a {stock} there;"
    ):
        oneshot.compress(model, tmp_path / "out", tokenizer=tokenizer, **SMALL)


def test_forward_hooks_are_left_out_and_told_unless_transformers_made_them(
    tokenizer: Any, text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model()
    model(torch.arange(4).unsqueeze(0), output_hidden_states=True)
    options: dict[str, Any] = {"tokenizer": tokenizer, "calibration": text_file, **SMALL, **SIZES}
    oneshot.compress(model, tmp_path / "plain", **options)
    assert "which a checkpoint does not hold" not in caplog.text
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
    oneshot.compress(model, tmp_path / "hooked", **options)
    assert "The model has forward hooks (model.layers.1.mlp), which a checkpoint does not hold" in caplog.text


def test_a_forward_of_an_object_is_left_out_and_told_unless_it_is_that_of_its_class(
    tokenizer: Any, text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model()
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    add_hook_to_module(norm, ModelHook())
    remove_hook_from_module(norm)
    assert "forward" in vars(norm)
    add_hook_to_module(model.model.layers[1], ModelHook())
    options: dict[str, Any] = {"tokenizer": tokenizer, "calibration": text_file, **SMALL, **SIZES}
    oneshot.compress(model, tmp_path / "plain", **options)
    assert "which a checkpoint does not hold" not in caplog.text
    mlp.forward = lambda states: 2 * type(mlp).forward(mlp, states)
    oneshot.compress(model, tmp_path / "replaced", **options)
    assert (
        "The model has replaced forward methods (model.layers.0.mlp), which a checkpoint does not hold" in caplog.text
    )


def test_a_model_that_transformers_does_not_save_is_told_with_the_cause(tokenizer: Any, tmp_path: Path) -> None:
    model = build_model()
    assert model.generation_config is not None
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, False
    with pytest.raises(
        CheckpointError, match=r"cannot be saved \(GenerationConfig is invalid: `temperature`: `do_samp"
    ):
        oneshot.compress(model, tmp_path / "out", tokenizer=tokenizer, **SMALL)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\ntwo", "one"),
        ("\n  one:\n\n- two\n- three", "one: two"),
        ("one: \ntwo", "one: two"),
        ("one:", "one:"),
        ("", "ValueError"),
        ("x" * 400, "x" * 300),
    ],
)
def test_the_cause_of_another_librarys_error(text: str, shown: str) -> None:
    assert cause(ValueError(text)) == shown


# Text


def rows() -> list[dict[str, Any]]:
    return [{"text": text, "id": f"topic-{number}", "length": len(text)} for number, text in enumerate(TEXTS)]


def test_strings_and_rows_are_the_file_that_holds_them(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, weights: Any
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for given, name in ((path, "file"), (TEXTS, "strings"), (iter(TEXTS), "iterator"), (rows(), "rows")):
        oneshot.compress(make_checkpoint(), tmp_path / name, calibration=given, **SMALL, **SIZES)
    for name in ("strings", "iterator", "rows"):
        assert_same(weights("file"), weights(name))
    assert "calibration: null" in (tmp_path / "strings" / "recipe.yaml").read_text()


def test_a_list_of_files_is_the_files_and_never_their_names(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `evaluate` reads it: paths, strings, both, with columns, and short names beside them."""
    monkeypatch.chdir(tmp_path)
    first, second = Path("first.txt"), Path("second.jsonl")
    first.write_text(" ".join(TEXTS[:6]))
    second.write_text("".join(json.dumps({"said": text, "by": "x"}) + "\n" for text in TEXTS[6:]))
    column = f"{second}:said"
    oneshot.compress(make_checkpoint(), tmp_path / "joined", calibration=f"{first}+{column}", **SMALL, **SIZES)
    for name, given in (
        ("paths", [first, Path(column)]),
        ("strings", (str(first), column)),
        ("both", [str(tmp_path / first), Path(column)]),
    ):
        result = oneshot.compress(make_checkpoint(), tmp_path / name, calibration=given, **SMALL, **SIZES)
        assert_same(weights("joined"), weights(name))
        assert f"calibration: {'+'.join(map(str, given))}" in (tmp_path / name / "recipe.yaml").read_text()
        found = oneshot.evaluate(result.output, given, sequence_length=16, max_windows=1, decode_tokens=0)
        assert [*found[0].perplexity] == [*map(str, given)]
    predicted = oneshot.predict(make_checkpoint(), calibration=[first, "builtin"], sparsity=0.2, form="stock", **SIZES)
    assert predicted.text.endswith("first.txt+builtin")
    oneshot.profile(make_checkpoint(), tmp_path / "profile", calibration=[first], device="cpu", progress=False, **SIZES)


@pytest.mark.parametrize(
    ("calibration", "reason"),
    [
        ([Path("missing.txt")], "missing.txt does not exist"),
        (["missing.txt", "given.txt"], "missing.txt does not exist"),
        (
            ["given.txt", Path("given.txt"), "A text."],
            "given.txt names a source and is no text; give a list of sources",
        ),
        ({"given.txt"}, "given.txt names a source and is no text"),
        (["builtin", "c4", "org/name"], "builtin names a source and is no text"),
        ({Path("given.txt")}, "given.txt names a source and is no text"),
        (
            [Path("one+two.txt"), Path("given.txt")],
            "one\\+two.txt has a plus sign, .* an element of its own",
        ),
    ],
    ids=str,
)
def test_names_of_files_are_never_read_as_text(
    calibration: Any, reason: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given.txt").write_text(TEXTS[0])
    for call in (oneshot.compress, oneshot.predict, oneshot.profile):
        options = SMALL if call is oneshot.compress else {"sparsity": 0.2}
        with pytest.raises(CalibrationError, match=reason):
            call(make_checkpoint(), tmp_path / "out", calibration=calibration, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["given.txt"]


def test_a_name_of_a_file_among_texts_is_left_out_and_told(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = [*TEXTS, str(text_file)]
    oneshot.compress(make_checkpoint(), tmp_path / "out", calibration=given, **SMALL, **SIZES)
    assert (
        f"1 of 13 records of the calibration text give no text and are left out. The first: {text_file}" in caplog.text
    )


def test_names_of_files_in_a_column_or_a_loader_are_never_read_as_text(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of them are refused; a few are left out and told."""
    paths = [tmp_path / f"{place}.page" for place in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_text(text)
    names = [str(path) for path in paths]
    loader: DataLoader[Any] = DataLoader(names, batch_size=4)  # type: ignore[arg-type]
    rows = [{"text": name} for name in names]
    for given in (loader, rows, Dataset.from_list(rows), Dataset.from_dict({"page": names})):
        with pytest.raises(
            CalibrationError, match=r"^The given text holds '.*\.page', which names a file and is no text;"
        ):
            oneshot.compress(make_checkpoint(), tmp_path / "out", calibration=given, **SMALL, **SIZES)
    few = Dataset.from_dict({"text": [*TEXTS, names[0]]})
    oneshot.compress(make_checkpoint(), tmp_path / "out", calibration=few, **SMALL, **SIZES)
    assert "1 of 13 records of the given text give no text and are left out" in caplog.text


def test_chats_are_the_file_that_holds_them(make_checkpoint: MakeCheckpoint, tmp_path: Path, weights: Any) -> None:
    chats = [
        [{"role": "user", "content": f"Topic {number}"}, {"role": "assistant", "content": text}]
        for number, text in enumerate(TEXTS)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat, "id": "x"}) + "\n" for chat in chats))
    for given, name in ((path, "file"), (chats, "memory")):
        oneshot.compress(make_checkpoint(), tmp_path / name, calibration=given, **SMALL, **SIZES)
    assert_same(weights("file"), weights("memory"))


def test_data_sets_are_read_in_a_seeded_order(make_checkpoint: MakeCheckpoint, tmp_path: Path, weights: Any) -> None:
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_list(rows())
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        oneshot.compress(make_checkpoint(), tmp_path / name, calibration=dataset, seed=seed, **SMALL, **SIZES)
    assert_same(weights("first"), weights("again"))
    with pytest.raises(AssertionError):
        assert_same(weights("first"), weights("other"))
    result = oneshot.compress(
        make_checkpoint(), tmp_path / "streamed", calibration=dataset.to_iterable_dataset(), **SMALL, **SIZES
    )
    assert result.report.calibration is not None
    assert result.report.calibration["num_tokens"] == 16 * 32
    splits = DatasetDict({"train": dataset, "test": dataset})
    with pytest.raises(CalibrationError, match="splits train, test"):
        oneshot.compress(make_checkpoint(), tmp_path / "splits", calibration=splits, **SMALL)


@pytest.fixture
def token_ids(tokenizer: Any, text_file: Path) -> torch.Tensor:
    return load_text(str(text_file), tokenizer, num_sequences=16, sequence_length=32, seed=0).token_ids


def loaders(token_ids: torch.Tensor) -> Iterator[tuple[str, DataLoader[Any]]]:
    """Yield loaders of the same tokens: tensors, tuples of tensors, dictionaries, and batches padded on the left."""
    yield "tensors", DataLoader(token_ids, batch_size=4)  # type: ignore[arg-type]
    yield "tuples", DataLoader(TensorDataset(token_ids), batch_size=5)
    examples: list[dict[str, torch.Tensor]] = [{"input_ids": ids, "labels": ids} for ids in token_ids]
    yield "dictionaries", DataLoader(examples, batch_size=3)  # type: ignore[arg-type]
    padding = torch.full((len(token_ids), 7), 1)
    padded = torch.cat([padding, token_ids], dim=1)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(token_ids)], dim=1)
    masked = [{"input_ids": ids, "attention_mask": each} for ids, each in zip(padded, mask, strict=True)]
    yield "padded", DataLoader(masked, batch_size=4)  # type: ignore[arg-type]


def test_tokens_in_every_container_are_the_same_tokens(
    token_ids: torch.Tensor, make_checkpoint: MakeCheckpoint, tmp_path: Path, weights: Any
) -> None:
    given = {"tensor": token_ids, "int32": token_ids.int(), "array": token_ids.numpy(), "lists": token_ids.tolist()}
    for name, calibration in (given | dict(loaders(token_ids))).items():
        result = oneshot.compress(make_checkpoint(), tmp_path / name, calibration=calibration, **SMALL)
        described = result.report.calibration
        assert described is not None
        assert (described["num_sequences"], described["sequence_length"]) == (16, 32)
        assert_same(weights("tensor"), weights(name))


def test_short_rows_in_every_container_give_all_tokens_asked_for(
    token_ids: torch.Tensor, make_checkpoint: MakeCheckpoint, tmp_path: Path, weights: Any
) -> None:
    """In rows of 4 tokens, where 16 rows have an eighth of what is asked for."""
    short = token_ids.view(-1, 4)
    rows = [{"input_ids": row} for row in short.tolist()]
    loader: DataLoader[Any] = DataLoader(short, batch_size=3)  # type: ignore[arg-type]
    given = {"sequences": token_ids, "rows": rows, "iterator": iter(rows), "loader": loader, "tensor": short}
    for name, calibration in (given | {"data set": Dataset.from_list(rows)}).items():
        result = oneshot.compress(make_checkpoint(), tmp_path / name, calibration=calibration, **SMALL, **SIZES)
        assert result.report.calibration is not None
        assert result.report.calibration["num_tokens"] == 16 * 32
        assert not any("asked for" in warning for warning in result.report.warnings)
        if name != "data set":  # whose rows have another order
            assert_same(weights("sequences"), weights(name))


def test_tokens_need_no_tokenizer(token_ids: torch.Tensor, tmp_path: Path) -> None:
    result = oneshot.compress(build_model(), tmp_path / "out", calibration=token_ids, **SMALL)
    assert result.load()(token_ids).logits.shape == (16, 32, 400)


def test_loaders_of_strings_and_a_limit(
    token_ids: torch.Tensor, make_checkpoint: MakeCheckpoint, tmp_path: Path, weights: Any
) -> None:
    strings: DataLoader[Any] = DataLoader(TEXTS, batch_size=4)  # type: ignore[arg-type]
    for name, given in (("strings", TEXTS), ("loader", strings)):
        oneshot.compress(make_checkpoint(), tmp_path / name, calibration=given, **SMALL, **SIZES)
    assert_same(weights("strings"), weights("loader"))
    (_, loader), *_ = loaders(token_ids)
    result = oneshot.compress(make_checkpoint(), tmp_path / "few", calibration=loader, num_sequences=6, **SMALL)
    assert result.report.calibration is not None
    assert result.report.calibration["num_sequences"] == 6


@pytest.mark.parametrize(
    ("calibration", "reason"),
    [
        ([], "empty"),
        ([3.5], "3.5 is neither a string, nor a chat"),
        ([None, "text", None], "2 of 3 records of the calibration text .* None is neither"),
        ({"text": "a"}, "type dict is not text"),
        (b"bytes", "type bytes is not text"),
        (7, "type int is not text"),
        (torch.zeros(2, 3), "torch.float32 of shape"),
        (torch.zeros(6).long(), "shape \\(6,\\)"),
        (torch.zeros(0, 3).long(), "shape \\(0, 3\\)"),
        (torch.full((2, 8), -100), "negative token -100"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0.0, -1e9]]}, "does not fit its input_ids"),
        (torch.full((4, 8), 400), "400"),
    ],
    ids=str,
)
def test_text_that_cannot_be_used(
    calibration: Any, reason: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(OneshotError, match=reason):
        oneshot.compress(make_checkpoint(), tmp_path / "out", calibration=calibration, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_for_models_that_write_text(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    encoder = make_checkpoint(family="bert", model_class="BertForMaskedLM")
    with pytest.raises(CalibrationError, match="only models that write text read"):
        oneshot.compress(encoder, tmp_path / "out", calibration=torch.ones(8, 16).long(), **SMALL | {"sparsity": 0.1})


def test_options_beside_a_config_are_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    config = oneshot.Config.of(make_checkpoint(), tmp_path / "out", sparsity=0.2)
    with pytest.raises(ConfigError, match="A Config has all options"):
        oneshot.compress(config, sparsity=0.3)
    with pytest.raises(ConfigError, match="tokenizer"):
        oneshot.compress(make_checkpoint(), tmp_path / "out", tokenizer="x", **SMALL)


def test_a_list_of_sparsities_gives_a_list_of_results(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In folders of their own, also of a text in memory and in the default output; as one by one."""
    monkeypatch.chdir(tmp_path)
    folder, options = make_checkpoint(), SMALL | {"calibration": [topics(0, 3)], "sequence_length": 32}
    del options["sparsity"]
    options |= {"num_sequences": 4}
    results = oneshot.compress(folder, sparsity=[0.1, 0.2], **options)
    assert [result.output for result in results] == [
        Path(f"{folder.name}-oneshot/sparsity-{share}") for share in ("0.10", "0.20")
    ]
    sizes = [result.report.stored_parameters["compressed"] for result in results]
    for result in results:
        assert "in memory" in (result.output / "recipe.yaml").read_text()
    one = oneshot.compress(folder, tmp_path / "one", sparsity=0.2, **options)
    assert one.report.stored_parameters["compressed"] == sizes[1] < sizes[0]
    weights = [(result.output / "model.safetensors").read_bytes() for result in (one, results[1])]
    assert weights[0] == weights[1]
    predicted = oneshot.predict(folder, sparsity=(0.1, 0.2), **{**options, "progress": None})
    assert [one.stored_parameters["compressed"] for one in predicted] == sizes
    for wrong in ([], [0.1, "much"], [0.1, 1.5], [0.1, 0.101]):
        with pytest.raises(ConfigError, match="sparsit"):
            oneshot.compress(folder, tmp_path / "wrong", sparsity=wrong, **options)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"seed": "x"}, "seed 'x' is of the type str; give an integer"),
        ({"seed": 1.5}, "seed=1.5 is of the type float; give an integer"),
        ({"seed": -1}, "seed=-1 is out of range: give an integer from 0 to 9007199254740991"),
        ({"seed": 2**53}, "seed=9007199254740992 is out of range"),
        ({"seed": 2**70}, "is out of range"),
        ({"num_sequences": "4"}, "num_sequences '4' is of the type str; give an integer"),
        ({"num_sequences": 4.5}, "num_sequences=4.5 is of the type float; give an integer"),
        ({"num_sequences": 0}, "num_sequences=0 is out of range"),
    ],
)
def test_wrong_values_are_told_of_before_objects_are_read(wrong: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """No text in memory is drawn by a wrong seed or number, and no model in memory is written."""
    rows = [{"text": text} for text in TEXTS]
    texts = (TEXTS, rows, Dataset.from_list(rows), DataLoader(TensorDataset(torch.ones(8, 32).long())), "builtin")
    for text in texts:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            oneshot.compress(object(), tmp_path / "out", calibration=text, **SMALL | wrong)


def test_the_largest_seed_draws_text_in_memory(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for form in ("stock", "per-layer"):
        options = SMALL | SIZES | {"seed": 2**53 - 1, "form": form, "overwrite": True}
        oneshot.compress(make_checkpoint(), tmp_path / "out", calibration=Dataset.from_dict({"text": TEXTS}), **options)


def test_an_output_that_is_not_a_path_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match="An output of the type float is not a path; give one"):
        oneshot.compress(make_checkpoint(), 0.2, **SMALL)  # type: ignore[call-overload]
