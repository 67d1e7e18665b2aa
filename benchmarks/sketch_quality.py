"""What choosing pivots from a sketch costs: perplexity of SmolLM2-135M at 20 %, beside pivots of the exact Gram.

All variants share one pass: statistics of the dense stream, the same corrections, only the pivots differ. (So the
numbers stand beside each other, not beside `quality.jsonl`, where layers are calibrated on the compressed stream.)
Rows go to `results/sketch_quality.jsonl`.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import add_compression_options, append_row, parser, provenance, smollm2_gguf
from judging import judging_windows
from transformers import LlamaConfig, LlamaForCausalLM

from oneshot.checkpoint import Checkpoint, locate_checkpoint, open_model
from oneshot.compression.correction import correct
from oneshot.compression.fold import fold_sublayer
from oneshot.compression.measuring import NONZEROS
from oneshot.compression.statistics import GramAccumulator, SketchAccumulator
from oneshot.evaluation import perplexity
from oneshot.machine import Machine
from oneshot.method import DAMPING
from oneshot.selection import Evidence, select_neurons
from oneshot.stream import LayerBuilder
from oneshot.text import Text, load_text, load_tokenizer

KEPT = 1024  # of 1536: 19.7 % of the stored parameters
CPU = torch.device("cpu")
# pivoting, sketch, rows ÷ n, groups of columns
VARIANTS: list[tuple[str, str, int, int]] = [
    ("cholesky", "none", 0, 0),
    *(("qr", sketch, rows, 0) for sketch in NONZEROS for rows in (1, 2, 4)),
    ("grouped", "count", 2, 512),
    ("grouped", "none", 0, 512),
    ("tournament", "none", 0, 512),
]


@torch.inference_mode()
def compress_all(folder: Path, token_ids: torch.Tensor, batch_size: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of every variant's model, from one dense pass."""
    source = open_model(str(folder), folder)
    checkpoint, shape, stack = source.checkpoint, source.shape, source.family.stack
    width, ffn = shape.intermediate_size, stack.sublayers[stack.index_of("ffn")]
    builder = LayerBuilder(source, Machine(CPU, torch.float32, folder), token_ids.shape[1])
    prefixes = tuple(stack.layer_prefix(layer) for layer in range(shape.num_hidden_layers))
    outside = checkpoint.read(name for name in checkpoint.tensor_names if not name.startswith(prefixes))
    models = [dict(outside) for _ in VARIANTS]
    batches = Text(token_ids, "").batches(batch_size)
    hidden = [builder.embed(outside[stack.embedding], batch) for batch in batches]
    sizes = sorted({(sketch, rows) for _, sketch, rows, _ in VARIANTS if sketch != "none"})
    for layer, prefix in enumerate(prefixes):
        tensors = checkpoint.read_prefix(prefix)
        dense = builder.layer(layer, tensors)
        gram = GramAccumulator(width, output_size=None, device=CPU)
        sketches = {
            (sketch, rows): SketchAccumulator(rows * width, width, nonzeros=NONZEROS[sketch], seed=0, device=CPU)
            for sketch, rows in sizes
        }
        for position, x in enumerate(hidden):
            h = dense.run(0, x)
            neurons = dense.inner(1, h)
            gram.update_(neurons)
            for accumulator in sketches.values():
                accumulator.update_(neurons)
            hidden[position] = dense.run(1, h)
        statistics = gram.finish()
        for model, (pivoting, sketch, rows, group_size) in zip(models, VARIANTS, strict=True):
            evidence = Evidence(
                consumer=tensors[f"{ffn.writer}.weight"],
                producer_energy=None,
                gram=statistics.gram,
                generator=torch.Generator(),
                sketch=sketches[sketch, rows].finish() if sketch != "none" else None,
                pivoting=pivoting,
                group_size=group_size or 1,
            )
            kept = select_neurons("id", KEPT, evidence)
            factors = correct(
                tensors[f"{ffn.writer}.weight"], kept, statistics, correction="same-layer", damping=DAMPING
            )
            model |= {prefix + name: tensor for name, tensor in fold_sublayer(tensors, ffn, shape, factors).items()}
        print(f"layer {layer + 1}/{len(prefixes)}", flush=True)
    return models


@torch.inference_mode()
def judge(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], windows: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Perplexities of a stock model with these tensors."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(config)).eval().requires_grad_(False)
    model.load_state_dict(tensors, strict=False, assign=True)  # the tied head is not stored
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # has a buffer that is not stored either
    return {name: perplexity(model, ids)[0] for name, ids in windows.items()}


def main() -> None:
    options = parser(__doc__)
    add_compression_options(options, num_sequences=32)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense = locate_checkpoint(str(smollm2_gguf()), folder)
        tokenizer = load_tokenizer(dense)
        text = load_text(
            str(arguments.data_dir / "general.jsonl"),
            tokenizer,
            num_sequences=arguments.num_sequences,
            sequence_length=1024,
            seed=0,
        )
        windows = judging_windows(
            arguments.data_dir, folder, tokenizer, arguments.max_windows, kinds=("wikitext2", "lambada")
        )
        config = Checkpoint(dense).config | {"intermediate_size": KEPT}
        models = compress_all(dense, text.token_ids, batch_size=4)
        for variant, tensors in zip(VARIANTS, models, strict=True):
            pivoting, sketch, rows, group_size = variant
            append_row(
                "sketch_quality",
                provenance(
                    model="SmolLM2-135M-Instruct",
                    pivoting=pivoting,
                    sketch=sketch,
                    sketch_rows_per_column=rows,
                    group_size=group_size,
                    calibration_tokens=text.num_tokens,
                    calibration_hash=text.token_hash,
                    max_windows=arguments.max_windows,
                    perplexity=judge(config, tensors, windows),
                ),
            )


if __name__ == "__main__":
    main()
