"""Training after the compression: what some steps on a CPU or a GPU bring to results of every form.

`heal.py DENSE RESULT … --data-dir FOLDER` trains copies of results in memory, on the text of `general.jsonl`, and
judges them on the five kinds of text before and after. Ways: `full` and `lora` learn the next token (all weights, or
peft's adapters), `distil` learns the dense model's distribution of it with all weights. One row for every result and
way goes to `heal.jsonl`. The models are not written anywhere.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
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


@dataclass(frozen=True)
class Training:
    """The training of a result.

    Attributes:
        ways: names in `RATES`; each begins with the result as it was written.
        steps, batch, length: steps of Adam, sequences in a step, and tokens in a sequence.
        rate: the highest learning rate; None for the one in `RATES`.
        seed: it decides the order of the documents, and the adapters.
    """

    ways: tuple[str, ...] = ("distil",)
    steps: int = 200
    batch: int = 4
    length: int = 256
    rate: float | None = None
    seed: int = 0


def heal(
    dense: Path,
    results: Sequence[Path],
    text: Path,
    windows: dict[str, torch.Tensor],
    training: Training,
    device: torch.device,
) -> Iterator[Row]:
    """Train copies of results in memory in every way; yield a row of each: its score on `windows` before and after.

    Args:
        text: JSON lines with "text", or a plain text, to train on.
    """
    teacher = load_model(dense, device=device, dtype=torch.float32)
    sequences = training_sequences(text, load_tokenizer(dense), training)
    losses = model_losses(teacher, windows)["perplexity"]
    for result in results:
        before = None
        for way in training.ways:
            set_seed(training.seed)
            model = load_model(result, device=device, dtype=torch.float32)
            before = before or model_losses(model, windows)["perplexity"]
            started, cpu = time.perf_counter(), time.process_time()
            with tempfile.TemporaryDirectory() as scratch:
                model = train(model, way, teacher, sequences, training, Path(scratch))
            seconds = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
            after = model_losses(model, windows)["perplexity"]
            yield (
                describe(result)
                | seconds
                | {
                    "model": dense.name,
                    "training_seed": training.seed,
                    "way": way,
                    "steps": training.steps,
                    "tokens": training.steps * training.batch * training.length,
                    "rate": RATES[way] if training.rate is None else training.rate,
                    "score_before": score(before, losses)["score"],
                    "score": score(after, losses)["score"],
                    "perplexity_before": before,
                    "perplexity": after,
                    "texts": text_records(windows),
                }
            )


def training_sequences(text: Path, tokenizer: Any, training: Training) -> list[Row]:
    """Return sequences of the packed documents of a text, in a random order of documents."""
    lines = text.read_text().splitlines()
    documents = [json.loads(line)["text"] for line in lines] if text.suffix == ".jsonl" else lines
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(training.seed)).tolist()
    wanted, ids = training.steps * training.batch * training.length, list[int]()
    for index in order:
        ids += [*tokenizer(documents[index]).input_ids, tokenizer.eos_token_id]
        if len(ids) >= wanted:
            break
    whole = min(wanted, len(ids)) // training.length * training.length
    return [{"input_ids": row, "labels": row} for row in torch.tensor(ids[:whole]).view(-1, training.length)]


def train(model: Any, way: str, teacher: Any, sequences: list[Row], training: Training, scratch: Path) -> Any:
    """Train a model; return it, with merged adapters."""
    if way == "lora":
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS))
    settings = TrainingArguments(
        output_dir=str(scratch),
        max_steps=training.steps,
        per_device_train_batch_size=training.batch,
        learning_rate=RATES[way] if training.rate is None else training.rate,
        lr_scheduler_type="cosine",
        warmup_steps=training.steps // 10,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=training.seed,
        use_cpu=next(model.parameters()).device.type == "cpu",
    )
    common: dict[str, Any] = {"model": model, "args": settings, "train_dataset": sequences}
    trainer = Distillation(**common, teacher=teacher) if way == "distil" else Trainer(**common)
    trainer.train()
    return (model.merge_and_unload() if way == "lora" else model).eval()


def main() -> None:
    """Train results, and add a row of each to `heal.jsonl`."""
    options = parser(__doc__)
    options.add_argument("dense", type=Path)
    options.add_argument("results", type=Path, nargs="+")
    options.add_argument("--data-dir", type=Path, required=True)
    options.add_argument("--ways", choices=sorted(RATES), nargs="+", default=list(Training.ways))
    options.add_argument("--steps", type=int, default=Training.steps)
    options.add_argument("--batch", type=int, default=Training.batch)
    options.add_argument("--length", type=int, default=Training.length)
    options.add_argument("--rate", type=float, help="of Adam (default: by the way)")
    options.add_argument("--device", default="cpu")
    options.add_argument("--max-windows", type=int, default=4)
    options.add_argument("--seed", type=int, default=Training.seed)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    names = {field.name for field in fields(Training)} - {"ways"}
    training = Training(ways=tuple(arguments.ways), **{name: getattr(arguments, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(arguments.dense)
        windows = judging_windows(arguments.data_dir, Path(folder), tokenizer, arguments.max_windows)
        text, device = arguments.data_dir / "general.jsonl", torch.device(arguments.device)
        for row in heal(arguments.dense, arguments.results, text, windows, training, device):
            append_row("heal", provenance() | row | {"max_windows": arguments.max_windows})


if __name__ == "__main__":
    main()
