"""Peak memory of compressing models of three sizes: predicted, measured in a fresh process, and the bound it kept to.

SmolLM2-135M is real (converted from GGUF first, so that the conversion does not count); the two larger ones have the
shapes of TinyLlama-1.1B and Llama-3.2-3B, random bf16 weights and the demo model's tokenizer. Every run gets the
predicted peak and five per cent as its `--max-memory`. Rows go to `results/memory.jsonl`.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import append_row, parser, provenance, smollm2_gguf
from transformers import AutoTokenizer, LlamaConfig

from oneshot.checkpoint import Journal, locate_checkpoint

VOCAB_SIZE = 49152  # the demo model's tokenizer
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
}
SHAPES = {
    "1.1B": LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=64,
        **SHARED,
    ),
    "3B": LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        **SHARED,
    ),
}
NAMES = {"135M": "SmolLM2-135M-Instruct", "1.1B": "TinyLlama's shape", "3B": "Llama-3.2-3B's shape"}
MARGIN = 1.05
MAX_FILE_BYTES = 10**9

PREDICTED = """
import json, sys
from dataclasses import asdict
import torch
from oneshot import Config
from oneshot.pipeline import predict
torch.set_num_threads(int(sys.argv[2]))
print(json.dumps(asdict(predict(Config.of(**json.loads(sys.argv[1]))))))
"""

MEASURED = """
import json, sys
from dataclasses import asdict
import torch
from oneshot import Config
from oneshot.pipeline import compress
from oneshot.machine.memory import peak_bytes
torch.set_num_threads(int(sys.argv[2]))
report = compress(Config.of(**json.loads(sys.argv[1])))
print(json.dumps({"peak": peak_bytes(), "seconds": report.seconds, "footprint": asdict(report.footprint)}))
"""


def write_random_checkpoint(folder: Path, config: LlamaConfig) -> None:
    """Shards of random bf16 weights, layer by layer, so that this process stays small, too."""
    hidden, width = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    layer = shapes | dict.fromkeys(norms, (hidden,))
    parts: list[dict[str, tuple[int, ...]]] = [
        {"model.embed_tokens.weight": (config.vocab_size, hidden)},
        *(
            {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
            for number in range(config.num_hidden_layers)
        ),
        {"model.norm.weight": (hidden,)},
    ]
    generator = torch.Generator().manual_seed(0)

    def made(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        return values.bfloat16()

    with Journal(folder, fingerprint={}) as writer:
        writer.expect(
            [
                {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in part.items()}
                for part in parts
            ],
            max_file_bytes=MAX_FILE_BYTES,
        )
        for part in parts:
            writer.add({name: made(shape) for name, shape in part.items()})
        writer.finish()
        config.save_pretrained(writer.partial)
        gguf = smollm2_gguf()
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(writer.partial)
        writer.commit()


def make_checkpoint(size: str, scratch: Path) -> Path:
    """A folder with the model of that size."""
    folder = scratch / size
    if size in SHAPES:
        write_random_checkpoint(folder, SHAPES[size])
        return folder
    return locate_checkpoint(str(smollm2_gguf()), scratch)


def run(script: str, config: dict[str, Any], threads: int) -> dict[str, Any]:
    """What a script in a process of its own prints last, as JSON."""
    command = [sys.executable, "-c", script, json.dumps(config), str(threads)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", choices=NAMES, default=list(NAMES))
    options.add_argument("--num-sequences", type=int, default=8)
    options.add_argument("--sequence-length", type=int, default=512)
    options.add_argument("--recipe", default="oneshot")
    options.add_argument("--form", choices=("stock", "per-layer"), default="stock")
    options.add_argument("--scratch", type=Path, help="folder for the checkpoints (default: the system's)")
    arguments = options.parse_args()
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as name:
            scratch = Path(name)
            folder = make_checkpoint(size, scratch)
            config = {
                "checkpoint": str(folder),
                "output": str(scratch / "compressed"),
                "sparsity": 0.2,
                "recipe": arguments.recipe,
                "form": arguments.form,
                "calibration": "builtin",
                "num_sequences": arguments.num_sequences,
                "sequence_length": arguments.sequence_length,
            }
            predicted = run(PREDICTED, config, arguments.threads)
            bound = round(predicted["host_bytes"] * MARGIN)
            measured = run(MEASURED, config | {"max_memory_bytes": bound}, arguments.threads)
            append_row(
                "memory",
                provenance(
                    model=NAMES[size],
                    recipe=arguments.recipe,
                    form=arguments.form,
                    num_tokens=arguments.num_sequences * arguments.sequence_length,
                    weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
                    predicted_bytes=predicted["host_bytes"],
                    stage=predicted["host_stage"],
                    max_memory_bytes=bound,
                    measured_bytes=measured["peak"],
                    ratio=measured["peak"] / predicted["host_bytes"],
                    store=measured["footprint"]["store"],
                    predicted_seconds=predicted["seconds"],
                    seconds=measured["seconds"],
                ),
            )
            shutil.rmtree(scratch / "compressed")


if __name__ == "__main__":
    main()
