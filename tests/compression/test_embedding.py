"""A tied embedding whose ranges of the vocabulary have their own ranks: the best approximation, a model that runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model, calibration_tokens, profiled_tokens
from families.cases import CASES
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from oneshot import OneshotError
from oneshot.architecture import TableShape
from oneshot.compression.embedding import MODULES, TokenRows, expanded, order_of_tokens, range_errors, reduce_embedding
from oneshot.errors import PlanError
from oneshot.evaluation import load_model
from oneshot.export.modeling_oneshot import OneshotEmbedding, OneshotTiedHead
from oneshot.linalg.low_rank import ROOT_DAMPING
from oneshot.pipeline import compress, profile
from oneshot.planning.vocabulary import NUM_RANGES, smaller_tables, table_options, vocabulary_ranges
from oneshot.profiling import load_profile
from oneshot.profiling.embedding import TABLE_PROBES, table_probes
from oneshot.text import NUM_KINDS, load_tokenizer, special_tokens

CPU = torch.device("cpu")
VOCABULARY, HIDDEN, RARE_RANK = 1600, 32, 4
TOKEN_IDS = torch.randint(2, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))


def problem(vocabulary: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an embedding, the Gram of what the head reads, and the probabilities of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(3 * width, width, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, width)
    embedding = torch.randn(vocabulary, width, generator=generator)
    probabilities = torch.rand(vocabulary, generator=generator, dtype=torch.float64) ** 4
    return embedding, states.T @ states / len(states), probabilities / probabilities.sum()


def singular_values(embedding: Any, gram: Any, probabilities: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return NumPy's singular values of a range's rows weighted on both sides, and the weighted rows."""
    gram = gram + ROOT_DAMPING * np.diag(gram).mean() * np.eye(len(gram))
    weights = np.sqrt((probabilities + probabilities.mean()) / 2)
    values, vectors = np.linalg.eigh(gram)
    matrix = np.sqrt(weights)[:, None] * embedding.astype(np.float64) @ (vectors * np.sqrt(values)) @ vectors.T
    return np.linalg.svd(matrix, compute_uv=False), matrix


@given(vocabulary=st.integers(1, 200), width=st.integers(2, 12), seed=st.integers(0, 10**6))
def test_errors_equal_the_singular_values_beyond_each_rank(vocabulary: int, width: int, seed: int) -> None:
    embedding, gram, probabilities = problem(vocabulary, width, seed)
    errors = range_errors(TokenRows(embedding, gram, probabilities), torch.arange(len(embedding)))
    expected = np.zeros((len(errors), width + 1))
    for index, part in enumerate(vocabulary_ranges(vocabulary)):
        values, _ = singular_values(embedding[part].numpy(), gram.numpy(), probabilities[part].numpy())
        for rank in range(width):
            expected[index, rank] = (values[rank:] ** 2).sum()
    np.testing.assert_allclose(errors.numpy(), expected / expected[:, 0].sum(), atol=1e-9)


@given(rank=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_tables_and_maps_reach_these_errors(rank: int, seed: int) -> None:
    """Against the singular values, below which no matrix of rank r can be."""
    embedding, gram, probabilities = problem(160, 8, seed)
    tables = tuple(TableShape(part.stop - part.start, rank) for part in vocabulary_ranges(160))
    reduced = reduce_embedding(TokenRows(embedding.double(), gram, probabilities), torch.arange(160), tables)
    found = expanded(reduced, 8)
    for index, part in enumerate(vocabulary_ranges(160)):
        rows, weights = embedding[part].double().numpy(), probabilities[part].numpy()
        table = reduced[f"model.embed_tokens.tables.{index}.weight"]
        assert table.shape == (20, rank)
        if rank < 8:  # the table is the approximation at its coordinates, which are not stored a second time
            columns = reduced[f"model.embed_tokens.maps.{index}.columns"]
            assert reduced[f"model.embed_tokens.maps.{index}.weight"].shape == (8 - rank, rank)
            assert columns.sort().values.tolist() == list(range(8))
            assert torch.equal(found[part][:, columns[:rank]], table)
        values, _ = singular_values(rows, gram.numpy(), weights)
        _, missed = singular_values(rows - found[part].numpy(), gram.numpy(), weights)
        assert (missed**2).sum() == pytest.approx((values[rank:] ** 2).sum(), abs=1e-9 * (values**2).sum())


@given(vocabulary=st.integers(1, 5000), width=st.integers(1, 200))
def test_ranges_cover_the_vocabulary_and_smaller_ranks_store_less(vocabulary: int, width: int) -> None:
    ranges = vocabulary_ranges(vocabulary)
    assert [token for part in ranges for token in range(part.start, part.stop)] == list(range(vocabulary))
    assert len(ranges) <= NUM_RANGES
    errors = torch.ones(len(ranges), width + 1, dtype=torch.float64)
    for part, tables in zip(ranges, table_options(errors, vocabulary), strict=True):
        rows = part.stop - part.start
        assert tables[-1] == TableShape(rows, width)
        assert all(table.rows == rows and table.parameters(width) < rows * width for table in tables[:-1])


@given(rank=st.integers(3, 11), seed=st.integers(0, 10**6), data=st.data())
def test_marks_keep_their_rows_and_the_others_what_is_left(rank: int, seed: int, data: st.DataObject) -> None:
    """Against NumPy: the least error of rows whose directions are free outside of the marks' span."""
    width, marks = 12, data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=3, unique=True))
    embedding, gram, probabilities = problem(160, width, seed)
    errors = range_errors(TokenRows(embedding.double(), gram, probabilities, marks), torch.arange(160))
    assert errors[0, 1 : len(marks)].isinf().all()
    assert errors[0, len(marks) :].isfinite().all()
    assert errors[1:].isfinite().all()
    assert errors[:, 0].sum() == pytest.approx(1)
    tables = tuple(TableShape(20, rank) for _ in vocabulary_ranges(160))
    found = expanded(
        reduce_embedding(TokenRows(embedding.double(), gram, probabilities, marks), torch.arange(160), tables), width
    )
    torch.testing.assert_close(found[marks], embedding[marks].double(), rtol=0, atol=1e-9)
    part = vocabulary_ranges(160)[0]
    weighing = (gram.numpy(), probabilities[part].numpy())
    _, whole = singular_values(embedding[part].double().numpy(), *weighing)
    kept, _ = np.linalg.qr(whole[marks].T)
    least = np.linalg.svd(whole - whole @ kept @ kept.T, compute_uv=False)[rank - len(marks) :]
    _, missed = singular_values((embedding - found)[part].double().numpy(), *weighing)
    assert (missed**2).sum() == pytest.approx((least**2).sum(), abs=1e-9 * (whole**2).sum())
    total = sum(
        (singular_values(embedding[each].double().numpy(), gram.numpy(), probabilities[each].numpy())[0] ** 2).sum()
        for each in vocabulary_ranges(160)
    )
    assert errors[0, rank] * total == pytest.approx((least**2).sum(), abs=1e-9 * (whole**2).sum())


def test_marks_that_are_alike_take_one_direction_and_marks_without_a_row_none() -> None:
    embedding, gram, probabilities = problem(1600, 32, 0)
    embedding[1] = 2 * embedding[0]
    embedding[2:9] = 0
    errors = range_errors(TokenRows(embedding, gram, probabilities, range(9)), torch.arange(1600))
    assert errors.isfinite().all()
    many = range_errors(TokenRows(embedding, gram, probabilities, range(50)), torch.arange(1600))
    assert many[0, 1:-1].isinf().all()
    assert smaller_tables(many, 1600, 0.8)[0].rank == 32  # the whole range stays


def weighted_error(rows: TokenRows, order: torch.Tensor, share: float) -> float:
    """Return the least error of ranks that leave this share of the embedding."""
    errors = range_errors(rows, order)
    tables = smaller_tables(errors, len(order), share)
    return sum(float(errors[index, table.rank]) for index, table in enumerate(tables))


@pytest.mark.parametrize("marks", [(), (7, 900, 1599), range(900)])
def test_tokens_move_to_ranges_that_hold_them(marks: Any) -> None:
    """Rows of two kinds that alternate have half the rank once each kind has ranges of its own."""
    generator = torch.Generator().manual_seed(0)
    bases = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q.view(32, 2, 16)
    embedding = torch.stack([torch.randn(800, 16, generator=generator) @ bases[:, kind].T for kind in (0, 1)], dim=1)
    _, gram, probabilities = problem(1600, 32, 0)
    rows = TokenRows(embedding.view(1600, 32), gram, probabilities, marks)
    order = order_of_tokens(rows)
    assert order.sort().values.tolist() == list(range(1600))
    if len(marks) <= 200:
        assert set(marks) <= set(order[:200].tolist()), "marks are in the range of the highest rank"
    before = weighted_error(rows, torch.arange(1600), 0.7)
    assert weighted_error(rows, order, 0.7) < (0.3 if len(marks) < 10 else 1) * before + 1e-12
    reduced = reduce_embedding(rows, order, smaller_tables(range_errors(rows, order), 1600, 0.7))
    found = expanded(reduced, 32)
    assert torch.equal(order[reduced[f"{MODULES['embedding']}.places"]], torch.arange(1600))
    torch.testing.assert_close(found[list(marks)], rows.weight[list(marks)], rtol=0, atol=1e-5)


def test_tokens_stay_where_all_ranges_are_alike() -> None:
    embedding, gram, probabilities = problem(4, 8, 0)
    assert order_of_tokens(TokenRows(embedding, gram, probabilities)).tolist() == [0, 1, 2, 3]


def test_the_modelling_file_equals_the_expanded_embedding() -> None:
    embedding, gram, probabilities = problem(100, 16, 0)
    tables = tuple(
        TableShape(part.stop - part.start, rank)
        for part, rank in zip(vocabulary_ranges(100), (16, 3, 16, 5, 1, 2, 16, 4), strict=True)
    )
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    reduced = reduce_embedding(TokenRows(embedding, gram, probabilities), order, tables)
    module = OneshotEmbedding([{"rows": table.rows, "rank": table.rank} for table in tables], 16)
    module.load_state_dict({name.removeprefix("model.embed_tokens."): value for name, value in reduced.items()})
    whole, ids, states = expanded(reduced, 16), torch.arange(100).view(4, 25), torch.randn(2, 3, 16)
    torch.testing.assert_close(module(ids), functional.embedding(ids, whole))
    holder = torch.nn.Module()
    holder.embed_tokens = module
    head = OneshotTiedHead(holder)
    torch.testing.assert_close(head(states), states @ whole.T, rtol=1e-4, atol=1e-4)
    assert not list(head.parameters())


@pytest.fixture(scope="module")
def rarely_wide(save_model: Any) -> Path:
    """Return a tied model whose second half of the vocabulary lies in few dimensions."""
    model = build_model(hidden=HIDDEN, width=256, vocabulary=VOCABULARY, tied=True)
    rare = model.get_input_embeddings().weight.data[VOCABULARY // 2 :]
    directions = torch.randn(HIDDEN, RARE_RANK, generator=torch.Generator().manual_seed(0))
    rare.copy_(rare @ torch.linalg.qr(directions).Q @ torch.linalg.qr(directions).Q.T)
    folder: Path = save_model(model)
    return folder


def ranks(folder: Path) -> list[int]:
    return [table["rank"] for table in json.loads((folder / "config.json").read_text())["embedding"] or []]


def test_a_plan_reduces_the_ranges_of_low_rank(rarely_wide: Path, make_config: MakeConfig) -> None:
    """The rare half is free, the range of a chat's marks stays, and the report counts the checkpoint's parameters."""
    config = make_config(rarely_wide, form="per-layer", sparsity=0.2)
    report = compress(config)
    found = ranks(Path(config.output))
    assert found[0] == HIDDEN
    assert all(rank <= 2 * RARE_RANK for rank in found[4:])
    stored: dict[str, torch.Tensor] = {}
    for path in Path(config.output).glob("*.safetensors"):
        stored |= load_file(path)
    assert sum(tensor.numel() for tensor in stored.values()) == report.stored_parameters["compressed"]
    assert report.sparsity["reached"] == pytest.approx(0.2, abs=0.02)
    model = load_model(Path(config.output), device=CPU, dtype=torch.float32)
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == report.stored_parameters["compressed"]
    generated = model.generate(TOKEN_IDS, attention_mask=torch.ones_like(TOKEN_IDS), max_new_tokens=3, do_sample=False)
    assert generated.shape == (2, 27)


def test_the_embedding_takes_what_the_smallest_ffns_leave(rarely_wide: Path, make_config: MakeConfig) -> None:
    """Before a profile is measured, equal layers and equal ranks stand for the plan; they must not refuse a target."""
    config = make_config(rarely_wide, form="per-layer", sparsity=0.2, round_to=240, heads="none", ranks="none")
    with pytest.raises(OneshotError, match="this recipe gets down to"):
        compress(replace(config, method=replace(config.method, embedding="none")))
    report = compress(config)
    assert report.sparsity["reached"] == pytest.approx(0.2, abs=0.02)
    assert max(ranks(Path(config.output))[4:]) < HIDDEN
    with pytest.raises(OneshotError, match="this recipe gets down to"):
        compress(replace(config, target=replace(config.target, sparsity=0.9), output=config.output + "-small"))


def test_nothing_is_lost_at_a_sufficient_rank(rarely_wide: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    """The logits equal the dense model's if only the embedding is reduced."""
    config = make_config(rarely_wide, form="per-layer", sparsity=0.1)
    report = compress(config)
    assert all(layer["intermediate_size"] == 256 for layer in report.plan["layers"])
    assert min(ranks(Path(config.output))) == RARE_RANK
    with torch.inference_mode():
        wanted, found = (
            load_model(folder, device=CPU, dtype=torch.float32)(TOKEN_IDS).logits
            for folder in (rarely_wide, Path(config.output))
        )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max()))


def test_a_profile_has_the_costs_of_the_embedding(rarely_wide: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    """An earlier profile gives the same plan as the run's own profile."""
    folder = tmp_path / "profile"
    found = profile(make_config(rarely_wide, output=str(folder), sparsity=0.0))
    again = load_profile(folder)
    for name in (
        "embedding_gram",
        "token_probabilities",
        "embedding_order",
        "embedding_errors",
        "embedding_probes",
    ):
        assert torch.equal(getattr(found, name), getattr(again, name))
    assert float(found.token_probabilities.sum()) == pytest.approx(1.0, abs=1e-4)
    assert found.embedding_probes.min() >= 0
    config = make_config(rarely_wide, form="per-layer", output=str(tmp_path / "own"))
    compress(config)
    compress(replace(config, profile=str(folder), output=str(tmp_path / "earlier")))
    assert ranks(tmp_path / "own") == ranks(tmp_path / "earlier") != []


def test_probes_have_the_divergence_of_the_whole_model(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Against transformers' model with the reduced embedding at both ends, on the sequences of the probes."""
    from transformers import AutoModelForCausalLM

    checkpoint = make_checkpoint(vocabulary=VOCABULARY, tied=True)
    config = make_config(checkpoint, num_sequences=20)  # enough for all probes
    found = profile(config)
    dense, reduced = (AutoModelForCausalLM.from_pretrained(checkpoint).eval() for _ in range(2))
    weight = reduced.get_input_embeddings().weight
    probes = table_probes(found.embedding_errors, VOCABULARY)
    assert torch.equal(found.embedding_probes[:, 0], torch.tensor([lost for _, lost in probes], dtype=torch.float64))
    assert len(probes) > 1, "several must lose enough"
    assert all(lost > 1e-3 for _, lost in probes), "a probe must lose something"
    marks = special_tokens(load_tokenizer(checkpoint), VOCABULARY)
    rows = TokenRows(weight.data, found.embedding_gram, found.token_probabilities, marks)
    of_text, of_probes = profiled_tokens(config)
    kinds = (of_text[:TABLE_PROBES], of_probes[-NUM_KINDS:])  # each counts a half
    for (tables, _), divergence in zip(probes, found.embedding_probes[:, 1].tolist(), strict=True):
        weight.data = expanded(reduce_embedding(rows, found.embedding_order, tables), HIDDEN)
        expected = 0.0
        for ids in kinds:
            with torch.no_grad():
                first, second = (
                    model(ids, use_cache=False).logits.double().log_softmax(-1) for model in (dense, reduced)
                )
            lost = functional.kl_div(second, first, log_target=True, reduction="sum") / ids.numel()
            expected += float(lost) / len(kinds)
        assert divergence == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "granite"])  # two multiply the rows of the embedding
def test_rows_also_cost_what_the_first_layer_makes_of_them(
    family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Output curvature adds to the Gram what the stock model diverges by with noise on the rows that it reads."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(**CASES[family].options | {"tied": True})
    made = {}
    for curvature in ("fisher", "none"):
        config = make_config(folder, form="per-layer", curvature=curvature, output=str(tmp_path / curvature))
        made[curvature] = profile(config).embedding_gram
    text, noise = calibration_tokens(config), 1e-3
    dense, noisy = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval() for _ in range(2))
    read = noisy.get_input_embeddings()
    rows = read.weight.data
    noisy.get_output_embeddings().weight, read.weight = nn.Parameter(rows), nn.Parameter(rows)
    found = []
    with torch.no_grad():
        wanted = dense(text, use_cache=False).logits.log_softmax(-1)
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            read.weight.data = rows + noise * torch.randn(rows.shape, generator=generator, dtype=torch.float64)
            other = noisy(text, use_cache=False).logits.log_softmax(-1)
            found.append(float(functional.kl_div(other, wanted, log_target=True, reduction="sum")) / text.numel())
    predicted = 0.5 * noise**2 * float((made["fisher"] - made["none"]).trace())
    assert predicted > 0
    assert np.mean(found) == pytest.approx(predicted, rel=0.3)


def test_an_interrupted_run_keeps_the_embedding(rarely_wide: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    from test_resume import contents, interrupted_report, undisturbed

    config = make_config(rarely_wide, form="per-layer")
    wanted = undisturbed(config)
    interrupted_report(config, 1)
    assert contents(Path(config.output)) == wanted
    assert ranks(Path(config.output))


@pytest.mark.parametrize(
    ("changes", "tied", "named"),
    [
        ({}, True, "--form per-layer"),
        ({"form": "per-layer", "hidden": "pca", "hidden_size": 16}, True, "hidden=none"),
        ({"form": "per-layer", "allocation": "error"}, True, "allocation=sensitivity"),
        ({"form": "per-layer", "curvature": "none"}, False, "needs output curvature"),
    ],
)
def test_impossible_ranks_are_refused(
    changes: dict[str, Any], tied: bool, named: str, make_config: MakeConfig, make_checkpoint: MakeCheckpoint
) -> None:
    checkpoint = make_checkpoint(tied=tied)
    with pytest.raises(OneshotError, match=named):
        compress(make_config(checkpoint, **{"embedding": "low-rank", "sparsity": 0.2} | changes))


@pytest.mark.parametrize("changes", [{"embedding": "none", "form": "per-layer"}, {"form": "stock"}])
def test_the_embedding_stays_whole(changes: dict[str, Any], rarely_wide: Path, make_config: MakeConfig) -> None:
    config = make_config(rarely_wide, sparsity=0.1, **changes)
    compress(config)
    names = {name for path in Path(config.output).glob("*.safetensors") for name in load_file(path)}
    assert "model.embed_tokens.weight" in names


def test_a_given_profile_decides_whether_the_embedding_has_a_price(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Plan ranks of the vocabulary beside a head of its own with output curvature alone, also where ranks are none."""
    folder = make_checkpoint()
    for curvature in ("none", "fisher"):
        profile(make_config(folder, form="per-layer", curvature=curvature, output=str(tmp_path / curvature)))
    asked = make_config(folder, form="per-layer", sparsity=0.3, embedding="low-rank", ranks="none")
    with pytest.raises(PlanError, match="needs output curvature"):
        compress(replace(asked, profile=str(tmp_path / "none")))
    report = compress(replace(asked, profile=str(tmp_path / "fisher")))
    assert report.plan["embedding"] or report.plan["output_head"]
