"""Ask transformers in the environment of quantisers: `python ask_transformers.py REQUESTS.json ANSWERS.json`.

Requests and answers are as in `ask_vllm.py`, without continuations.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Answer the requests in the first file into the second."""
    answers = []
    for request in json.loads(Path(sys.argv[1]).read_text()):
        model = AutoModelForCausalLM.from_pretrained(
            request["folder"], trust_remote_code=True, dtype=getattr(torch, request["dtype"])
        )
        found = []
        for prompt in request["prompts"]:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                scores = model(ids, use_cache=False).logits.float().log_softmax(-1)[0, :-1]
            found.append({"scores": scores.gather(1, ids[0, 1:, None])[:, 0].tolist()})
        answers.append(found)
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
