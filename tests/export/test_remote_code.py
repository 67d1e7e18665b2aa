"""Results with a modelling file in the libraries of training and generation, and in a transformers that is too old."""

import copy
import importlib.metadata
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeResult, build_model, randomise
from torch import nn
from transformers import AutoModelForCausalLM

from oneshot.architecture import LayerShape, ModelShape, TableShape
from oneshot.checkpoint import Checkpoint
from oneshot.export.encoder import MODELLING_FILE as ENCODER
from oneshot.export.modeling_oneshot import OneshotConfig, OneshotForCausalLM
from oneshot.export.nemotron_nas import MODELLING_FILE as NEMOTRON_NAS
from oneshot.export.per_layer import MODELLING_FILE as PER_LAYER
from oneshot.report.card import CODE_NEEDS

IDS = torch.randint(2, 400, (2, 12), generator=torch.Generator().manual_seed(1))
WIDTH, VOCABULARY = 32, 400
TABLES = (TableShape(200, 24), TableShape(150, 8), TableShape(50, WIDTH))

WRITING = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 1}


def sizes_of_layers() -> list[LayerShape]:
    """Return a whole layer, and one of low ranks."""
    shape = ModelShape(2, WIDTH, 64, 4, 2, 8, vocab_size=VOCABULARY)
    ranked = {"query_key_rank": 12, "output_rank": 10, "gate_rank": 16, "up_rank": 8}
    return [shape.layer(), LayerShape(**asdict(shape.layer()) | ranked)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random per-layer model with ranks of the embedding and of linears."""
    config = OneshotConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        norm_width=WIDTH,
        layers=[asdict(layer) for layer in sizes_of_layers()],
        embedding=[asdict(table) for table in TABLES],
        tie_word_embeddings=False,
        pad_token_id=1,
        auto_map={
            "AutoConfig": f"{PER_LAYER.stem}.OneshotConfig",
            "AutoModelForCausalLM": f"{PER_LAYER.stem}.OneshotForCausalLM",
        },
    )
    made = tmp_path_factory.mktemp("per-layer") / "model"
    randomise(OneshotForCausalLM(config), 0).save_pretrained(made)
    shutil.copy(PER_LAYER, made)
    return made


def opened(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.fixture(params=["per-layer", "nemotron-nas"])
def either(
    request: pytest.FixtureRequest, folder: Path, make_checkpoint: MakeCheckpoint, make_result: MakeResult
) -> Path:
    """A result of either form with a modelling file."""
    if request.param == "per-layer":
        return folder
    made = make_result(make_checkpoint(tied=True), form=request.param, recipe="magnitude", allocation="uniform")
    assert (made / NEMOTRON_NAS.name).exists()
    return made


@pytest.mark.parametrize("kilobytes", [20, 60, 80])
def test_weights_on_disk_change_nothing(kilobytes: int, either: Path, tmp_path: Path) -> None:
    """Let accelerate leave what does not fit into the memory on the disk."""
    model = opened(
        either, device_map="auto", max_memory={"cpu": kilobytes * 1000}, offload_folder=str(tmp_path / "weights")
    )
    assert "disk" in model.hf_device_map.values()
    torch.testing.assert_close(logits(model), logits(opened(either)), rtol=0, atol=0)


def test_the_parts_of_an_embedding_share_a_device(folder: Path) -> None:
    """A range of the vocabulary on another device would give its rows to the wrong one."""
    assert {"OneshotDecoderLayer", "OneshotEmbedding"} <= set(opened(folder)._no_split_modules)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(reentrant: bool, either: Path) -> None:
    losses, gradients = [], []
    for checkpointed in (False, True):
        model = opened(either).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert torch.equal(*losses)
    for name, gradient in gradients[0].items():
        assert gradient is not None
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize("table", ["ranges", "whole"])
def test_a_trained_embedding_stays_tied(
    table: str, folder: Path, make_checkpoint: MakeCheckpoint, make_result: MakeResult, tmp_path: Path
) -> None:
    """Train the whole embedding with peft, merge, save and open again."""
    from peft import LoraConfig, get_peft_model

    if table == "whole":
        folder = make_result(make_checkpoint(tied=True), form="per-layer", embedding="none", sparsity=0.1)
    options: dict[str, Any] = {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "r": 2}
    adapted = get_peft_model(opened(folder), LoraConfig(**options, ensure_weight_tying=True))
    optimiser = torch.optim.SGD([weight for weight in adapted.parameters() if weight.requires_grad], lr=0.5)
    for _ in range(4):
        adapted(IDS, labels=IDS).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    trained = logits(adapted)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged), trained, rtol=1e-5, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    assert Checkpoint(tmp_path / "merged").shapes.keys() == Checkpoint(folder).shapes.keys(), "no head of its own"
    assert (trained - logits(opened(folder))).abs().max() > 0.1, "training must change something"
    torch.testing.assert_close(logits(opened(tmp_path / "merged")), trained, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("named", ["by name", "all-linear"])
def test_adapters_of_the_usual_names_merge(named: str, folder: Path) -> None:
    """Train adapters of the seven linears of a Llama, also in the layer of low ranks, and merge them."""
    from peft import LoraConfig, get_peft_model

    names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    targets = names if named == "by name" else named
    adapted = get_peft_model(opened(folder), LoraConfig(target_modules=targets, r=2, init_lora_weights=False))
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 2 * len(names)
    adapted(IDS, labels=IDS).loss.backward()
    assert all(weight.grad is not None for weight in adapted.parameters() if weight.requires_grad)
    expected = logits(adapted.eval())
    torch.testing.assert_close(logits(adapted.merge_and_unload()), expected, rtol=1e-4, atol=1e-4)


def test_it_compiles_without_a_break(folder: Path) -> None:
    model = opened(folder)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("above", "left"), [(0, 0), (0.6, 3), (1.0, 4)])
def test_expanded_linears_compute_the_same(above: float, left: int, folder: Path, tmp_path: Path) -> None:
    """The gate of rank 16 takes 0.625 of a whole linear's products, and the others take less than 0.6."""
    model = opened(folder)
    before = logits(model)
    model.expand_(above)
    assert sum(module.__class__.__name__ == "OneshotCoordinates" for module in model.model.layers.modules()) == left
    assert sum(size > 0 for name, size in model.config.layers[1].items() if name.endswith("_rank")) == left
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "expanded")
    torch.testing.assert_close(logits(opened(tmp_path / "expanded")), before, rtol=1e-4, atol=1e-5)


def test_weights_on_disk_are_not_expanded(folder: Path, tmp_path: Path) -> None:
    model = opened(folder, device_map="auto", max_memory={"cpu": 60000}, offload_folder=str(tmp_path / "weights"))
    assert any(weight.is_meta for weight in model.model.layers[1].parameters())
    before = repr(model), repr(model.config)
    with pytest.raises(ValueError, match="open the model without off-loading"):
        model.expand_(0)
    assert (repr(model), repr(model.config)) == before


def of_another_class(linear: nn.Linear) -> nn.Module:
    """Return a linear as bitsandbytes and other packages put it in a linear's place."""
    return type("Linear8bit", (nn.Linear,), {})(linear.in_features, linear.out_features, bias=False)


def of_another_tensor(linear: nn.Linear) -> nn.Module:
    """Return a linear with a weight as torchao puts it in the weight's place."""
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(type("Int8Tensor", (torch.Tensor,), {})))
    return linear


def of_integers(linear: nn.Linear) -> nn.Module:
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)
    return linear


def adapted(linear: nn.Linear) -> nn.Module:
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    return Linear(linear, "default", LoraConfig(r=2), r=2)


@pytest.mark.parametrize("changed", [of_another_class, of_another_tensor, of_integers, adapted])
def test_linears_that_are_not_torchs_own_are_not_expanded(
    changed: Callable[[nn.Linear], nn.Module], folder: Path
) -> None:
    """Nothing is changed before, and what does not become whole may be quantised."""
    model = opened(folder)
    mlp = model.model.layers[1].mlp
    mlp.up_proj = changed(mlp.up_proj)
    before = repr(model), repr(model.config)
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.up_proj is quantised or has an adapter, .*\.$"):
        model.expand_(0)
    assert (repr(model), repr(model.config)) == before
    model.expand_(0.6)
    assert isinstance(mlp.gate_read, nn.Identity)


def test_weights_by_columns_compute_and_save_the_same(folder: Path, tmp_path: Path) -> None:
    model = opened(folder)
    before, weights = logits(model), {name: weight.clone() for name, weight in model.state_dict().items()}
    model.lay_out_()
    gate, down = (getattr(model.model.layers[0].mlp, name).weight for name in ("gate_proj", "down_proj"))
    assert gate.t().is_contiguous()
    assert down.is_contiguous()
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = opened(tmp_path / "saved").state_dict()
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_a_tied_table_stays_by_rows_and_is_saved(
    make_checkpoint: MakeCheckpoint, make_result: MakeResult, tmp_path: Path
) -> None:
    model = opened(make_result(make_checkpoint(tied=True), form="per-layer", embedding="none", sparsity=0.1))
    before = logits(model)
    model.lay_out_()
    model.save_pretrained(tmp_path / "saved")
    assert model.model.layers[0].mlp.gate_proj.weight.t().is_contiguous()
    torch.testing.assert_close(logits(opened(tmp_path / "saved")), before, rtol=1e-5, atol=1e-5)


def test_a_copied_head_reads_the_embedding_that_is_there(folder: Path) -> None:
    """Training libraries copy the head alone, and have to train one embedding; a copied model has its own."""
    model = opened(folder)
    head, whole = copy.deepcopy(model.lm_head), copy.deepcopy(model)
    before, states = logits(model), torch.randn(2, WIDTH)
    with torch.no_grad():
        for table in model.model.embed_tokens.tables:
            table.weight.mul_(2)
    assert torch.equal(head(states), model.lm_head(states))
    assert torch.equal(logits(whole), before)


def test_weights_on_disk_are_not_laid_out(folder: Path, tmp_path: Path) -> None:
    model = opened(folder, device_map="auto", max_memory={"cpu": 60000}, offload_folder=str(tmp_path / "weights"))
    with pytest.raises(ValueError, match="open the model without off-loading"):
        model.lay_out_()


@pytest.mark.parametrize(("wanted", "step", "reached"), [(403, None, 403), (401, 64, 448), (None, 50, 400)])
def test_a_vocabulary_of_ranges_grows_at_its_end(
    wanted: int | None, step: int | None, reached: int, folder: Path, tmp_path: Path
) -> None:
    model = opened(folder)
    before = logits(model)
    embedding = model.resize_token_embeddings(wanted, pad_to_multiple_of=step)
    assert embedding is model.get_input_embeddings()
    assert model.config.vocab_size == reached
    after = logits(model)
    assert after.shape[-1] == reached
    torch.testing.assert_close(after[..., :VOCABULARY], before, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "larger")
    again, last = opened(tmp_path / "larger"), torch.tensor([[reached - 1]])
    torch.testing.assert_close(logits(again, last), logits(model, last), rtol=1e-4, atol=1e-5)


def test_a_vocabulary_of_ranges_does_not_shrink(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"only grow: give at least 400 tokens"):
        opened(folder).resize_token_embeddings(300)


# Generation


@pytest.mark.parametrize(
    "how",
    [{"num_beams": 3, "use_cache": False}, {"prefill_chunk_size": 5}, {"cache_implementation": "static"}],
    ids=str,
)
def test_generation_of_every_kind_writes_the_same(how: dict[str, Any], either: Path) -> None:
    """Beams without a cache, a prompt in pieces, a cache of fixed size."""
    model, beams = opened(either), how.get("num_beams", 1)
    plain = model.generate(IDS, num_beams=beams, **WRITING)
    assert torch.equal(model.generate(IDS, **WRITING | how), plain)


def test_a_draft_does_not_change_what_is_written(either: Path) -> None:
    """Assisted decoding has the text of the dense model alone."""
    dense = build_model(seed=3).eval()
    alone = dense.generate(IDS[:1], **WRITING)
    assert torch.equal(dense.generate(IDS[:1], assistant_model=opened(either), **WRITING), alone)


def test_an_exported_program_computes_the_same(folder: Path) -> None:
    model = opened(folder)
    program = torch.export.export(model, (IDS,), {"use_cache": False})
    torch.testing.assert_close(program.module()(IDS, use_cache=False).logits, logits(model), rtol=1e-5, atol=1e-5)


# Older versions


@pytest.mark.parametrize("file", [PER_LAYER, NEMOTRON_NAS, ENCODER], ids=lambda file: file.stem)
def test_an_older_transformers_is_refused_in_a_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any name is imported that it may not have."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.57.6")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=rf"transformers>={CODE_NEEDS} is required .* but found transformers==4\.57"):
        exec(file.read_text(), {"__name__": file.stem})
