"""One model in vLLM, measured when asked: `serve_speed.py` starts it in vLLM's environment.

Every line of the standard input is a request `{"batch": …, "length": …, "new_tokens": …}`. Its answer is a line with
the seconds of a prefill of the whole batch and of one step of decoding: of this process's CPU time with one thread,
else of the clock.
"""

import argparse
import json
import os
import random
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def seconds_of(model: Any, prompts: list[Any], new_tokens: int, now: Any) -> float:
    """Return the seconds that vLLM takes for prompts and so many new tokens of each."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    started = now()
    model.generate(prompts, sampling, use_tqdm=False)
    return float(now() - started)


def main() -> None:
    from vllm import LLM, __version__

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder")
    options.add_argument("--implementation", choices=("vllm", "transformers"), default="vllm")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--mode", choices=("eager", "compiled"), default="eager")
    options.add_argument("--max-batch", type=int, default=16)
    options.add_argument("--max-length", type=int, default=1024)
    arguments = options.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM prints into the standard output
    model = LLM(
        arguments.folder,
        model_impl=arguments.implementation,
        trust_remote_code=arguments.implementation == "transformers",
        dtype=arguments.dtype,
        enforce_eager=arguments.mode == "eager",
        max_model_len=arguments.max_length,
        max_num_batched_tokens=arguments.max_batch * arguments.max_length,
        max_num_seqs=arguments.max_batch,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    one_thread = os.environ.get("OMP_NUM_THREADS") == "1"
    now = time.process_time if one_thread else time.perf_counter
    vocabulary = model.get_tokenizer().vocab_size
    print(json.dumps({"vllm": __version__, "clock": "process" if one_thread else "wall"}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        numbers = random.Random(0)
        prompts = [
            {"prompt_token_ids": [numbers.randrange(vocabulary) for _ in range(request["length"])]}
            for _ in range(request["batch"])
        ]
        steps = request["new_tokens"]
        prefill = seconds_of(model, prompts, 1, now)
        both = seconds_of(model, prompts, 1 + steps, now)
        print(json.dumps({"prefill": prefill, "decode": (both - prefill) / steps}), file=answers, flush=True)


if __name__ == "__main__":
    main()
