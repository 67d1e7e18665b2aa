"""Peak resident memory of compressing a Llama of 1.1 B parameters (TinyLlama's shape, random weights, bf16 shards).

The peak of a fresh process above what its imports take, beside the size of the weights and of the activation store.
Rows go to `results/memory.jsonl`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from harness import append_row, parser, provenance, smollm2_gguf
from transformers import AutoTokenizer, LlamaConfig

from oneshot.writer import CheckpointWriter

TINYLLAMA = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=49152,  # the demo model's tokenizer
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
)

MAX_SHARD_BYTES = 50 * 10**6  # a shard waits in memory, twice while it is written

MEASURED = """
import json, sys
import torch, transformers, datasets, scipy.linalg, oneshot.compress, oneshot.calibration
from transformers.models.llama import modeling_llama
from pathlib import Path
def peak_bytes():  # VmHWM: ru_maxrss would carry the peak of the process that started this one
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
from oneshot import CompressionConfig, compress
torch.set_num_threads(int(sys.argv[2]))
after_imports = peak_bytes()
report = compress(CompressionConfig(**json.loads(sys.argv[1])))
print(json.dumps({"after_imports": after_imports, "peak": peak_bytes(), "seconds": report.seconds}))
"""


def write_random_checkpoint(folder: Path) -> None:
    """Shards of random bf16 weights, layer by layer, so that this process stays small, too."""
    hidden, width = TINYLLAMA.hidden_size, TINYLLAMA.intermediate_size
    key_value = TINYLLAMA.num_key_value_heads * TINYLLAMA.head_dim
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    with CheckpointWriter(folder, num_shards=TINYLLAMA.num_hidden_layers + 1, fingerprint={}) as writer:
        writer.add({"model.embed_tokens.weight": random(TINYLLAMA.vocab_size, hidden)})
        for layer in range(TINYLLAMA.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            writer.add({f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()})
            writer.add({f"{prefix}{name}.weight": torch.ones(hidden).bfloat16() for name in norms})
        writer.add({"model.norm.weight": torch.ones(hidden).bfloat16()})
        writer.finish_weights()
        TINYLLAMA.save_pretrained(writer.partial)
        gguf = smollm2_gguf()
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(writer.partial)
        writer.commit()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--num-sequences", type=int, default=8)
    options.add_argument("--sequence-length", type=int, default=512)
    options.add_argument("--recipes", nargs="+", default=["oneshot", "stat"])
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tinyllama-shape"
        write_random_checkpoint(folder)
        weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for recipe in arguments.recipes:
            config = {
                "checkpoint": str(folder),
                "output": str(Path(scratch) / f"compressed-{recipe}"),
                "sparsity": 0.2,
                "recipe": recipe,
                "calibration": "builtin",
                "num_sequences": arguments.num_sequences,
                "sequence_length": arguments.sequence_length,
                "max_shard_bytes": MAX_SHARD_BYTES,
            }
            command = [sys.executable, "-c", MEASURED, json.dumps(config), str(arguments.threads)]
            measured = json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            )
            tokens = arguments.num_sequences * arguments.sequence_length
            store_bytes = (2 if recipe == "stat" else 1) * tokens * TINYLLAMA.hidden_size * 4
            above = measured["peak"] - measured["after_imports"]
            append_row(
                "memory",
                provenance(
                    model="TinyLlama's shape, random weights",
                    recipe=recipe,
                    num_tokens=tokens,
                    weight_bytes=weight_bytes,
                    store_bytes=store_bytes,
                    max_shard_bytes=MAX_SHARD_BYTES,
                    after_imports_bytes=measured["after_imports"],
                    above_imports_bytes=above,
                    ratio=(above - store_bytes) / weight_bytes,
                    seconds=measured["seconds"],
                ),
            )


if __name__ == "__main__":
    main()
