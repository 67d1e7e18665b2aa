"""Checkpoints of random weights in the shapes of known models, for `gpu.py`."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_common import Job

VOCABULARY, WORDS = 32000, 2000
SEQUENCE_WORDS = 2200  # a few more than are read
WRITERS = 8  # threads that write files; one alone takes longer than the device takes to draw the numbers


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, or with `experts` of a Qwen3-MoE, whose FFN width is an expert's."""

    hidden: int
    width: int
    layers: int
    heads: int
    groups: int
    head_size: int
    tied: bool = False
    experts: int = 0
    experts_of_token: int = 0
    num_sequences: int = 128  # of calibration text, of 2,048 tokens each


MODELS = {
    "1.1B": Shape(2048, 5632, 22, 32, 4, 64, tied=True),
    "7B": Shape(4096, 11008, 32, 32, 32, 128),
    "8B": Shape(4096, 14336, 32, 32, 8, 128),
    "70B": Shape(8192, 28672, 2, 64, 8, 128),  # 2 of its 80 layers
    # 8 of its 48 layers
    "30B-A3B": Shape(2048, 768, 8, 32, 4, 128, experts=128, experts_of_token=8, num_sequences=192),
    "tiny": Shape(64, 512, 2, 4, 2, 16, tied=True, num_sequences=8),
    "tiny mixture": Shape(64, 64, 2, 4, 2, 16, experts=8, experts_of_token=2, num_sequences=8),
}


def shape_of(name: str, job: Job) -> Shape:
    """Return the sizes of a model of `MODELS`; a tiny job's are always tiny."""
    return MODELS[tiny_name(name)] if job.tiny else MODELS[name]


def tiny_name(name: str) -> str:
    """Return the name of the tiny model of the same kind."""
    return "tiny mixture" if MODELS[name].experts else "tiny"


def model_config(name: str, job: Job) -> Any:
    """Return the config of a model of `MODELS`; a tiny job's is always a tiny one."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    shape = shape_of(name, job)
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_size,
        "vocab_size": 2048 if job.tiny else VOCABULARY,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    if not shape.experts:
        return LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)
    experts = {
        "moe_intermediate_size": shape.width,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_of_token,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **sizes, **experts)


def write_model(folder: Path, name: str, job: Job) -> None:
    """Write random bfloat16 weights, made on the device because a CPU takes a minute for 7B; and a text."""
    import random

    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shape, config = shape_of(name, job), model_config(name, job)
    folder.mkdir(parents=True)
    words = {f"w{number}": number for number in range(WORDS)} | {"<s>": WORDS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<s>", bos_token="<s>").save_pretrained(folder)
    config.save_pretrained(folder)
    places: dict[str, str] = {}
    written: list[Future[None]] = []
    torch.manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=job.device) * shape[-1] ** -0.5).bfloat16().cpu()

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        file = f"model-{number:05d}-of-{shape.layers + 1:05d}.safetensors"
        written.append(writers.submit(save_file, tensors, folder / file, metadata={"format": "pt"}))
        places.update(dict.fromkeys(tensors, file))

    linears, norms = _layer(shape)
    with ThreadPoolExecutor(WRITERS) as writers:
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}."
            tensors = {f"{prefix}{name}.weight": drawn(*sizes) for name, sizes in linears.items()}
            ones = {f"{prefix}{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
            write(layer + 1, tensors | ones)
        outside = {"model.embed_tokens.weight": drawn(config.vocab_size, shape.hidden)}
        outside["model.norm.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
        if not shape.tied:
            outside["lm_head.weight"] = drawn(config.vocab_size, shape.hidden)
        write(shape.layers + 1, outside)
        for one in written:
            one.result()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    draw = random.Random(0)
    count = SEQUENCE_WORDS * shape.num_sequences
    (folder / "text.txt").write_text(" ".join(f"w{draw.randrange(WORDS)}" for _ in range(count)))


def _layer(shape: Shape) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Return the shapes of a layer's linears and the sizes of its norms, as the hub's files name them."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_size, shape.groups * shape.head_size
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    ffns = ["mlp."]
    if shape.experts:
        norms |= {"self_attn.q_norm": shape.head_size, "self_attn.k_norm": shape.head_size}
        linears["mlp.gate"] = (shape.experts, hidden)
        ffns = [f"mlp.experts.{number}." for number in range(shape.experts)]
    for ffn in ffns:
        linears |= {f"{ffn}gate_proj": (shape.width, hidden), f"{ffn}up_proj": (shape.width, hidden)}
        linears[f"{ffn}down_proj"] = (hidden, shape.width)
    return linears, norms
