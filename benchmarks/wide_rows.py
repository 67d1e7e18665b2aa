"""Make a model whose rows are multiples of 256 from SmolLM2, for the K types of llama.cpp: 768 and 1536 columns.

The hidden size grows from 576 to 768 and a fourth group of heads comes to three. No direction of what
the model reads shall be free for errors, so layers write sums of their outputs, by random factors, into the new
dimensions, which nobody reads; the fourth group is the first of the layer with noise, and each has half of its
outputs. Rotations of four dimensions then spread all over the columns. The gains of the norms are random, neurons are
permuted and rescaled, and the output head has a copy of the embedding of its own. What the model says hardly
changes: the script prints the perplexity of both on a text.
"""

import math
from pathlib import Path

import torch
from harness import parser
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HIDDEN, GROUP = 192, 4  # that come to the hidden size; dimensions that are rotated together
ENERGY, NOISE = 0.4, 0.1  # of what is written into new dimensions, and of the fourth group of heads


def orthogonal(size: int) -> Tensor:
    """Return a random rotation."""
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0].float()


def stream_rotation(size: int) -> Tensor:
    """Return a random rotation `(n, n)` of a wider stream: groups of three old dimensions and a new one."""
    rotation, old, new = torch.zeros(size, size), torch.randperm(size - HIDDEN), torch.randperm(HIDDEN) + size - HIDDEN
    places = torch.randperm(size).unflatten(0, (-1, GROUP))
    for number, columns in enumerate(places):
        rows = torch.cat([old[number * (GROUP - 1) : (number + 1) * (GROUP - 1)], new[number : number + 1]])
        rotation[rows[:, None], columns] = orthogonal(GROUP)
    return rotation


def with_new_rows(weight: Tensor) -> Tensor:
    """Return a weight `(m, n)` that also writes sums of its rows into the new dimensions."""
    mixed = torch.randn(HIDDEN, len(weight)) @ weight / math.sqrt(len(weight))
    return torch.cat([weight, ENERGY * mixed])


def with_new_columns(weight: Tensor, gains: Tensor) -> Tensor:
    """Return a weight `(m, n)` that takes the gains of the norm before it, and reads nothing of the new dimensions."""
    return torch.cat([weight * gains, torch.zeros(len(weight), HIDDEN)], dim=1)


def wide_attention(old: nn.Module, new: nn.Module, heads: int, size: int) -> None:
    """Fill an attention of one group of heads more; its inputs and outputs are still to be rotated."""
    groups = old.k_proj.weight.shape[0] // size
    each = heads // groups

    def noisy(weight: Tensor) -> Tensor:
        return weight * (1 + NOISE * torch.randn_like(weight))

    queries = old.q_proj.weight.unflatten(0, (groups, each * size))
    keys, values = (part.weight.unflatten(0, (groups, size)) for part in (old.k_proj, old.v_proj))
    outputs = old.o_proj.weight.unflatten(1, (groups, each, size)).transpose(0, 1).clone()
    outputs[0] /= 2
    order = torch.randperm(groups + 1)
    queries, keys, values = (torch.cat([part, noisy(part[:1])])[order] for part in (queries, keys, values))
    outputs = torch.cat([outputs, outputs[:1]])[order]
    rotations = torch.stack([orthogonal(size) for _ in range(groups + 1)])
    values = rotations @ values
    outputs = torch.einsum("gmhs,gts->gmht", outputs, rotations)
    new.q_proj.weight.data, new.k_proj.weight.data = queries.flatten(0, 1), keys.flatten(0, 1)
    new.v_proj.weight.data, new.o_proj.weight.data = values.flatten(0, 1), outputs.transpose(0, 1).flatten(1)


@torch.no_grad()
def widened(old: LlamaForCausalLM, tokens: Tensor) -> LlamaForCausalLM:
    """Return a wider model that says the same.

    Args:
        tokens: `(1, n)`, on which the gains of norms take back what the new dimensions add to mean squares.
    """
    config = old.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size + HIDDEN
    changed = {
        "hidden_size": size,
        "num_attention_heads": heads // groups * (groups + 1),
        "num_key_value_heads": groups + 1,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / size,
        "tie_word_embeddings": False,
    }
    new = LlamaForCausalLM(LlamaConfig(**config.to_dict() | changed))
    rotation = stream_rotation(size)
    table = old.model.embed_tokens.weight
    extra = table @ torch.randn(config.hidden_size, HIDDEN) / math.sqrt(config.hidden_size)
    new.model.embed_tokens.weight.data = torch.cat([table, ENERGY * extra.roll(1, 0)], dim=1)  # of another token
    readers: list[tuple[nn.Module, list[nn.Linear]]] = []
    for before, layer in zip(old.model.layers, new.model.layers, strict=True):
        wide_attention(before.self_attn, layer.self_attn, heads, config.head_dim)
        neurons = torch.randperm(config.intermediate_size)
        scales = torch.exp2(torch.rand(config.intermediate_size) - 0.5)
        layer.mlp.gate_proj.weight.data = before.mlp.gate_proj.weight[neurons]
        layer.mlp.up_proj.weight.data = before.mlp.up_proj.weight[neurons] * scales[:, None]
        layer.mlp.down_proj.weight.data = with_new_rows(before.mlp.down_proj.weight[:, neurons] / scales)
        layer.self_attn.o_proj.weight.data = with_new_rows(layer.self_attn.o_proj.weight)
        attention = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
        for norm, read, gains in (
            (layer.input_layernorm, attention, before.input_layernorm.weight),
            (
                layer.post_attention_layernorm,
                [layer.mlp.gate_proj, layer.mlp.up_proj],
                before.post_attention_layernorm.weight,
            ),
        ):
            for linear in read:
                linear.weight.data = with_new_columns(linear.weight, gains)
            readers.append((norm, read))
    new.lm_head.weight.data = with_new_columns(table, old.model.norm.weight)
    readers.append((new.model.norm, [new.lm_head]))

    def take_back(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        squares = inputs[0].square()
        added = squares.mean(-1) / squares[..., : config.hidden_size].mean(-1)
        norm.weight.fill_(added.log().mean().exp().sqrt())

    handles = [norm.register_forward_pre_hook(take_back) for norm, _ in readers]
    new.eval()(tokens)
    for handle in handles:
        handle.remove()
    for norm, read in readers:
        gains = torch.exp2(torch.rand(size) - 0.5)
        for linear in read:
            linear.weight.data = linear.weight * norm.weight[:1] @ rotation / gains
        norm.weight.data = gains
    for layer in new.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data = rotation.T @ linear.weight
    new.model.embed_tokens.weight.data = new.model.embed_tokens.weight @ rotation
    return new


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True, help="dense folder of SmolLM2")
    options.add_argument("--output", type=Path, required=True)
    options.add_argument("--text", type=Path, required=True, help="its first 2,048 tokens fit, the next 2,048 judge")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    words = tokenizer(arguments.text.read_text()[:40_000], return_tensors="pt").input_ids[:, :4096]
    fitted, judged = words.split(2048, dim=1)
    old = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    new = widened(old, fitted).eval()
    with torch.no_grad():
        losses = [model(judged, labels=judged).loss.item() for model in (old, new)]
    print("perplexity before and after: {:.3f}, {:.3f}".format(*map(math.exp, losses)))
    new.bfloat16().save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
