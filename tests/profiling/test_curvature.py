"""Output curvature: against autograd through the whole stock model, and as a price of what is removed."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens
from families.cases import CASES, decoders, variants
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from oneshot.cli.profile import main
from oneshot.compression.curvature import SHRINKAGE
from oneshot.config import Config
from oneshot.errors import ProfileError
from oneshot.export import form_of
from oneshot.families import FAMILIES
from oneshot.pipeline import compress, profile
from oneshot.profiling import load_profile
from oneshot.profiling.curvature import LARGEST_GRADIENT, SCORES_TOGETHER, clipped, sequences_together
from oneshot.run import open_run
from oneshot.stream.output_head import OutputHead, random_signs

Rows = np.ndarray[Any, Any]
DOWNS = ("mlp.down_proj", "feed_forward.down_proj", "feed_forward.w2")  # of an FFN
OTHER_DOWNS = ("fc2", "mlp.fc2", "mlp.c_proj", "mlp.dense_4h_to_h", "shared_mlp.output_linear")


def is_carried(family: str, layer: Any) -> bool:
    """Return whether no linear before the FFN of a layer of the stock class may have a rank."""
    return family in ("falcon_h1", "gemma4_text", "qwen3_5_text", *WITHOUT_RANKS) or not getattr(
        layer, "self_attn", None
    )


def first(output: Any) -> torch.Tensor:
    """Return what a module writes; gpt-oss's also returns its gates."""
    written: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return written


def whole_model_gradients(
    folder: str, token_ids: torch.Tensor, seed: int, *, norms_inside: bool
) -> list[dict[str, Rows]]:
    """Return gradients `(sequences, length, n)` of every layer, by one backward pass through all of it in float64.

    The last gradients are of the states before the first layer, without what layers read beside the stream.

    The gradients behind the logits are random signs of the roots of probabilities, less their mean. With norms inside,
    gradients of writers are by outputs in units of their root mean square.
    """
    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval().requires_grad_(False)
    model.get_input_embeddings().requires_grad_()
    kept: list[dict[str, torch.Tensor]] = []
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    before: list[torch.Tensor] = []

    def apart(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        before.append(inputs[0].clone())
        before[0].retain_grad()
        return before[0], *inputs[1:]

    layers[0].register_forward_pre_hook(apart)
    for layer in layers:
        own: dict[str, torch.Tensor] = {}
        kept.append(own)

        def keep(name: str, tensor: torch.Tensor, own: dict[str, torch.Tensor] = own) -> None:
            tensor.retain_grad()
            own[name] = tensor

        modules = dict(layer.named_modules())
        paths = ("experts", *DOWNS, *OTHER_DOWNS, "mlp")
        linears = {"ffn": next(modules[path] for path in paths if path in modules)}
        if "post_feedforward_layernorm_2" in modules:  # a norm of experts alone, and one of their sum with an FFN
            modules["post_feedforward_layernorm"].register_forward_pre_hook(
                lambda _, inputs, keep=keep: keep("sum", inputs[0])
            )
        if not is_carried(model.config.model_type, layer):
            attention = layer.self_attn
            linears |= {"output": getattr(attention, "o_proj", None) or attention.out_proj}
            if hasattr(attention, "qkv_proj"):
                linears |= {"qkv": attention.qkv_proj}
            else:
                linears |= {"q": attention.q_proj, "k": attention.k_proj}
        for name, linear in linears.items():
            linear.register_forward_hook(lambda _, inputs, output, keep=keep, name=name: keep(name, first(output)))
    logits = model(token_ids, use_cache=False).logits
    loss = torch.zeros((), dtype=torch.float64)
    for index, own_logits in enumerate(logits):
        (length, vocabulary), probabilities = own_logits.shape, own_logits.detach().softmax(-1)
        signs = random_signs(length, vocabulary, seed + index).double()
        of_tokens = torch.stack([signs[length + row : length + row + vocabulary] for row in range(length)])
        roots = of_tokens * probabilities.sqrt()
        behind = signs[:length, None] * (roots - probabilities * roots.sum(-1, keepdim=True))
        loss = loss + (behind * own_logits).sum()
    loss.backward()
    found, config = [], SimpleNamespace(**model.config.to_dict())
    for own in kept:
        gradients = {name: tensor.grad.numpy() for name, tensor in own.items() if tensor.grad is not None}
        for name in gradients.keys() & {"output", "ffn"} if norms_inside else ():
            normed = [own[name], own["sum"]] if name == "ffn" and "sum" in own else [own[name]]
            for written in normed:
                squares = written.detach().square().mean(-1, keepdim=True) + config.rms_norm_eps
                gradients[name] *= squares.sqrt().view(*gradients[name].shape[:-1], 1).numpy()
        gradients.pop("sum", None)
        if "output" not in gradients:
            found.append(gradients)
            continue
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = head_dim * (config.num_attention_heads + config.num_key_value_heads)  # of queries and keys
        fused = gradients.pop("qkv", None)
        queries_keys = np.concatenate((gradients.pop("q"), gradients.pop("k")), -1) if fused is None else fused
        found.append(gradients | {"query_key": queries_keys[..., :width]})
    assert before[0].grad is not None
    return [*found, {"states": before[0].grad.numpy()}]


def measured_curvature(config: Config) -> list[dict[str, torch.Tensor]]:
    with open_run(config) as run:
        layers = range(run.model.shape.num_hidden_layers)
        measured = [run.curvature.of_layer(layer, torch.device("cpu")) for layer in layers]
        matrices = [load_file(one.path) for one in measured]
        assert all(torch.equal(of_layer["ffn"], one.ffn) for of_layer, one in zip(matrices, measured, strict=True))
        return [*matrices, {"states": run.curvature.of_states(torch.device("cpu"))}]


NORMS_INSIDE = ("exaone4", "gemma2", "gemma3_text", "gemma4_text", "olmo2", "olmo3")
OTHERS = ("cwm", "ernie4_5", "gemma", "granite", "helium", "hunyuan_v1_dense", "llama", "ministral", "ministral3")
OTHERS += ("mistral", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3")
MIXTURES = ("glm4_moe", "gpt_oss")
HYBRIDS = ("falcon_h1", "lfm2", "qwen3_5_text")
# attention with a latent, no gates, parallel layers, fused linears with biases, positions of their own, carried mixers
WITHOUT_RANKS = ("deepseek_v3", "arcee", "cohere", "gpt2", "opt", "qwen3_next")
FUSED = ("glm4", "granitemoehybrid")  # whose class cannot have ranks


def test_every_decoder_has_it() -> None:
    """And families with ranks are compared with the stock model below, but for some mixtures."""
    found = []
    for name in decoders():
        if "per-layer form" in CASES[name].refused:
            continue
        family = FAMILIES[name]
        shape: Any = SimpleNamespace(gated=family.stack.feed_forward.is_gated, layer_norms=family.stack.centres)
        model: Any = SimpleNamespace(family=family, shape=shape, checkpoint=SimpleNamespace(beside=None))
        grid = form_of("per-layer", family).grid(model)
        assert grid.has_curvature, name
        if grid.has_ranks:
            found.append(name)
    mixtures = {name for name in found if FAMILIES[name].stack.experts is not None}
    assert mixtures > set(MIXTURES)
    assert sorted({*found} - mixtures) == sorted((*NORMS_INSIDE, *OTHERS, *HYBRIDS))


@pytest.mark.parametrize(
    ("family", "model", "together"),
    [
        ("llama", {"attention_bias": True}, 2),
        ("llama", {}, 1),  # of two in a batch, as on a device where scores take much memory
        ("llama", {"hidden_act": "relu"}, 2),  # whose gradient is by what it wrote
        ("qwen3", {"head_dim": 8, "tied": True}, 2),
        ("mistral", {"sliding_window": 8, "vocabulary": 9000}, 2),  # more than a panel of the head
        *(
            (family, CASES[family].options, 2)
            for family in (*NORMS_INSIDE, *OTHERS, *HYBRIDS, *MIXTURES, *WITHOUT_RANKS, *FUSED)
        ),
        ("gemma4_text", variants()["gemma4_text-experts"], 2),
        ("gemma4_text", variants()["gemma4_text-tokens"], 1),
        ("gemma2", CASES["gemma2"].options | {"final_logit_softcapping": 0.7}, 1),  # logits far beyond their bound
    ],
)
def test_it_is_that_of_the_whole_stock_model(
    family: str,
    model: dict[str, Any],
    together: int,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oneshot.profiling.curvature.sequences_together", lambda *_: together)
    folder = make_checkpoint(**{"family": family} | model)
    sizes = {"num_sequences": 5, "sequence_length": 24, "batch_size": 2, "seed": 3}
    config = make_config(folder, form="per-layer", curvature="fisher", **sizes)
    found, tokens = measured_curvature(config), calibration_tokens(config)
    norms_inside = family in (*NORMS_INSIDE, "glm4")
    expected = whole_model_gradients(config.checkpoint, tokens, config.seed, norms_inside=norms_inside)
    for of_layer, gradients in zip(found, expected, strict=True):
        assert of_layer.keys() == gradients.keys()
        for name, rows in gradients.items():
            matrix = np.einsum("tm,tn->mn", *2 * [rows.reshape(-1, rows.shape[-1])]) / (5 * 24)
            mean = np.trace(matrix) / len(matrix)
            if name != "states":
                matrix = (1 - SHRINKAGE) * matrix + SHRINKAGE * mean * np.eye(len(matrix))
            assert of_layer[name].dtype == torch.float32
            np.testing.assert_allclose(of_layer[name].numpy(), matrix, atol=1e-4 * mean, rtol=1e-3)


@pytest.mark.parametrize("cap", [None, 0.7])
def test_random_gradients_have_the_fisher_information_as_their_mean_square(
    cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all signs there are; gradients of different states have nothing in common in the mean."""
    length, vocabulary, size = 2, 3, 4
    generator = torch.Generator().manual_seed(0)
    head = OutputHead(nn.Identity(), torch.randn(vocabulary, size, generator=generator), cap=cap)
    x = torch.randn(length, size, generator=generator)

    def logits(state: torch.Tensor) -> torch.Tensor:
        return head.weight @ state if cap is None else cap * (head.weight @ state / cap).tanh()

    squares = torch.zeros(length * size, length * size)
    every = [*itertools.product((-1.0, 1.0), repeat=len(random_signs(length, vocabulary, 0)))]
    for signs in every:
        monkeypatch.setattr("oneshot.stream.output_head.random_signs", lambda *_, signs=signs: torch.tensor(signs))
        gradient = head.random_gradient(x, 0).flatten()
        squares += torch.outer(gradient, gradient) / len(every)
    expected = torch.zeros_like(squares)
    for row, state in enumerate(x):
        jacobian, probabilities = torch.func.jacrev(logits)(state), logits(state).softmax(-1)
        information = jacobian.T @ (probabilities.diag() - torch.outer(probabilities, probabilities)) @ jacobian
        own = slice(row * size, (row + 1) * size)
        expected[own, own] = information
    torch.testing.assert_close(squares, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("sequences", "length", "heads"), [(4, 1024, 9), (4, 2048, 32), (4, 2048, 64), (3, 65536, 64)])
def test_scores_that_a_device_holds_together(sequences: int, length: int, heads: int) -> None:
    """As many sequences as the limit allows, at least one; all on a CPU, which has no whole scores."""
    together = sequences_together(sequences, length, heads, torch.device("cuda"), False)
    assert 1 <= together <= sequences
    assert together == 1 or together * heads * length**2 <= SCORES_TOGETHER
    assert together == sequences or (together + 1) * heads * length**2 > SCORES_TOGETHER
    on_cpu = [sequences_together(sequences, length, heads, torch.device("cpu"), whole) for whole in (False, True)]
    assert on_cpu == [sequences, 1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2", "granite", "phi3", "lfm2"])
def test_prices_are_divergences(
    family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, text_file: Path
) -> None:
    """The measured divergence of a reduced FFN is near what the curvature predicts, in every layer.

    The profile is made by the command, which takes the form that its results will have.
    """
    folder = make_checkpoint(**CASES[family].options | {"layers": 3, "tied": True})
    command = [str(folder), "--output", str(tmp_path / "profile"), "--set", "curvature=fisher", "--quiet"]
    command += ["--calibration", str(text_file), "--num-sequences=16", "--sequence-length=32", "--dtype=float32"]
    assert main([*command, "--form", "stock"]) == 1
    assert main(command) == 0
    found = load_profile(tmp_path / "profile")
    assert found.origin.curvature == "fisher"
    assert 0.5 < float(found.stream_sensitivity.min()) <= float(found.stream_sensitivity.max()) < 2


def test_layers_between_those_that_are_followed_have_nearly_their_own_prices(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Follow the first and the last of four layers to the output, and all of them."""
    folder = make_checkpoint(**CASES["llama"].options | {"layers": 4, "tied": True})
    settings: dict[str, Any] = {"form": "per-layer", "curvature": "fisher", "num_sequences": 16}
    every = profile(make_config(folder, **settings, output=str(tmp_path / "every")))
    monkeypatch.setattr("oneshot.profiling.probes.PROBED_ENDS", 1)
    monkeypatch.setattr("oneshot.profiling.probes.PROBED_BETWEEN", 0)
    few = profile(make_config(folder, **settings, output=str(tmp_path / "few")))
    for found, known in (
        (few.stream_sensitivity, every.stream_sensitivity),
        (few.ffn_sensitivity, every.ffn_sensitivity),
    ):
        torch.testing.assert_close(found[[0, 3]], known[[0, 3]])
        assert ((found / known)[1:3] - 1).abs().max() < 0.5
    first, *between, last = few.stream_sensitivity.tolist()
    assert between == pytest.approx([(2 * first + last) / 3, (first + 2 * last) / 3])
    assert torch.equal(few.ffn_errors, every.ffn_errors)


@pytest.mark.parametrize(
    ("family", "made"), [("deepseek_v3", "fisher"), ("gemma4_text-experts", "fisher"), ("llama", "none")]
)
def test_a_plan_follows_the_curvature_of_its_profile(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, family: str, made: str
) -> None:
    """Nobody has to say again what a profile was made with; what is said must be the same.

    Neither is the family's default.
    """
    options = variants()[family] | {"layers": 3, "tied": True}
    folder, form = make_checkpoint(**options), {"form": "per-layer", "round_to": 8}
    made_with = {"curvature": made, "output": str(tmp_path / "profile")}
    profile(make_config(folder, **form, **made_with))
    planned: dict[str, Any] = form | {"profile": str(tmp_path / "profile"), "sparsity": 0.1}
    report = compress(make_config(folder, **planned))
    assert ("curvature" in report.seconds) == (made == "fisher")
    other = "none" if made == "fisher" else "fisher"
    with pytest.raises(ProfileError, match=f"curvature={made}"):
        compress(make_config(folder, **planned, curvature=other, output=str(tmp_path / "other")))


def test_no_token_has_a_gradient_far_above_the_others() -> None:
    gradients = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0))
    gradients[0, 7] *= 1000
    rows = clipped(gradients).view(2, 40, 3)
    norms = gradients.norm(dim=-1)
    limit = LARGEST_GRADIENT * norms[0].mean()
    assert norms[0, 7] > limit
    torch.testing.assert_close(rows[0, 7], gradients[0, 7] * (limit / norms[0, 7]))
    kept = torch.arange(80) != 7
    assert torch.equal(rows.flatten(0, 1)[kept], gradients.flatten(0, 1)[kept])
