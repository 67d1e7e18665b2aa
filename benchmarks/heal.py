"""Training after the compression: what some steps on a CPU or a GPU bring to results of every form.

`heal.py DENSE RESULT … --data-dir FOLDER` trains copies of results in memory, on the text of `general.jsonl`, and
judges them on the five kinds of text before and after. Ways: `full` and `lora` learn the next token (all weights, or
peft's adapters), `distil` learns the dense model's distribution of it with all weights. One row for every result and
way goes to `heal.jsonl`. The models are not written anywhere.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import Row, append_row, parser, provenance
from judging import judging_windows, model_losses, score, text_records
from peft import LoraConfig, get_peft_model
from speed import describe
from torch.nn import functional
from transformers import Trainer, TrainingArguments, set_seed

from oneshot.evaluation import load_model
from oneshot.text import load_tokenizer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RATES = {"full": 2e-5, "distil": 5e-5, "lora": 2e-4}  # of Adam, at the highest point of the schedule


class Distillation(Trainer):
    """A Trainer whose loss is the divergence from the dense model's distribution of the next token."""

    def __init__(self, *args: Any, teacher: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._teacher = teacher

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean over tokens of KL(dense ‖ result), in nats."""
        ids = inputs["input_ids"]
        with torch.no_grad():
            target = self._teacher(input_ids=ids).logits.float().log_softmax(-1).flatten(0, 1)
        outputs = model(input_ids=ids)
        own = outputs.logits.float().log_softmax(-1).flatten(0, 1)
        loss = functional.kl_div(own, target, log_target=True, reduction="batchmean")
        return (loss, outputs) if return_outputs else loss


def training_sequences(data_dir: Path, tokenizer: Any, count: int, length: int, seed: int) -> list[Row]:
    """Sequences of the packed documents of `general.jsonl`, in a random order of documents."""
    lines = (data_dir / "general.jsonl").read_text().splitlines()
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed)).tolist()
    ids: list[int] = []
    for index in order:
        ids += [*tokenizer(json.loads(lines[index])["text"]).input_ids, tokenizer.eos_token_id]
        if len(ids) >= count * length:
            break
    rows = torch.tensor(ids[: count * length]).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(model: Any, way: str, teacher: Any, rows: list[Row], arguments: argparse.Namespace, scratch: Path) -> Any:
    """Train a model; return it, with merged adapters."""
    if way == "lora":
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS))
    settings = TrainingArguments(
        output_dir=str(scratch),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        learning_rate=RATES[way] if arguments.rate is None else arguments.rate,
        lr_scheduler_type="cosine",
        warmup_steps=arguments.steps // 10,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=arguments.seed,
        use_cpu=arguments.device == "cpu",
    )
    common: dict[str, Any] = {"model": model, "args": settings, "train_dataset": rows}
    trainer = Distillation(**common, teacher=teacher) if way == "distil" else Trainer(**common)
    trainer.train()
    return (model.merge_and_unload() if way == "lora" else model).eval()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("dense", type=Path)
    options.add_argument("results", type=Path, nargs="+")
    options.add_argument("--data-dir", type=Path, required=True)
    options.add_argument("--ways", choices=sorted(RATES), nargs="+", default=["distil"])
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--length", type=int, default=256)
    options.add_argument("--rate", type=float, help="of Adam (default: by the way)")
    options.add_argument("--device", default="cpu")
    options.add_argument("--max-windows", type=int, default=4)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    device, tokenizer = torch.device(arguments.device), load_tokenizer(arguments.dense)
    teacher = load_model(arguments.dense, device=device, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        windows = judging_windows(arguments.data_dir, scratch, tokenizer, arguments.max_windows)
        rows = training_sequences(
            arguments.data_dir, tokenizer, arguments.steps * arguments.batch, arguments.length, arguments.seed
        )
        dense = model_losses(teacher, windows)["perplexity"]
        for result in arguments.results:
            before = None
            for way in arguments.ways:
                set_seed(arguments.seed)
                model = load_model(result, device=device, dtype=torch.float32)
                before = before or model_losses(model, windows)["perplexity"]
                started, cpu = time.perf_counter(), time.process_time()
                model = train(model, way, teacher, rows, arguments, scratch)
                seconds = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
                after = model_losses(model, windows)["perplexity"]
                row = {
                    "way": way,
                    "steps": arguments.steps,
                    "tokens": arguments.steps * arguments.batch * arguments.length,
                    "rate": RATES[way] if arguments.rate is None else arguments.rate,
                    "score_before": score(before, dense)["score"],
                    "score": score(after, dense)["score"],
                    "perplexity_before": before,
                    "perplexity": after,
                    "texts": text_records(windows),
                    "max_windows": arguments.max_windows,
                }
                shared = {"model": arguments.dense.name, "training_seed": arguments.seed}
                append_row("heal", provenance(**shared) | describe(result) | row | seconds)


if __name__ == "__main__":
    main()
