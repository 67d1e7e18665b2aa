"""Train test subjects from scratch, in minutes on one thread: a DistilBERT classifier and a T5.

Trained weights have structure that random ones lack, so that the quality of a compressed model means something. The
classifier tells from which package of Python's standard library a passage of code comes. The T5 sorts, selects
and shifts letters on request. All data are on every machine that has Python. `FOLDER/distilbert` and `FOLDER/t5` are
checkpoints that stock classes load; beside each lie `*-calibration.jsonl` and `*-evaluation.jsonl`, which no training
example is in.
"""

import argparse
import json
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import parser
from torch import nn

from oneshot.evaluation import evaluate
from oneshot.evaluation.examples import padded

Row = dict[str, Any]
Batch = dict[str, torch.Tensor]
PACKAGES = ("asyncio", "email", "unittest", "xml")
WORDS = 60  # of a passage
LONGEST = 96  # tokens of a passage
LETTERS = "abcdefghijklmnop"
TASKS: dict[str, Callable[[list[str]], list[str]]] = {
    "sort": sorted,
    "descend": lambda letters: sorted(letters, reverse=True),
    "missing": lambda letters: [letter for letter in LETTERS if letter not in letters],
    "early": lambda letters: sorted(letter for letter in letters if letter < "i"),
    "shift": lambda letters: sorted(LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in letters),
}
EVALUATED, CALIBRATED = 500, 1000  # examples
WARM_UP = 0.1  # of the steps
BIAS_RATE = 10  # times the rate of other weights: T5 adds these biases to scores of several units


def passages() -> list[Row]:
    """Return passages of the packages' code in one seeded random order: `text`, and the package's number as `label`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    rows = []
    for label, package in enumerate(PACKAGES):
        for path in sorted((library / package).rglob("*.py")):
            words = path.read_text(encoding="utf-8", errors="replace").split()
            starts = range(0, len(words) - WORDS // 2, WORDS)
            rows += [{"text": " ".join(words[start : start + WORDS]), "label": label} for start in starts]
    random.Random(0).shuffle(rows)
    return rows


def byte_level_tokenizer(texts: Sequence[str]) -> Any:
    """Return a byte-level BPE of 4,000 tokens with BERT's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=4000, **options))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LONGEST, **names)


def word_tokenizer() -> Any:
    """Return a tokenizer with a token for every task and letter, and T5's special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *TASKS, *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)


def request(chance: random.Random) -> Row:
    """Return a task with 4 to 10 different letters, `text`, and the answer, `target`."""
    task, letters = chance.choice(list(TASKS)), chance.sample(LETTERS, chance.randint(4, 10))
    answer = TASKS[task](letters)
    return {"text": " ".join([task, *letters]), "target": " ".join(answer)} if answer else request(chance)


def train(model: nn.Module, batches: Iterator[Batch], steps: int, rate: float) -> None:
    """Train by AdamW; the rate rises over the first tenth of the steps and then falls along a cosine to zero."""
    named = dict(model.named_parameters())
    biases = {name: named.pop(name) for name in list(named) if "relative_attention_bias" in name}
    groups = [{"params": list(named.values())}, {"params": list(biases.values()), "lr": BIAS_RATE * rate}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, weight_decay=0.01)
    schedule = train_schedule(optimizer, steps)
    model.train()
    started = time.perf_counter()
    for step in range(1, steps + 1):
        loss = model(**next(batches)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            seconds = time.perf_counter() - started
            print(f"step {step} of {steps}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    model.eval()


def train_schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a rate that rises over the first tenth of the steps and then falls along a cosine to zero."""
    warm_up = max(1, int(WARM_UP * steps))
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, (1 + math.cos(math.pi * step / steps)) / 2),
    )


def masked(ids: list[int], tokenizer: Any, chance: random.Random) -> list[int]:
    """Return tokens of which a fifth is masked, so that the model does not learn the passages by heart."""
    inside = [tokenizer.mask_token_id if chance.random() < 0.2 else token for token in ids[1:-1]]
    return [ids[0], *inside, ids[-1]]


def train_distilbert(folder: Path, steps: int) -> None:
    """Train and save the classifier."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    rows = passages()
    judged, known = rows[:EVALUATED], rows[EVALUATED:]
    tokenizer = byte_level_tokenizer([row["text"] for row in known])
    encoded = tokenizer([row["text"] for row in known], truncation=True, max_length=LONGEST)["input_ids"]
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=LONGEST,
        dim=128,
        hidden_dim=512,
        n_heads=4,
        n_layers=3,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(PACKAGES)),
        label2id={package: number for number, package in enumerate(PACKAGES)},
    )
    model = DistilBertForSequenceClassification(config)

    def batches() -> Iterator[Batch]:
        chance = random.Random(0)
        while True:
            order = chance.sample(range(len(known)), len(known))
            for start in range(0, len(known) - 15, 16):
                places = order[start : start + 16]
                ids = [masked(encoded[place], tokenizer, chance) for place in places]
                yield {
                    "input_ids": padded(ids, tokenizer.pad_token_id),
                    "attention_mask": padded([[1] * len(row) for row in ids], 0),
                    "labels": torch.tensor([known[place]["label"] for place in places]),
                }

    train(model, batches(), steps, rate=5e-4)
    save(model, tokenizer, folder, known[:CALIBRATED], judged)


def train_t5(folder: Path, steps: int, feed_forward: str) -> None:
    """Train and save the encoder–decoder; its output head is the embedding with ReLU, and its own with a gate."""
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer, chance = word_tokenizer(), random.Random(0)
    judged = list({row["text"]: row for row in (request(chance) for _ in range(EVALUATED))}.values())
    hidden = {row["text"] for row in judged}
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj=feed_forward,
        tie_word_embeddings=feed_forward == "relu",  # transformers then scales what the head reads, but always ties
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    model = T5ForConditionalGeneration(config)
    if feed_forward != "relu":
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.shared.weight.detach() * config.d_model**-0.5)

    def unseen() -> Iterator[Row]:
        while True:
            row = request(chance)
            if row["text"] not in hidden:
                yield row

    rows = unseen()

    def batches() -> Iterator[Batch]:
        while True:
            chosen = [next(rows) for _ in range(32)]
            ids, targets = (tokenizer([row[name] for row in chosen])["input_ids"] for name in ("text", "target"))
            yield {
                "input_ids": padded(ids, tokenizer.pad_token_id),
                "attention_mask": padded([[1] * len(row) for row in ids], 0),
                "labels": padded(targets, -100),
            }

    train(model, batches(), steps, rate=1e-3)
    save(model, tokenizer, folder, [next(rows) for _ in range(CALIBRATED)], judged)


def save(model: Any, tokenizer: Any, folder: Path, calibration: list[Row], judged: list[Row]) -> None:
    """Save a checkpoint and the examples beside it, and print the model's numbers on what it has not seen."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, rows in (("calibration", calibration), ("evaluation", judged)):
        path = folder.with_name(f"{folder.name}-{name}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [result] = evaluate([str(folder)], [str(folder.with_name(f"{folder.name}-evaluation.jsonl"))], dtype="float32")
    assert result.measures is not None
    [numbers] = result.measures.values()
    print(f"{folder}: {result.stored_parameters:,} parameters, {numbers}", flush=True)


def main() -> None:
    """Train the chosen models."""
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("folder", type=Path, help="where the checkpoints go")
    options.add_argument("--models", nargs="+", choices=("distilbert", "t5"), default=("distilbert", "t5"))
    options.add_argument("--distilbert-steps", type=int, default=800)
    options.add_argument("--t5-steps", type=int, default=2000)
    options.add_argument("--t5-feed-forward", choices=("relu", "gated-gelu"), default="relu")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if "distilbert" in arguments.models:
        train_distilbert(arguments.folder / "distilbert", arguments.distilbert_steps)
    if "t5" in arguments.models:
        train_t5(arguments.folder / "t5", arguments.t5_steps, arguments.t5_feed_forward)


if __name__ == "__main__":
    main()
