"""Ask vLLM in its own environment: `python ask_vllm.py REQUESTS.json ANSWERS.json`.

A request has `folder`, `implementation` (auto, vllm or transformers), `dtype`, `prompts` (lists of token ids),
`max_tokens` (for all or for each prompt), `max_length`, and perhaps other `options` of vLLM and the folder of an
`adapter`. Its answer has, for every prompt, the log-probability of each of its tokens after the first, and the greedy
continuation; the first one of a request that keeps vLLM's statistics also the number of `accepted` drafts. A model that
vLLM does not open has an error's text in their place.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def answers_to(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an answer for every prompt of a request."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {
        "model_impl": request["implementation"],
        "trust_remote_code": request["implementation"] != "vllm",
        "dtype": request["dtype"],
        "enforce_eager": True,
        "max_model_len": request["max_length"],
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    model = LLM(request["folder"], **options | request.get("options", {}))
    prompts, limits = request["prompts"], request["max_tokens"]
    sampling = [
        SamplingParams(temperature=0, max_tokens=limit, prompt_logprobs=0, ignore_eos=True)
        for limit in (limits if isinstance(limits, list) else [limits] * len(prompts))
    ]
    adapter = LoRARequest("adapter", 1, request["adapter"]) if "adapter" in request else None
    tokens = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = model.generate(tokens, sampling, use_tqdm=False, lora_request=adapter)
    answers = []
    for output in outputs:
        scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        answers.append(
            {"scores": [known[token].logprob for token, known in scored], "tokens": list(output.outputs[0].token_ids)}
        )
    if not (options | request.get("options", {}))["disable_log_stats"]:
        counted = {each.name: getattr(each, "value", None) for each in model.get_metrics()}
        answers[0]["accepted"] = counted.get("vllm:spec_decode_num_accepted_tokens")
    return answers


def main() -> None:
    """Answer the requests in the first file into the second."""
    from vllm.distributed import cleanup_dist_env_and_memory

    answers: list[Any] = []
    for request in json.loads(Path(sys.argv[1]).read_text()):
        try:
            answers.append(answers_to(request))
        except Exception:
            answers.append(traceback.format_exc())
        cleanup_dist_env_and_memory()
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
