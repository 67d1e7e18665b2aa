"""Compress a chat model, ask it the same before and after, and measure both.

Half of the calibration text is yours, and the model writes the other half. Example:

    python examples/chat_model.py HuggingFaceTB/SmolLM2-135M-Instruct --text my_text.jsonl --held-out other.txt
"""

import argparse
from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import oneshot


def main(arguments: Sequence[str] | None = None) -> None:
    """Run with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub name")
    parser.add_argument("--output", default="smaller-chat", help="folder to write")
    parser.add_argument("--sparsity", type=float, default=0.2, help="share of the parameters to remove")
    parser.add_argument("--text", default="builtin", help="calibration text of the kinds that you will use")
    parser.add_argument("--held-out", default=(), help="text that is not in --text; without it a built-in text")
    parser.add_argument("--question", default="What is the capital of France?")
    parser.add_argument("--num-sequences", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=1024)
    given = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    dense = AutoModelForCausalLM.from_pretrained(given.model)
    print("before:", answer(dense, tokenizer, given.question))
    del dense
    result = oneshot.compress(
        given.model,
        given.output,
        sparsity=given.sparsity,
        form="per-layer",
        calibration=f"{given.text}+self",
        num_sequences=given.num_sequences,
        sequence_length=given.sequence_length,
    )
    print(result)
    print("after:", answer(result.load(), tokenizer, given.question))
    print(result.evaluate(given.held_out, sequence_length=given.sequence_length, max_windows=16))


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """Return what the model answers greedily, at most 60 tokens."""
    turns = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    return str(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


if __name__ == "__main__":
    main()
