"""Compress a mixture of experts: predict memory and time, then remove neurons inside every expert.

The stock form opens everywhere. The per-layer form loses less, and opens in transformers and in vLLM with the plugin.

    python examples/mixture.py allenai/OLMoE-1B-7B-0125-Instruct --text my_text.jsonl --form per-layer
"""

import argparse
from collections.abc import Sequence
from typing import Any

import oneshot


def main(arguments: Sequence[str] | None = None) -> None:
    """Run with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="allenai/OLMoE-1B-7B-0125-Instruct", help="folder or hub name")
    parser.add_argument("--output", default="smaller-mixture", help="folder to write")
    parser.add_argument("--sparsity", type=float, default=0.2, help="share of the parameters to remove")
    parser.add_argument("--form", default="stock", choices=("stock", "per-layer"))
    parser.add_argument("--text", default="builtin", help="calibration text of the kinds that you will use")
    parser.add_argument("--held-out", default=(), help="text that is not in --text; without it a built-in text")
    parser.add_argument("--max-memory", help="bound of the host memory, such as 32GiB")
    # A router sends a token to a few experts, so a mixture needs more text than a dense model.
    parser.add_argument("--num-sequences", type=int, default=512)
    parser.add_argument("--sequence-length", type=int, default=1024)
    given = parser.parse_args(arguments)

    options: dict[str, Any] = {
        "sparsity": given.sparsity,
        "form": given.form,
        "calibration": given.text,
        "max_memory": given.max_memory,
        "num_sequences": given.num_sequences,
        "sequence_length": given.sequence_length,
    }
    print(oneshot.predict(given.model, given.output, **options))
    result = oneshot.compress(given.model, given.output, **options)
    print(result)
    print(result.evaluate(given.held_out, sequence_length=given.sequence_length, max_windows=16))


if __name__ == "__main__":
    main()
