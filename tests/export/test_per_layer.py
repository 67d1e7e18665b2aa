"""The per-layer form: the same model as the stock form if both can state it, and a complete transformers model."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import start, wait
from factories import MakeCheckpoint, MakeConfig, MakeResult, build_model, module_of_the_plugin
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import DynamicCache

from oneshot import OneshotError
from oneshot.checkpoint import Checkpoint
from oneshot.compression.fold import head_columns
from oneshot.compression.inner_heads import query_key_subspaces, value_subspaces
from oneshot.errors import PlanError
from oneshot.evaluation import evaluate, load_model
from oneshot.evaluation.models import cached
from oneshot.export import open_folder
from oneshot.export.per_layer import MODELLING_FILE
from oneshot.linalg.low_rank import query_key_maps, strongest_rotary_pairs, value_subspace
from oneshot.pipeline import compress

CPU = torch.device("cpu")
TOKEN_IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(1))
PARTS: dict[str, dict[str, Any]] = {
    "groups": {"recipe": "group-pca", "group_size": 1, "hidden_size": 24},
    "one-subspace": {"recipe": "group-pca", "group_size": 0, "hidden_size": 24},
    "values": {"form": "per-layer", "value_size": 6, "sparsity": 0.2},
    "queries-keys": {"form": "per-layer", "query_key_size": 4, "sparsity": 0.2},
    "all": {
        "recipe": "group-pca", "group_size": 3, "hidden_size": 26, "ffn": "id", "correction": "two-stream",
        "query_key_size": 6, "value_size": 4, "sparsity": 0.4,
    },
}  # fmt: skip


SaveModel = Callable[..., Path]


def logits(folder: Path, ids: torch.Tensor = TOKEN_IDS) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(folder, device=CPU, dtype=torch.float32)(ids).logits


@pytest.mark.parametrize("recipe", ["oneshot", "stat"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        {"attention_bias": True, "mlp_bias": True},
        {"family": "qwen2"},
        {"family": "qwen3", "head_dim": 8},
        {"family": "phi3"},
        {"family": "seed_oss", "head_dim": 8, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ],
    ids=["llama", "tied", "biases", "qwen2", "qwen3", "phi3", "seed_oss"],
)
def test_both_forms_of_one_plan_give_equal_logits(
    recipe: str,
    options: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(**options)
    reports = {}
    for form in ("stock", "per-layer"):
        reports[form] = compress(
            make_config(folder, recipe=recipe, form=form, allocation="uniform", output=str(tmp_path / form))
        )
    assert reports["stock"].stored_parameters == reports["per-layer"].stored_parameters
    stock, per_layer = logits(tmp_path / "stock"), logits(tmp_path / "per-layer")
    torch.testing.assert_close(per_layer, stock, rtol=0, atol=1e-6 * float(stock.abs().max()))


@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_norm_model_without_cuts_keeps_its_logits(
    tied: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(family="opt", tied=tied)
    config = make_config(folder, form="per-layer", sparsity=0.0)
    compress(config)
    wanted = logits(folder)
    torch.testing.assert_close(logits(Path(config.output)), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def test_removing_heads_of_a_family_with_fixed_heads_is_refused_in_its_stock_form(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Ask for fewer heads of OPT, alone and beside the FFN, by one width and by a profile."""
    folder = make_checkpoint(family="opt", groups=4)
    for options in ({}, {"ffn": "none"}, {"allocation": "uniform"}):
        config = make_config(folder, heads="id", sparsity=0.1, **options)
        with pytest.raises(PlanError, match=r"^OPT's own layer has heads .* add --form per-layer, or --set heads=none"):
            compress(config)
        assert not Path(config.output).exists()


@pytest.mark.parametrize("allocation", ["uniform", "sensitivity"])
@pytest.mark.parametrize("correction", ["none", "same-layer", "two-stream"])
def test_silent_heads_of_opt_fold_without_loss(
    correction: str, allocation: str, save_model: SaveModel, make_config: MakeConfig
) -> None:
    """Heads that write nothing are chosen and removed: the logits stay, from fewer rows and columns."""
    model, silent = build_model("opt", groups=4), torch.tensor([0, 2])
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.self_attn.out_proj.weight[:, head_columns(silent, 8)] = 0
    folder = save_model(model)
    removed = 2 * 2 * 8 * (3 * 33 + 32)  # layers × heads × rows with biases and columns
    config = make_config(
        folder,
        form="per-layer",
        heads="id",
        ffn="none",
        allocation=allocation,
        correction=correction,
        **({} if correction == "none" else {"damping": 1e-7}),
        parameters=Checkpoint(folder).num_parameters - removed + 400 - 5 * 32 - 64,  # a head's bias, no norm's, no row
        num_sequences=64,
    )
    compress(config)
    tensors = load_file(Path(config.output) / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (16, 32)
    assert tensors["model.layers.1.self_attn.o_proj.weight"].shape == (32, 16)
    wanted = logits(folder)
    torch.testing.assert_close(logits(Path(config.output)), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("form", ["per-layer", "gguf"])
@pytest.mark.parametrize("options", [{}, {"attention_bias": True}, {"mlp_bias": True}], ids=str)
def test_the_heads_of_a_llama_need_not_divide_its_hidden_size(
    options: dict[str, Any], form: str, save_model: SaveModel, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A silent head of four is removed from each layer without loss. The per-layer result is also an input."""
    model, silent = build_model(groups=4, **options), torch.tensor([1])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, head_columns(silent, 8)] = 0
    folder = save_model(model)
    removed = 2 * 8 * (4 * 32 + 3 * model.config.attention_bias)  # layers × rows
    settings: dict[str, Any] = {
        "form": form,
        "heads": "id",
        "ffn": "none",
        "correction": "none",
        "allocation": "uniform",
        "parameters": Checkpoint(folder).num_parameters - removed,
    }
    config = make_config(folder, **settings)
    compress(config)
    layers = json.loads((Path(config.output) / "oneshot_report.json").read_text())["plan"]["layers"]
    assert [layer["num_attention_heads"] for layer in layers] == [3, 3]
    wanted, places = logits(folder), [config.output]
    if form == "per-layer":
        again = make_config(Path(config.output), form=form, sparsity=0.0, output=str(tmp_path / "again"))
        compress(again)
        places.append(again.output)
    (scratch := tmp_path / "scratch").mkdir()
    for place in places:
        torch.testing.assert_close(logits(open_folder(place, scratch)), wanted, rtol=0, atol=1e-5)


@pytest.fixture(params=PARTS)
def compressed(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint, make_result: MakeResult) -> Path:
    return make_result(make_checkpoint(tied=request.param != "values"), **PARTS[request.param])


def test_transformers_loads_it_with_remote_code_and_saves_it_again(compressed: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(compressed, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    with torch.inference_mode():
        first = model(TOKEN_IDS).logits
    torch.testing.assert_close(first, logits(compressed), rtol=0, atol=0)
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / MODELLING_FILE.name).read_text() == MODELLING_FILE.read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    with torch.inference_mode():
        torch.testing.assert_close(again(TOKEN_IDS).logits, first, rtol=0, atol=0)


def test_nothing_runs_without_consent(compressed: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(compressed, trust_remote_code=False)


def test_older_spellings_and_defaults_of_a_config_survive(
    own_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Write a config as on the hub: `rope_theta` and `rope_scaling` at the top, no head size, no activation."""
    folder = own_checkpoint()
    written = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "head_dim", "dtype", "hidden_act", "attention_dropout"):
        written.pop(name, None)
    written |= {
        "torch_dtype": "float32",
        "rope_theta": 777.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        },
    }
    (folder / "config.json").write_text(json.dumps(written))
    config = make_config(folder, form="per-layer", sparsity=0.0)
    compress(config)
    torch.testing.assert_close(logits(Path(config.output)), logits(folder), rtol=1e-5, atol=1e-6)


def test_it_is_not_compressed_twice(compressed: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(OneshotError, match="the model it came from"):
        compress(make_config(compressed, output=str(tmp_path / "twice")))


def test_the_cache_changes_nothing(compressed: Path) -> None:
    model = load_model(compressed, device=CPU, dtype=torch.float32)
    prompt = TOKEN_IDS[:1, :5]
    settings = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 1}
    with_cache = model.generate(prompt, use_cache=True, **settings)
    assert with_cache.shape == (1, 13)
    assert torch.equal(model.generate(prompt, use_cache=False, **settings), with_cache)
    with torch.inference_mode():
        whole = model(with_cache, use_cache=False).logits
        half = model(with_cache[:, :7], use_cache=True)
        rest = model(with_cache[:, 7:], **cached(half)).logits
    torch.testing.assert_close(torch.cat((half.logits, rest), 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cache", "past_key_values", "a_name_to_come"])
def test_a_layer_takes_its_cache_by_any_name(name: str, compressed: Path) -> None:
    """As it is called since transformers 5.24, and before."""
    model = load_model(compressed, device=CPU, dtype=torch.float32)
    layer, cache = model.model.layers[0], DynamicCache()
    states = torch.randn(1, 3, layer.hidden_size)
    layer(states, position_embeddings=model.model.rotary_emb(states, torch.arange(3)[None]), **{name: cache})
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_and_attention_kernels_change_nothing(compressed: Path, attention: str) -> None:
    model = load_model(compressed, device=CPU, dtype=torch.float32)
    model.set_attn_implementation(attention)
    long, short = TOKEN_IDS[:1, :12], TOKEN_IDS[1:, :7]
    batch = torch.cat((long, torch.cat((torch.ones(1, 5, dtype=torch.int64), short), 1)))
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    settings = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 1}
    together = model.generate(batch, attention_mask=mask, **settings)
    assert torch.equal(together[:1], model.generate(long, **settings))
    assert torch.equal(together[1:, 5:], model.generate(short, **settings))


def test_learned_positions_follow_the_cache_and_the_padding(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(family="opt"), recipe="group-pca", hidden_size=24, query_key_size=5)
    compress(config)
    test_the_cache_changes_nothing(Path(config.output))
    test_padding_and_attention_kernels_change_nothing(Path(config.output), "sdpa")


@torch.inference_mode()
def test_learned_positions_count_from_the_first_token_behind_padding(
    make_checkpoint: MakeCheckpoint, make_result: MakeResult
) -> None:
    """As in OPT's own class, if a caller gives a mask and no positions; with a cache also."""
    folder = make_result(make_checkpoint(family="opt"), form="per-layer", sparsity=0.1)
    model = load_model(folder, device=CPU, dtype=torch.float32)
    padded = torch.cat((torch.ones(2, 5, dtype=torch.int64), TOKEN_IDS), 1)
    mask = torch.ones_like(padded)
    mask[:, :5] = 0
    wanted = model(TOKEN_IDS).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 5:], wanted, rtol=0, atol=1e-5)
    before = model(padded[:, :-3], attention_mask=mask[:, :-3], use_cache=True)
    after = model(padded[:, -3:], attention_mask=mask, **cached(before))
    torch.testing.assert_close(after.logits, wanted[:, -3:], rtol=0, atol=1e-5)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("rotary", "form"),
    [
        (YARN, "per-layer"),
        (YARN, "gguf"),  # whose importance matrix and whose evaluation are of the same class
        (DYNAMIC, "per-layer"),
        ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **LONG}, "per-layer"),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else value,
)
def test_heads_differ_by_layer_beside_rotary_positions_of_every_type(
    rotary: dict[str, Any], form: str, save_model: SaveModel, make_config: MakeConfig
) -> None:
    """Some types read the number of heads, which transformers refuses where layers have their own."""
    model, silent = build_model(groups=4, rope_parameters=rotary), torch.tensor([0, 2])
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, head_columns(silent, 8)] = 0
    folder = save_model(model)
    removed = 2 * 4 * 8 * 32  # heads × linears × rows × columns
    config = make_config(
        folder,
        form=form,
        heads="id",
        ffn="none",
        correction="none",
        parameters=Checkpoint(folder).num_parameters - removed,
        num_sequences=64,
    )
    compress(config)
    layers = json.loads((Path(config.output) / "oneshot_report.json").read_text())["plan"]["layers"]
    assert [layer["num_attention_heads"] for layer in layers] == [2, 4]
    [result] = evaluate([config.output], [config.text.calibration], sequence_length=24, max_windows=2, decode_tokens=0)
    [dense] = evaluate([str(folder)], [config.text.calibration], sequence_length=24, max_windows=2, decode_tokens=0)
    assert list(result.perplexity.values()) == pytest.approx(list(dense.perplexity.values()), rel=1e-5)
    if form == "per-layer":  # vLLM reads the config by the plugin's class
        of_the_plugin = module_of_the_plugin("config").OneshotConfig.from_pretrained(config.output)
        assert of_the_plugin.layers == load_model(Path(config.output), device=CPU, dtype=torch.float32).config.layers


def test_the_modelling_file_imports_only_public_packages() -> None:
    modules = set()
    for node in ast.walk(ast.parse(MODELLING_FILE.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    assert modules == {"copy", "inspect", "typing", "torch", "huggingface_hub", "transformers"}


def test_the_evaluator_reads_it(compressed: Path, text_file: Path) -> None:
    report = json.loads((compressed / "oneshot_report.json").read_text())
    (result,) = evaluate(
        [str(compressed)], [str(text_file)], sequence_length=32, max_windows=2, decode_tokens=2, prefill_tokens=8
    )
    assert result.stored_parameters == report["stored_parameters"]["compressed"]
    assert result.layer_parameters == report["layer_parameters"]["compressed"]
    assert result.kv_bytes_per_token == report["kv_bytes_per_token"]["compressed"]
    model = load_model(compressed, device=CPU, dtype=torch.float32)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    biases = sum(module.bias.numel() for module in linears if module.bias is not None)
    maps = [one for of_table in (model.model.embed_tokens, model.lm_head) for one in getattr(of_table, "maps", ())]
    read = [*linears, *(one for one in maps if hasattr(one, "weight")), *getattr(model.lm_head, "tables", ())]
    assert result.flops_per_token == 2 * (sum(module.weight.numel() for module in read) + biases)


def test_the_evaluators_command_reads_it(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path, tmp_path: Path
) -> None:
    report = compress(make_config(make_checkpoint(), recipe="magnitude", form="per-layer", allocation="uniform"))
    numbers = tmp_path / "numbers.json"
    command = [report.config["output"], f"--text={text_file}"]
    command += ["--decode-tokens=0", "--sequence-length=32", "--max-windows=1", f"--output={numbers}"]
    assert wait([start("evaluate", [command], tmp_path / "told")]) == [0], (tmp_path / "told").read_text()
    (written,) = json.loads(numbers.read_text())["evaluations"]
    assert written["stored_parameters"] == report.stored_parameters["compressed"]


def test_fewer_rotary_pairs_give_a_model_without_the_others(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Compare with the stock model after the rows of the dropped pairs are set to zero."""
    folder = make_checkpoint(attention_bias=True)
    config = make_config(folder, form="per-layer", query_key_size=4, ffn="none", correction="none")
    compress(config)
    small = load_model(Path(config.output), device=CPU, dtype=torch.float32)
    stock = load_model(folder, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        for layer, smaller in zip(stock.model.layers, small.model.layers, strict=True):
            pairs = smaller.self_attn.rotary_pairs
            assert pairs.shape == (2, 2)
            for group in range(2):
                dropped = [pair for pair in range(4) if pair not in pairs[group].tolist()]
                rows = torch.tensor(dropped + [pair + 4 for pair in dropped])
                for parameter in layer.self_attn.k_proj.parameters():
                    parameter[8 * group + rows] = 0
    with torch.inference_mode():
        torch.testing.assert_close(small(TOKEN_IDS).logits, stock(TOKEN_IDS).logits, rtol=1e-4, atol=1e-5)


def rows_of(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -1.5, shape[-1], dtype=torch.float64)
    mixed = torch.linalg.qr(torch.randn(shape[-1], shape[-1], dtype=torch.float64, generator=generator))[0]
    return torch.randn(*shape, dtype=torch.float64, generator=generator) * spread @ mixed


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_the_value_subspace_reaches_the_best_rank(seed: int, size: int) -> None:
    """Compare ‖Z W − Z Q E W‖ with the tail of the singular values of Z W (Eckart and Young)."""
    heads, weight = rows_of(60, 8, seed=seed), rows_of(8, 20, seed=seed + 1)
    basis, embedding = value_subspace(heads.T @ heads, weight @ weight.T, size)
    torch.testing.assert_close(basis.T @ basis, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-9)
    lost = float((heads @ weight - heads @ basis @ embedding @ weight).norm())
    best = torch.linalg.svdvals(heads @ weight)[size:].square().sum().sqrt()
    assert lost == pytest.approx(float(best), rel=1e-5, abs=1e-4)


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_query_key_maps_reach_the_best_rank(seed: int, size: int) -> None:
    queries, keys = rows_of(50, 8, seed=seed), rows_of(50, 8, seed=seed + 1)
    query_map, key_map = query_key_maps(queries.T @ queries, keys.T @ keys, size)
    assert query_map.shape == key_map.shape == (size, 8)
    scores = keys @ queries.T
    lost = float((scores - (keys @ key_map.T) @ (queries @ query_map.T).T).norm())
    best = torch.linalg.svdvals(scores)[size:].square().sum().sqrt()
    assert lost == pytest.approx(float(best), rel=1e-5, abs=1e-4)


def test_the_rotary_pairs_with_the_least_score_energy_are_dropped() -> None:
    """Compare with all choices of two pairs out of four, for independent queries and keys."""
    import itertools

    queries, keys = rows_of(3, 4000, 8, seed=0), rows_of(4000, 8, seed=9)
    energy = queries.square().mean(1), keys.square().mean(0)
    chosen = strongest_rotary_pairs(*energy, 2).tolist()

    def kept(pairs: tuple[int, ...]) -> float:
        columns = [*pairs, *(pair + 4 for pair in pairs)]
        pair_energy = [
            float((energy[0][:, c] + energy[0][:, c + 4]).sum() * (energy[1][c] + energy[1][c + 4])) for c in pairs
        ]
        assert len(columns) == 4
        return sum(pair_energy)

    assert tuple(chosen) == max(itertools.combinations(range(4), 2), key=kept)


@given(st.integers(0, 10**6), st.sampled_from([(4, 4), (4, 2), (4, 1)]))
def test_values_inside_a_subspace_lose_nothing(seed: int, heads_and_groups: tuple[int, int]) -> None:
    heads, groups = heads_and_groups
    generator = torch.Generator().manual_seed(seed)
    spans = torch.randn(groups, 6, 3, dtype=torch.float64, generator=generator)
    inside = torch.randn(heads, 50, 3, dtype=torch.float64, generator=generator)
    consumed = torch.cat([inside[head] @ spans[head * groups // heads].T for head in range(heads)], dim=1)
    weight = rows_of(10, 6 * heads, seed=seed + 50)
    for correct in (False, True):
        bases, folded = value_subspaces(
            weight, consumed.T @ consumed, num_groups=groups, head_dim=6, size=3, correct=correct, damping=0.0
        )
        assert bases.shape == (groups, 6, 3)
        torch.testing.assert_close(consumed @ folded.T, consumed @ weight.T, rtol=0, atol=1e-3)  # of values near 10
        outside = torch.block_diag(*(bases[head * groups // heads] for head in range(heads)))
        torch.testing.assert_close(folded @ outside @ outside.T, folded, rtol=0, atol=1e-8)


def test_correcting_values_over_all_heads_is_never_worse() -> None:
    consumed = rows_of(400, 24, seed=3)
    weight = rows_of(10, 24, seed=4)
    errors = {}
    for correct in (False, True):
        _, folded = value_subspaces(
            weight, consumed.T @ consumed, num_groups=2, head_dim=6, size=3, correct=correct, damping=1e-6
        )
        errors[correct] = float((consumed @ (folded - weight).T).norm())
    assert 0 < errors[True] < errors[False]


def test_maps_of_queries_and_keys_without_rotation_are_per_head() -> None:
    queries, keys = rows_of(3, 50, 8, seed=1), rows_of(3, 50, 8, seed=2)
    grams = [rows.mT @ rows for rows in (queries, keys)]
    query_maps, key_maps, pairs = query_key_subspaces(*grams, size=8, rotary=False)
    assert pairs is None
    scores = (keys @ key_maps.mT) @ (queries @ query_maps.mT).mT
    torch.testing.assert_close(scores, keys @ queries.mT, rtol=0, atol=1e-6)


def test_the_tiny_models_are_not_trivial() -> None:
    """Check that logits differ from token to token, so that equal logits in the tests above are evidence."""
    model = build_model()
    with torch.inference_mode():
        values = model(TOKEN_IDS).logits
    assert float(values.std()) > 0.1
