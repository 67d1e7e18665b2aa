"""Names of tensors with another prefix than the stock class has: what transformers opens is the same model here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from oneshot.architecture import predicts_tokens
from oneshot.checkpoint import Checkpoint
from oneshot.checkpoint.model import identify
from oneshot.errors import CheckpointError
from oneshot.families import FAMILIES
from oneshot.pipeline import compress

# prefix in the file of the class -> in other files that transformers opens; of every kind of family
PREFIXES: dict[str, list[tuple[str, str]]] = {
    "llama": [("model.", "")],
    "qwen3_moe": [("model.", "")],
    "granitemoehybrid": [("model.", "")],
    "falcon_h1": [("model.", "")],
    "deepseek_v3": [("model.", "")],
    "gemma4_text": [("model.", "")],
    "opt": [("model.", "")],
    "gpt2": [("transformer.", "")],
    "gpt_neox": [("gpt_neox.", "")],
    "qwen3_5_text": [("model.", ""), ("model.", "model.language_model.")],
    "qwen3_5_moe_text": [("model.", "model.language_model.")],
    "bert": [("bert.", "")],
    "roberta": [("roberta.", "")],
    "distilbert": [("distilbert.", "")],
    "modernbert": [("model.", "")],
    "t5": [("", "transformer.")],
    "llava": [("language_model.model.", "model.language_model."), ("language_model.model.", "language_model.")],
    "qwen2_vl": [("model.", "model.language_model.")],
    "smolvlm": [("model.text_model.", "text_model.")],
}
MASKED = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
}
CHANGES = [(name, *pair) for name, pairs in PREFIXES.items() for pair in pairs]


class Headers(Checkpoint):
    """Names and shapes alone, as a prediction from the hub has them."""

    weights_at_hand = False

    def __init__(self, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        self.folder, self.config, self.shapes = Path("headers"), config, shapes
        self.dtypes, self._stored_names = dict.fromkeys(shapes, "F32"), {}


def headers(name: str, **further: Any) -> Headers:
    """Return what the file of a tiny model of the class has."""
    case = CASES[name]
    masked = {"model_class": MASKED[name]} if name in MASKED else {}
    with torch.device("meta"):
        model = case.build(**case.options | masked | further)
        state = revert_weight_conversion(model, model.state_dict())
    config = json.loads(json.dumps(model.config.to_dict())) | {"architectures": [type(model).__name__]}
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else {}
    return Headers(config, {name: tuple(one.shape) for name, one in state.items() if name not in (tied or {})})


def renamed(file: Headers, old: str, new: str) -> Headers:
    names = {name: new + name.removeprefix(old) if name.startswith(old) else name for name in file.shapes}
    assert any(new_name != name for name, new_name in names.items())
    return Headers(file.config, {names[name]: size for name, size in file.shapes.items()})


@pytest.mark.parametrize(("name", "old", "new"), CHANGES, ids=["-".join(one) for one in CHANGES])
def test_another_prefix_changes_nothing(name: str, old: str, new: str) -> None:
    """The class, the head and all sizes are the same."""
    file = headers(name)
    wanted, found = identify(file), identify(renamed(file, old, new))
    assert (found.family, found.shape, found.checkpoint.config) == (
        wanted.family,
        wanted.shape,
        wanted.checkpoint.config,
    )
    assert found.checkpoint.shapes == wanted.checkpoint.shapes


@pytest.mark.parametrize("stated", ["LlamaForCausalLM", "LlamaModel", None])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_head_is_absent_only_if_it_is(prefix: str, tied: bool, stated: str | None) -> None:
    """Whatever class a config states: a stored head is the head, and so is an embedding that is tied to it."""
    file = renamed(headers("llama", tied=tied), "model.", prefix) if not prefix else headers("llama", tied=tied)
    found = identify(Headers(file.config | {"architectures": stated and [stated]}, file.shapes))
    headless = tied and stated == "LlamaModel"  # nothing says that there is a head
    assert found.shape.stack().head == ("none" if headless else "tied" if tied else "own")
    assert predicts_tokens(found.checkpoint.config) != headless


def test_a_head_that_a_file_lacks_is_not_made_up() -> None:
    file = headers("llama")
    del file.shapes["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"The checkpoint lacks lm_head\.weight"):
        identify(file)
    bare = identify(renamed(file, "model.", ""))  # as an embedding model is saved
    assert bare.checkpoint.config["architectures"] == ["LlamaModel"]


ALIKE = [f"ModernBertFor{task}" for task in ("SequenceClassification", "TokenClassification", "QuestionAnswering")]
CLASSES = [(name, one) for name in CASES if not FAMILIES[name].text_module for one in FAMILIES[name].classes]


@pytest.mark.parametrize(("name", "stated"), CLASSES, ids=[one for _, one in CLASSES])
def test_the_class_of_a_config_without_one_is_found_by_its_tensors(name: str, stated: str) -> None:
    """Three classes of ModernBERT have the same tensors, so it is taken for a plain model there."""
    file = headers(name, **({} if FAMILIES[name].decoder else {"model_class": stated}))
    wanted = identify(file)
    silences: list[dict[str, Any]] = [{"architectures": None}, {"architectures": []}]
    for silent in silences:
        found = identify(Headers(file.config | silent, file.shapes))
        if stated in ALIKE:
            assert found.checkpoint.config["architectures"] == ["ModernBertModel"]
        else:
            assert (found.checkpoint.config, found.shape) == (wanted.checkpoint.config, wanted.shape)
            assert found.checkpoint.shapes == wanted.checkpoint.shapes


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")]
)
def test_a_bert_of_pretraining_without_a_class_predicts_masked_tokens(old: str, new: str) -> None:
    """So are Bio_ClinicalBERT and SciBERT published, whose files hold what no class here has."""
    file = headers("bert")
    shapes = {name.replace(old, new): size for name, size in file.shapes.items()}
    shapes |= {"bert.pooler.dense.weight": (32, 32), "bert.pooler.dense.bias": (32,), "cls.seq_relationship.bias": (2,)}
    config = {name: value for name, value in file.config.items() if name != "architectures"}
    found, wanted = identify(Headers(config, shapes)), identify(file)
    assert found.checkpoint.config == wanted.checkpoint.config
    assert found.checkpoint.shapes == wanted.checkpoint.shapes


@pytest.mark.parametrize(("name", "stated"), CLASSES, ids=[one for _, one in CLASSES])
def test_weights_of_other_classes_are_named(name: str, stated: str) -> None:
    """Buffers of integers and frequencies of positions are not among them, because transformers makes these anew."""
    file = headers(name, **({} if FAMILIES[name].decoder else {"model_class": stated}))
    assert identify(file).left_out == ()
    others = {"cls.seq_relationship.weight": (2, 32), "linear.weight": (1, 32)}
    with_others = Headers(file.config, file.shapes | others | {"a.position_ids": (1, 64), "rotary_emb.inv_freq": (4,)})
    with_others.dtypes["a.position_ids"] = "I64"
    found = identify(with_others)
    assert found.left_out == tuple(others)
    assert found.checkpoint.shapes == identify(file).checkpoint.shapes


def test_two_tensors_for_one_place_are_refused() -> None:
    file = headers("llama")
    file.shapes["norm.weight"] = (32,)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight and norm\.weight are both model\.norm\.weight"):
        identify(file)


def test_values_come_from_their_places_in_the_files(own_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = own_checkpoint()
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, path, metadata={"format": "pt"})
    config = make_config(folder, sparsity=0)
    compress(config)
    result = load_file(Path(config.output) / "model.safetensors")
    assert result.keys() == tensors.keys()
    assert all(torch.equal(one, result[name]) for name, one in tensors.items())
