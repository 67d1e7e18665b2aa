"""Train a small mixture of experts from scratch: a Qwen3-MoE language model with a learned router.

The text is `general.jsonl` of the data folder, less every twelfth document. `FOLDER` is a checkpoint for the stock
class, with a tensor for each expert as on the hub. Beside it lie `FOLDER-calibration.jsonl`, documents that were
trained on, and `FOLDER-evaluation.jsonl`, the documents left out. Rows of `mixture_training.jsonl` have the loss by
step, and at the end how tokens are shared among the experts.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Row, append_row, parser, provenance
from torch import nn
from train_small import train_schedule

HELD_OUT = 12  # every twelfth document
CALIBRATED = 300  # documents
VOCABULARY = 2048
LENGTH, BATCH = 512, 2  # tokens of a sequence, sequences of a step
SHAPE: Row = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
RATE, DECAY = 3e-3, 0.1  # learning rate, weight decay
BALANCE = 0.02  # weight of the load-balancing loss


def documents(data_dir: Path) -> tuple[list[str], list[str]]:
    """Return the documents that are trained on, and the ones left out."""
    texts = [json.loads(line)["text"] for line in (data_dir / "general.jsonl").read_text().splitlines()]
    known = [text for number, text in enumerate(texts) if number % HELD_OUT]
    return known, texts[::HELD_OUT]


def trained_tokenizer(texts: Sequence[str]) -> Any:
    """Return a byte-level BPE of `VOCABULARY` tokens that ends a document by `<|endoftext|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    options: Row = {"special_tokens": [end], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end, pad_token=end)


def token_stream(texts: Sequence[str], tokenizer: Any) -> torch.Tensor:
    """Return the tokens of all documents, int64, an end token after each."""
    ids = tokenizer(list(texts), verbose=False)["input_ids"]
    return torch.tensor([token for row in ids for token in (*row, tokenizer.eos_token_id)])


def batches(ids: torch.Tensor, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield batches `(BATCH, LENGTH)` for ever; every pass starts at another token and has its own order."""
    while True:
        start = int(torch.randint(LENGTH, (), generator=generator))
        rows = ids[start : start + (len(ids) - start) // LENGTH * LENGTH].view(-1, LENGTH)
        order = torch.randperm(len(rows), generator=generator)
        yield from (rows[places] for places in order.split(BATCH) if len(places) == BATCH)


def balance_loss(layers: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
    """Return the mean over layers of the stock load-balancing loss; at best `num_experts_per_tok`.

    The stock model takes the loss of all layers together, where an expert number may be overloaded in one layer and
    unused in another.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    sizes = (config.num_experts, config.num_experts_per_tok)
    return torch.stack([load_balancing_loss_func((logits,), *sizes) for logits in layers]).mean()


def mean_loss(model: nn.Module, windows: torch.Tensor) -> float:
    """Return the mean loss of windows `(n, LENGTH)` in nats per token, without the load-balancing loss."""
    with torch.inference_mode():
        logits = torch.cat([model(ids[None]).logits for ids in windows])
        return float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten()))


def routing(model: nn.Module, windows: torch.Tensor) -> Row:
    """Describe the routing of windows `(n, LENGTH)` in every layer.

    `expert_tokens` counts the tokens of every expert. `load_entropy` is the entropy of the counts' shares,
    `token_entropy` the mean entropy of a token's router distribution, both ÷ the logarithm of the number of experts.
    """
    with torch.inference_mode():
        layers = model(windows, output_router_logits=True).router_logits
    counts, load, own = [], [], []
    for logits in layers:
        chances = logits.double().softmax(-1)
        num_experts = chances.shape[-1]
        chosen = chances.topk(model.config.num_experts_per_tok).indices.flatten()  # type: ignore[union-attr]
        tokens = chosen.bincount(minlength=num_experts)
        counts.append(tokens.tolist())
        load.append(float(torch.special.entr(tokens / tokens.sum()).sum()) / math.log(num_experts))
        own.append(float(torch.special.entr(chances).sum(-1).mean()) / math.log(num_experts))
    return {"expert_tokens": counts, "load_entropy": load, "token_entropy": own}


def main() -> None:
    """Train the model, save it and write the rows."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("folder", type=Path, help="where the checkpoint goes")
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--every", type=int, default=200, help="steps between two rows")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    known, left_out = documents(arguments.data_dir)
    tokenizer = trained_tokenizer(known)
    ids, judged = token_stream(known, tokenizer), token_stream(left_out, tokenizer)
    windows = judged[: len(judged) // LENGTH * LENGTH].view(-1, LENGTH)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        max_position_embeddings=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        **SHAPE,
    )
    model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY)
    schedule = train_schedule(optimizer, arguments.steps)
    rows = batches(ids, torch.Generator().manual_seed(arguments.seed))
    named = {"model": arguments.folder.name, "seed": arguments.seed, "train_tokens": len(ids)}
    model.train()
    started, losses, balances = time.perf_counter(), [], []
    for step in range(1, arguments.steps + 1):
        batch = next(rows)
        output = model(batch, labels=batch, output_router_logits=True)
        balance = balance_loss(output.router_logits, config)
        loss = output.loss - config.router_aux_loss_coef * output.aux_loss  # the stock loss of all layers together
        (loss + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        balances.append(balance.item())
        if step % arguments.every == 0 or step == arguments.steps:
            row = named | {"step": step, "seen_tokens": step * BATCH * LENGTH}
            row |= {"loss": sum(losses) / len(losses), "balance_loss": sum(balances) / len(balances)}
            row |= {
                "held_out_loss": mean_loss(model, windows[:8]),
                "load_entropy": routing(model, windows[:8])["load_entropy"],
            }
            row |= {"seconds": time.perf_counter() - started}
            append_row("mixture_training", provenance(**row))
            losses, balances = [], []
    model.eval()
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    chosen = random.Random(arguments.seed).sample(known, min(CALIBRATED, len(known)))
    for name, texts in (("calibration", chosen), ("evaluation", left_out)):
        path = arguments.folder.with_name(f"{arguments.folder.name}-{name}.jsonl")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    final = {"held_out_loss": mean_loss(model, windows), "held_out_tokens": windows.numel(), "shape": SHAPE}
    final |= {"parameters": sum(one.numel() for one in model.parameters())} | routing(model, windows)
    append_row("mixture_training", provenance(**named, **final))


if __name__ == "__main__":
    main()
