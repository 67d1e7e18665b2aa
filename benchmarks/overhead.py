"""Compression time over the time of one dense forward pass on the same tokens, same dtype and threads, one run.

Both are CPU seconds of the process, so that other work on the machine does not count; the report has the wall clock's.
The pass is timed without the output head (the compressor computes none either) and with it. `--operators` also says
where the time goes: self seconds of the costliest operators, from torch's profiler on a second run.
Rows go to `results/overhead.jsonl`.
"""

import itertools
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import get_args

import torch
from harness import add_text_options, append_row, parser, provenance, smollm2_gguf
from torch.profiler import ProfilerActivity, profile

from oneshot import Config
from oneshot.checkpoint import locate_checkpoint
from oneshot.config import FormName
from oneshot.evaluation import load_model
from oneshot.pipeline import compress
from oneshot.text import load_text, load_tokenizer


@torch.inference_mode()
def forward_seconds(folder: Path, token_ids: torch.Tensor, batch_size: int) -> tuple[float, float]:
    """CPU seconds of one pass of the stock model: of its decoder alone, and with the logits of all tokens."""
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    model(token_ids[:1, :64], use_cache=False)
    decoder = head = 0.0
    for batch in token_ids.split(batch_size):
        started = time.process_time()
        states = model.model(batch, use_cache=False).last_hidden_state
        decoded = time.process_time()
        model.lm_head(states)
        decoder, head = decoder + decoded - started, head + time.process_time() - decoded
    return decoder, decoder + head


def operator_seconds(config: Config) -> dict[str, float]:
    """Self seconds by operator, the ten largest."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        compress(config)
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        seconds[event.key] += event.self_cpu_time_total / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:10])


def main() -> None:
    options = parser(__doc__)
    add_text_options(options, num_sequences=32)
    options.add_argument("--recipes", nargs="+", default=["oneshot", "stat"])
    options.add_argument(
        "--forms", nargs="+", choices=get_args(FormName), default=["stock"], help="per-layer makes a profile first"
    )
    options.add_argument("--operators", action="store_true", help="compress again under the profiler")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        dense = locate_checkpoint(str(smollm2_gguf()), Path(scratch))
        calibration = str(arguments.data_dir / "general.jsonl")
        text = load_text(
            calibration, load_tokenizer(dense), num_sequences=arguments.num_sequences, sequence_length=1024, seed=0
        )
        for recipe, form in itertools.product(arguments.recipes, arguments.forms):
            config = Config.of(
                checkpoint=str(dense),
                output=str(Path(scratch) / "compressed"),
                sparsity=0.2,
                recipe=recipe,
                form=form,
                calibration=calibration,
                num_sequences=arguments.num_sequences,
                dtype="float32",
                overwrite=True,
            )
            before = forward_seconds(dense, text.token_ids, config.machine.batch_size)
            started = time.process_time()
            report = compress(config)
            taken = time.process_time() - started
            after = forward_seconds(dense, text.token_ids, config.machine.batch_size)
            # around the compression, since the machine's speed drifts
            decoder, whole = ((first + second) / 2 for first, second in zip(before, after, strict=True))
            append_row(
                "overhead",
                provenance(
                    model="SmolLM2-135M-Instruct",
                    recipe=recipe,
                    form=form,
                    sparsity=report.sparsity["reached"],
                    num_tokens=text.num_tokens,
                    forward_seconds=[before[0], after[0]],
                    whole_forward_seconds=[before[1], after[1]],
                    compress_seconds=report.seconds,
                    compress_cpu_seconds=taken,
                    ratio=taken / decoder,
                    whole_ratio=taken / whole,
                    operator_seconds=operator_seconds(config) if arguments.operators else None,
                ),
            )


if __name__ == "__main__":
    main()
