"""Tiny random T5s of every variant, a tokenizer with sentinels, and pairs of text."""

import json
from pathlib import Path
from typing import Any

import torch
from factories import randomise, topics

VARIANTS = [(gated, tied) for gated in (False, True) for tied in (False, True)]
ENCODER_LAYERS, DECODER_LAYERS = 3, 2  # transformers 5.23 caches as many decoder layers as the encoder has


def build_t5(*, gated: bool, tied: bool, width: int = 64, model_type: str = "t5", seed: int = 0, **sizes: int) -> Any:
    """Return a random T5 whose parameters all change its output; the head of an untied one is not the embedding."""
    import transformers

    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, **sizes}
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=400,
        d_ff=width,
        num_layers=ENCODER_LAYERS,
        num_decoder_layers=DECODER_LAYERS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        **sizes,
    )
    model: Any = transformers.AutoModelForSeq2SeqLM.from_config(config)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(400, sizes["d_model"]))
        model.config.tie_word_embeddings = False
    return randomise(model, seed).eval()


def t5_tokenizer() -> Any:
    """Return a byte-level BPE of 400 tokens with ten sentinels, which ends every text with `</s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    sentinels = [f"<extra_id_{number}>" for number in range(10)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "</s>", *sentinels],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics(0, 20)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def save_t5(model: Any, folder: Path) -> Path:
    """Save a model with the tokenizer."""
    model.save_pretrained(folder)
    t5_tokenizer().save_pretrained(folder)
    return folder


def write_pairs(path: Path) -> Path:
    """Write pairs of many lengths."""
    lines = [line.strip() for line in topics(0, 12).splitlines() if line.strip()][:200]
    records = [{"text": line, "target": line[: 1 + len(line) // 2]} for line in lines]
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def padded_batch() -> dict[str, torch.Tensor]:
    """Return sources and targets of several lengths, padded and masked."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(12, 400, (4, length), generator=generator) for length in (17, 9))
    read = torch.arange(17) < torch.tensor([[17], [3], [11], [1]])
    written = torch.arange(9) < torch.tensor([[9], [9], [2], [5]])
    return {
        "input_ids": source.where(read, 0),
        "attention_mask": read.long(),
        "decoder_input_ids": target.where(written, 0),
        "decoder_attention_mask": written.long(),
    }
