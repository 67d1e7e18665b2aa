"""What the plugin refuses: in one sentence, by the configs alone, so no weight is read (there are none here)."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ask_vllm_together
from engines import BY_LAYER, SIZES
from families.cases import variants

from oneshot import Config
from oneshot.pipeline import compress

HEAD: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
W8A8 = HEAD | {"ignore": ["re:.*lm_head"]}
EIGHT_BITS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
FOUR_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
W4A16 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
ORDERED = W4A16 | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": FOUR_BITS | {"actorder": "group"}}}}
W4A16 |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": FOUR_BITS}}}
LLAMA, GRANITE, NO_RANKS, HUNYUAN = "llama", "granite", "granite, no ranks", "hunyuan_v1_dense"
RANGES = "groups on two GPUs, beside a head of ranges"  # which are tables, so no quantiser has to leave them out
QUANTISED: dict[tuple[str, str], tuple[dict[str, Any], str]] = {  # and what config.json states
    (LLAMA, "a quantised head"): (HEAD | {"ignore": []}, "has a quantised output head"),
    (LLAMA, "a quantised cache"): (W8A8 | {"kv_cache_scheme": EIGHT_BITS}, "has a quantised KV cache"),
    (LLAMA, "rotated linears"): (W8A8 | {"transform_config": {"config_groups": {}}}, "has rotated linears"),
    (LLAMA, "groups on two GPUs"): (W4A16, "which 2 GPUs cannot share in groups of 128 weights"),
    (LLAMA, RANGES): (W4A16 | {"ignore": []}, "which 2 GPUs cannot share in groups of 128 weights"),
    (LLAMA, "ordered groups on two GPUs"): (ORDERED, "has groups in the order of activations"),
    (GRANITE, "a quantised file"): (W8A8, "has no quantised linears for this family (compressed-tensors)"),
}
UNTRIED: dict[str, tuple[dict[str, Any], str]] = {
    "adapters": ({"enable_lora": True}, "has no adapters; leave out --enable-lora"),
    "stages": ({"pipeline_parallel_size": 3}, "has 2 layers, which 3 stages cannot share"),
}
TENSOR_PARALLEL: dict[tuple[str, str], tuple[int, str]] = {
    (LLAMA, "KV heads on two GPUs"): (2, "Layer 1 has 3 KV heads, which 2 GPUs cannot share equally"),
    (LLAMA, "neurons on two GPUs"): (2, "Layer 1 has 77 neurons, which 2 GPUs cannot share equally"),
    (GRANITE, "an odd rank on two GPUs"): (2, "has a rank of 33, which 2 GPUs cannot share equally"),
    (HUNYUAN, "ranks on two GPUs"): (2, "has a low rank, which several GPUs cannot share"),
    (NO_RANKS, "neurons on two GPUs"): (2, "Layer 1 has 77 neurons, which 2 GPUs cannot share equally"),
}
CASES: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    (result, name): case
    for result in (LLAMA, GRANITE)
    for name, case in UNTRIED.items()
    if (result, name) != (LLAMA, "adapters")
}
CASES[LLAMA, "shared adapters"] = (
    {"enable_lora": True, "fully_sharded_loras": True},
    "has adapters for linears that are not quantised, and a whole adapter on every GPU",
)
CASES |= {case: ({"tensor_parallel_size": count}, part) for case, (count, part) in TENSOR_PARALLEL.items()}
CASES |= {
    case: ({"tensor_parallel_size": 2} if "GPUs" in case[1] else {}, part) for case, (_, part) in QUANTISED.items()
}
CASES[LLAMA, "at load"] = (
    {"quantization": "fp8"},
    "takes the quantised checkpoints of llm-compressor (compressed-tensors)",
)
CASES[LLAMA, "a stage without attention"] = (
    {"pipeline_parallel_size": 2},
    "Stage 1 of the pipeline would have no layer with attention",
)
CASES[GRANITE, "at load"] = {"quantization": "fp8"}, "for this family (fp8); leave out --quantization"


@pytest.fixture(scope="module")
def errors(
    make_checkpoint: Callable[..., Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Any]:
    """What vLLM says of every case, in one process."""
    folder, requests = tmp_path_factory.mktemp("results"), []
    text = {"calibration": str(text_file), "num_sequences": 16, "sequence_length": 32}
    sources = {LLAMA: {}, GRANITE: variants()["granite"], NO_RANKS: variants()["granite"]}
    sources[HUNYUAN] = variants()["hunyuan_v1_dense"]
    for result, options in sources.items():
        ranks = {"ranks": "none"} if result == NO_RANKS else {}
        output, source = folder / result, make_checkpoint(**SIZES | {"layers": 2} | options)
        compress(Config.of(str(source), str(output), form="per-layer", device="cpu", **text | BY_LAYER | ranks))
        (output / "model.safetensors").unlink()
    for (result, name), (options, _) in CASES.items():
        one = folder / f"{len(requests)}"
        shutil.copytree(folder / result, one)
        config = json.loads((one / "config.json").read_text())
        if (result, name) in QUANTISED:
            config["quantization_config"] = QUANTISED[result, name][0]
        if name == RANGES:
            config |= {"own_head": True, "output_head": [{"rows": config["vocab_size"], "rank": 8}]}
        if name == "neurons on two GPUs":
            (config["layers"] if result == LLAMA else config["sizes"]["layers"])[1]["intermediate_size"] = 77
        if name == "KV heads on two GPUs":
            config["layers"][1]["num_key_value_heads"] = 3
        if name == "a stage without attention":
            config["layers"][1]["num_attention_heads"] = 0
        if name == "an odd rank on two GPUs":
            layer = config["resized"][1]
            layer["reads"][layer["linears"]["self_attn.o_proj"][1]][1] = 33
        (one / "config.json").write_text(json.dumps(config))
        requests.append({"folder": str(one), "prompts": [], "max_tokens": 1, "options": options})
    return dict(zip(CASES, ask_vllm_together(requests, folder), strict=True))


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_it_is_one_sentence_with_a_remedy(case: tuple[str, str], errors: dict[tuple[str, str], Any]) -> None:
    _, part = CASES[case]
    assert isinstance(errors[case], str)
    (sentence,) = re.findall(r"Value error, (.*?) \[type=", errors[case], re.DOTALL) or [errors[case][-2000:]]
    assert part in sentence
    assert re.fullmatch(r"[^\n]*; [^\n]*\.", sentence)
    assert ". " not in sentence
