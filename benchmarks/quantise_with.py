"""Quantise a checkpoint with a tool of its users, open what was written, and measure it.

    python benchmarks/quantise_with.py METHOD FOLDER OUTPUT --calibration TEXT --judged-on TEXT

Runs in an environment of its own, with llm-compressor, torchao and bitsandbytes (`make clients`), and needs nothing of
this package. Prints one line of JSON: the bytes of the weight files and the perplexity of the opened OUTPUT.
"""

import argparse
import json
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DTYPE = torch.bfloat16  # of what is not quantised: vLLM's kernels for CPUs have no float32 for four bits
NOT_QUANTISED = ["lm_head"]
TOOLS = ("llmcompressor", "torchao", "bitsandbytes")
Recipe = Callable[[argparse.Namespace, Any], list[Any]]  # of the options and the model


def weight_groups(options: argparse.Namespace) -> dict[str, Any]:
    """Return llm-compressor's scheme W4A16 with groups that divide the sizes of the model."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": options.group_size}
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def pairs(model: Any) -> list[tuple[str, list[str]]] | None:
    """Return what may be scaled in a per-layer result; None for other models, which llm-compressor knows."""
    return model.smoothing_pairs() if hasattr(model, "smoothing_pairs") else None


def gptq(options: argparse.Namespace, _: Any) -> list[Any]:
    """Return the recipe of GPTQ with four bits."""
    from llmcompressor.modifiers.gptq import GPTQModifier

    return [GPTQModifier(config_groups=weight_groups(options), ignore=NOT_QUANTISED)]


def awq(options: argparse.Namespace, model: Any) -> list[Any]:
    """Return the recipe of AWQ: scales, then rounding."""
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    known = pairs(model)
    scaled = {} if known is None else {"mappings": [AWQMapping(source, readers) for source, readers in known]}
    return [AWQModifier(**scaled), QuantizationModifier(config_groups=weight_groups(options), ignore=NOT_QUANTISED)]


def gptq_w8a8(_: argparse.Namespace, __: Any) -> list[Any]:
    """Return the recipe of GPTQ with eight bits for weights and activations."""
    from llmcompressor.modifiers.gptq import GPTQModifier

    return [GPTQModifier(targets="Linear", scheme="W8A8", ignore=NOT_QUANTISED)]


def smoothquant(options: argparse.Namespace, model: Any) -> list[Any]:
    """Return the recipe of SmoothQuant: scales, then W8A8."""
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    known = pairs(model)
    scaled = {} if known is None else {"mappings": [(readers, source) for source, readers in known]}
    return [SmoothQuantModifier(smoothing_strength=0.5, **scaled), *gptq_w8a8(options, model)]


def fp8(_: argparse.Namespace, __: Any) -> list[Any]:
    """Return the recipe of FP8 for weights and activations, which reads no text."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return [QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=NOT_QUANTISED)]


def torchao(bits: int) -> Callable[[argparse.Namespace], Any]:
    """Return torchao's settings for weights of 8 or 4 bits; on a CPU it stores 4 bits in a byte."""

    def settings(options: argparse.Namespace) -> Any:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
        from transformers import TorchAoConfig

        if bits == 8:
            return TorchAoConfig(Int8WeightOnlyConfig())
        return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(options.group_size)))

    return settings


def bitsandbytes(bits: int) -> Callable[[argparse.Namespace], Any]:
    """Return the settings of bitsandbytes for LLM.int8 or NF4."""

    def settings(options: argparse.Namespace) -> Any:
        from transformers import BitsAndBytesConfig

        if bits == 8:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPE)

    return settings


COMPRESSORS: dict[str, Recipe] = {
    "gptq": gptq,
    "awq": awq,
    "gptq-w8a8": gptq_w8a8,
    "smoothquant": smoothquant,
    "fp8": fp8,
}
SETTINGS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "torchao-int8": torchao(8),
    "torchao-int4": torchao(4),
    "bitsandbytes-int8": bitsandbytes(8),
    "bitsandbytes-nf4": bitsandbytes(4),
}
METHODS = ["none", *COMPRESSORS, *SETTINGS]


def token_windows(tokenizer: Any, path: Path, count: int, length: int) -> torch.Tensor:
    """Return the first tokens of a text as `(count, length)`. Raises `SystemExit` if the text is too short."""
    token_ids = tokenizer(path.read_text()).input_ids[: count * length]
    if len(token_ids) < count * length:
        raise SystemExit(f"{path} has {len(token_ids)} tokens and {count * length} are needed; give a longer text.")
    return torch.tensor(token_ids).view(count, length)


def compress_linears(options: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """Quantise the model in place with llm-compressor."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():  # llm-compressor 0.13 and 0.14 pin memory for a GPU, also without one
        IntermediatesCache.pin_memory = lambda *_: None  # type: ignore[method-assign]
    windows = token_windows(tokenizer, options.calibration, options.num_sequences, options.sequence_length)
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=Dataset.from_dict({"input_ids": windows.tolist()}),
        recipe=COMPRESSORS[options.method](options, model),
        num_calibration_samples=options.num_sequences,
        max_seq_length=options.sequence_length,
        trust_remote_code_model=True,
    )


def write(options: argparse.Namespace, tokenizer: Any) -> None:
    """Write the quantised model to OUTPUT."""
    settings = SETTINGS.get(options.method)
    quantised = {} if settings is None else {"quantization_config": settings(options)}
    model = AutoModelForCausalLM.from_pretrained(options.folder, trust_remote_code=True, dtype=DTYPE, **quantised)
    if options.method in COMPRESSORS:
        compress_linears(options, model, tokenizer)
    model.save_pretrained(options.output)  # before it runs: bitsandbytes repacks its weights when a CPU runs them
    tokenizer.save_pretrained(options.output)


def whole_linears(model: Any) -> int:
    """Return how many linears beside the output head are not quantised."""
    return sum(
        isinstance(module, torch.nn.Linear)
        and name not in NOT_QUANTISED
        and not hasattr(module, "quantization_scheme")
        and type(module.weight) is torch.nn.Parameter
        for name, module in model.named_modules()
    )


@torch.inference_mode()
def perplexity(options: argparse.Namespace, model: Any, tokenizer: Any) -> float:
    """Return the perplexity of a model over windows of the judging text."""
    windows = token_windows(tokenizer, options.judged_on, options.windows, options.window_length)
    losses = []
    for window in windows.split(1):
        logits = model(window, use_cache=False).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, window[0, 1:]))
    return math.exp(float(torch.stack(losses).double().mean()))


def main() -> None:
    """Quantise, open, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--calibration", type=Path, required=True, help="plain text for llm-compressor")
    parser.add_argument("--judged-on", type=Path, required=True, help="plain text for the perplexity")
    parser.add_argument("--group-size", type=int, default=64, help="must divide the hidden size and all FFN widths")
    parser.add_argument("--num-sequences", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-length", type=int, default=512)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.folder, trust_remote_code=True)
    write(options, tokenizer)
    opened = AutoModelForCausalLM.from_pretrained(options.output, trust_remote_code=True, dtype=DTYPE).eval()
    measured = {
        "weight_bytes": sum(path.stat().st_size for path in options.output.glob("*.safetensors")),
        "whole_linears": whole_linears(opened),
        "perplexity": perplexity(options, opened, tokenizer),
        "versions": {name: version(name) for name in ("torch", "transformers", *TOOLS)},
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
