"""Checkpoints of random weights in the shapes of known models, for `gpu.py`."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_common import Job

# hidden size, FFN width, layers, heads, KV groups, head size, tied; 70B has two of its 80 layers
MODELS = {
    "1.1B": (2048, 5632, 22, 32, 4, 64, True),
    "7B": (4096, 11008, 32, 32, 32, 128, False),
    "8B": (4096, 14336, 32, 32, 8, 128, False),
    "70B": (8192, 28672, 2, 64, 8, 128, False),
    "tiny": (64, 512, 2, 4, 2, 16, True),
}
VOCABULARY, WORDS = 32000, 2000
TEXT_WORDS = 280_000
WRITERS = 8  # threads that write files; one alone takes longer than the device takes to draw the numbers


def llama_config(name: str, job: Job) -> Any:
    """Return the config of a Llama of `MODELS`; a tiny job's is always the tiny one."""
    from transformers import LlamaConfig

    hidden, width, layers, heads, groups, size, tied = MODELS["tiny" if job.tiny else name]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        vocab_size=2048 if job.tiny else VOCABULARY,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def write_model(folder: Path, name: str, job: Job) -> None:
    """Write random bfloat16 weights, made on the device because a CPU takes a minute for 7B; and a text."""
    import random

    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    hidden, width, layers, heads, groups, size, tied = MODELS[name]
    vocabulary = 2048 if job.tiny else VOCABULARY
    folder.mkdir(parents=True)
    words = {f"w{number}": number for number in range(WORDS)} | {"<s>": WORDS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<s>", bos_token="<s>").save_pretrained(folder)
    llama_config(name, job).save_pretrained(folder)
    places: dict[str, str] = {}
    written: list[Future[None]] = []
    torch.manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=job.device) * shape[-1] ** -0.5).bfloat16().cpu()

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        written.append(writers.submit(save_file, tensors, folder / file, metadata={"format": "pt"}))
        places.update(dict.fromkeys(tensors, file))

    shapes = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (groups * size, hidden),
        "self_attn.v_proj": (groups * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    with ThreadPoolExecutor(WRITERS) as writers:
        for layer in range(layers):
            prefix = f"model.layers.{layer}."
            tensors = {f"{prefix}{linear}.weight": drawn(*shape) for linear, shape in shapes.items()}
            norms = (f"{prefix}{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm"))
            write(layer + 1, tensors | {norm: ones.clone() for norm in norms})
        outside = {"model.embed_tokens.weight": drawn(vocabulary, hidden), "model.norm.weight": ones.clone()}
        write(layers + 1, outside if tied else outside | {"lm_head.weight": drawn(vocabulary, hidden)})
        for one in written:
            one.result()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    draw = random.Random(0)
    count = 4000 if job.tiny else TEXT_WORDS
    (folder / "text.txt").write_text(" ".join(f"w{draw.randrange(WORDS)}" for _ in range(count)))
