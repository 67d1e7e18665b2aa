"""Ask vLLM in its own environment: `python ask_vllm.py REQUEST.json ANSWER.json`.

The request has `folder`, `implementation` (auto or transformers), `dtype`, `prompts` (lists of token ids) and
`max_tokens`. The answer has, for every prompt, the log-probability of each of its tokens after the first, and the
greedy continuation.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    """Answer the request in the first file into the second."""
    from vllm import LLM, SamplingParams

    request = json.loads(Path(sys.argv[1]).read_text())
    model = LLM(
        request["folder"],
        model_impl=request["implementation"],
        trust_remote_code=True,
        dtype=request["dtype"],
        enforce_eager=True,
        max_model_len=request["max_length"],
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], prompt_logprobs=0, ignore_eos=True)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling)
    answers = []
    for output in outputs:
        scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        answers.append(
            {"scores": [known[token].logprob for token, known in scored], "tokens": list(output.outputs[0].token_ids)}
        )
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
