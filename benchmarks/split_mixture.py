"""Cut the FFNs of a real model into experts: a mixture with real weights and states, and a router in closed form.

As CMoE (2502.04416): the neurons that are among a token's strongest most often make a shared expert, the others are
clustered by the tokens where they are strong, into experts of one size, and the router predicts the experts' energies
by ridge regression. Then the downs are fitted by least squares to the dense FFN's output. The result is a Qwen2-MoE,
whose attention is Llama's if it has no biases and Qwen2's with them, or without shared neurons a Mixtral. One row of
`mixture_split.jsonl` has its perplexities beside the dense model's. A head that a GGUF file stores beside its embedding
is the embedding in the mixture.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_bundle import tied
from harness import Row, append_row, parser, provenance, smollm2_gguf
from judging import judging_windows, losses, score, text_records
from mixture_parts import load_stock, ridge
from real_models import FOLDER, MODELS, fetch
from scipy.cluster.vq import kmeans2
from scipy.optimize import linear_sum_assignment
from torch import nn

from oneshot.checkpoint import locate_checkpoint
from oneshot.evaluation import load_windows, score_windows
from oneshot.text import load_tokenizer

STRONGEST = 0.25  # of a token's neurons
CLUSTERED_TOKENS = 2048
ROUNDS = 3  # of assignments and centres
DAMPING = 1e-2  # of both ridge regressions, times the mean diagonal
SPREAD = 0.1  # standard deviation of the router's logits: gates of nearly 1 / k each


@dataclass(frozen=True)
class SplitFfn:
    """An FFN cut into experts.

    Attributes:
        shared: the shared neurons, int64. experts: int64 `(E, m)`, the neurons of every expert.
        router: `(E, D)`. down: `(D, neurons)`, fitted.
        tokens: of every expert. captured: the share of the routed neurons' energy that the chosen experts have, and
            the share that the best k experts of every token have.
    """

    shared: torch.Tensor
    experts: torch.Tensor
    router: torch.Tensor
    down: torch.Tensor
    tokens: list[int]
    captured: tuple[float, float]


def split(mlp: Any, inputs: torch.Tensor, *, num_experts: int, top_k: int, num_shared: int, seed: int) -> SplitFfn:
    """Cut an FFN by what its neurons do for `inputs (t, D)`."""
    neurons = mlp.act_fn(mlp.gate_proj(inputs)) * mlp.up_proj(inputs)
    strengths = neurons.abs() * mlp.down_proj.weight.norm(dim=0)
    places = strengths.topk(int(STRONGEST * strengths.shape[1]), dim=1).indices
    strong = torch.zeros_like(strengths).scatter_(1, places, 1.0)
    shared = strong.sum(0).topk(num_shared).indices.sort().values
    routed = torch.ones(strengths.shape[1], dtype=torch.bool).index_fill_(0, shared, False).nonzero().flatten()
    experts = routed[clusters(strong[:CLUSTERED_TOKENS, routed], num_experts, seed)]
    energies = strengths.square()[:, experts].sum(-1).sqrt()  # (t, E)
    router = regression(inputs, energies).mT
    logits = inputs @ router.mT
    router *= SPREAD / logits.std()
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(top_k).indices, 1.0)
    active = torch.ones_like(neurons)
    active[:, experts.flatten()] = chosen.repeat_interleave(experts.shape[1], 1)
    # fitted: changes from the dense downs, so that the ridge shrinks towards no change
    kept = neurons * active
    change = regression(kept, mlp.down_proj(neurons - kept)).mT
    best = energies.square().topk(top_k).values.sum() / energies.square().sum()
    captured = (energies.square() * chosen).sum() / energies.square().sum()
    tokens = chosen.sum(0).int().tolist()
    return SplitFfn(shared, experts, router, mlp.down_proj.weight + change, tokens, (float(captured), float(best)))


def clusters(strong: torch.Tensor, num_clusters: int, seed: int) -> torch.Tensor:
    """Return clusters of equal size of the columns of `strong (t, n)`, int64 `(clusters, n / clusters)`.

    k-means whose assignments are the best of those with equal sizes (Jonker and Volgenant's algorithm).
    """
    columns = nn.functional.normalize(strong.mT, dim=1)
    size = len(columns) // num_clusters
    centres, _ = kmeans2(columns.numpy(), num_clusters, minit="++", seed=seed)
    for _ in range(ROUNDS):
        distances = torch.cdist(columns, torch.as_tensor(centres, dtype=columns.dtype))
        _, seats = linear_sum_assignment(distances.repeat_interleave(size, 1).numpy())
        members = torch.as_tensor(seats // size).argsort(stable=True).view(num_clusters, size)
        centres = columns[members].mean(1).numpy()
    return members.sort(1).values


def regression(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the ridge regression `(n, p)` of `targets (t, p)` from `inputs (t, n)`, solved in float64."""
    return ridge((inputs.mT @ inputs).double(), (inputs.mT @ targets).double(), DAMPING).to(inputs)


def ffn_inputs(model: Any, windows: torch.Tensor) -> list[torch.Tensor]:
    """Return the inputs of every FFN, `(t, D)`, for windows `(n, length)` of the dense model."""
    inputs: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, given, kept=kept: kept.append(given[0].flatten(0, 1)))
        for layer, kept in zip(model.model.layers, inputs, strict=True)
    ]
    for ids in windows:
        model(ids[None])
    for handle in handles:
        handle.remove()
    return [torch.cat(parts) for parts in inputs]


def mixture(dense: Any, ffns: list[SplitFfn], top_k: int) -> nn.Module:
    """Return the stock mixture of the parts.

    Its gates are about 1 / k each and a shared expert's gate is 1 / 2, so the downs are multiplied by k and by 2.
    """
    from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig

    first = ffns[0]
    taken = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    taken += ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings", "hidden_act")
    taken += ("bos_token_id", "eos_token_id", "pad_token_id")
    common: Row = {name: getattr(dense.config, name) for name in taken} | {"num_experts_per_tok": top_k}
    num_experts, width = first.experts.shape
    config = (
        Qwen2MoeConfig(
            **common,
            moe_intermediate_size=width,
            num_experts=num_experts,
            shared_expert_intermediate_size=len(first.shared),
            norm_topk_prob=True,
            qkv_bias=dense.model.layers[0].self_attn.q_proj.bias is not None,
        )
        if len(first.shared)
        else MixtralConfig(**common, intermediate_size=width, num_local_experts=num_experts, sliding_window=None)
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(dense.state_dict(), strict=False)
    assert all(".mlp." in name for name in (*missing, *unexpected)), (missing, unexpected)
    for layer, source, ffn in zip(model.model.layers, dense.model.layers, ffns, strict=True):
        linears, block = source.mlp, layer.mlp
        block.gate.weight.copy_(ffn.router)
        gate, up = linears.gate_proj.weight, linears.up_proj.weight
        block.experts.gate_up_proj.copy_(torch.cat([gate[ffn.experts], up[ffn.experts]], dim=1))
        block.experts.down_proj.copy_(top_k * ffn.down[:, ffn.experts].transpose(0, 1))
        if len(ffn.shared):
            block.shared_expert_gate.weight.zero_()
            block.shared_expert.gate_proj.weight.copy_(gate[ffn.shared])
            block.shared_expert.up_proj.weight.copy_(up[ffn.shared])
            block.shared_expert.down_proj.weight.copy_(2 * ffn.down[:, ffn.shared])
    return model


def main() -> None:
    """Cut the model, save it, and write its row."""
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("folder", type=Path, help="where the checkpoint goes")
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--model", choices=sorted(MODELS), help="of real_models.py (default: SmolLM2-135M)")
    options.add_argument("--num-experts", type=int, default=8)
    options.add_argument("--top-k", type=int, default=3)
    options.add_argument("--num-shared", type=int, default=512, help="shared neurons; 0 makes a Mixtral")
    options.add_argument("--num-sequences", type=int, default=16, help="of 512 tokens of general.jsonl")
    options.add_argument("--max-windows", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    sizes = {name: getattr(arguments, name) for name in ("num_experts", "top_k", "num_shared", "seed")}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        file = smollm2_gguf()
        if arguments.model is not None:
            file = tied(fetch(arguments.model, FOLDER), Path(scratch) / "tied.gguf")
        source = locate_checkpoint(str(file), Path(scratch))
        dense, tokenizer = load_stock(source), load_tokenizer(source)
        general = str(arguments.data_dir / "general.jsonl")
        text = load_windows(general, tokenizer, sequence_length=512, max_windows=None)
        text = text[:: len(text) // arguments.num_sequences][: arguments.num_sequences]
        inputs = ffn_inputs(dense, text)
        ffns = []
        for layer, states in zip(dense.model.layers, inputs, strict=True):
            ffns.append(split(layer.mlp, states, **sizes))
            print(f"layer {len(ffns) - 1}: {ffns[-1].tokens}, {ffns[-1].captured}", flush=True)
        mixture(dense, ffns, arguments.top_k).save_pretrained(arguments.folder)
        tokenizer.save_pretrained(arguments.folder)
        windows = judging_windows(arguments.data_dir, Path(scratch), tokenizer, arguments.max_windows)
        models = [dense, load_stock(arguments.folder)]
        scores = {name: score_windows(models, ids) for name, ids in windows.items()}
    dense_losses, split_losses = (losses({name: both[place] for name, both in scores.items()}) for place in (0, 1))
    shares = [count / text.numel() for ffn in ffns for count in ffn.tokens]
    named = {"model": arguments.model or "SmolLM2-135M-Instruct", "expert_width": ffns[0].experts.shape[1]}
    row = named | sizes | split_losses | score(split_losses["perplexity"], dense_losses["perplexity"])
    row |= {"dense_perplexity": dense_losses["perplexity"], "texts": text_records(windows)}
    row |= {"split_tokens": text.numel(), "least_share": min(shares), "largest_share": max(shares)}
    row |= {
        name: math.fsum(ffn.captured[place] for ffn in ffns) / len(ffns)
        for place, name in enumerate(("captured_energy", "best_energy"))
    }
    append_row("mixture_split", provenance(**row))


if __name__ == "__main__":
    main()
