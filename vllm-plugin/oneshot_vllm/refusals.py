"""What the plugin refuses, by the configs alone: before vLLM starts a worker or reads a weight."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.config import ParallelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig


class LlamaRefusals(VerifyAndUpdateConfig):
    """Of the form with Llama's layers."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raise `ValueError` for what vLLM offers and these layers do not have."""
        refuse_quantisation(vllm_config)
        refuse_untried(vllm_config)
        config: Any = vllm_config.model_config.hf_config
        names = {
            "num_key_value_heads": "KV heads",
            "output_rank": "ranks of attention's output",
            "intermediate_size": "neurons",
        }
        refuse_uneven(vllm_config.parallel_config, config.layers, names)


class ResizedRefusals(VerifyAndUpdateConfig):
    """Of families whose layers are not Llama's."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raise `ValueError` for what vLLM offers and its Transformers backend does not have for these layers."""
        if (method := vllm_config.model_config.quantization) is not None:
            raise ValueError(
                f"oneshot-vllm has no quantised linears for this family ({method}); leave out --quantization, or "
                "quantise a result of --form stock."
            )
        refuse_untried(vllm_config)
        config: Any = vllm_config.model_config.hf_config
        parallel, layers = vllm_config.parallel_config, config.sizes["layers"]
        refuse_own_heads(config)
        refuse_expert_parallelism(parallel, layers)
        refuse_shared_ranks(parallel, config.resized)
        if not parallel.enable_expert_parallel:
            refuse_uneven(parallel, layers, {"intermediate_size": "neurons"})


def refuse_quantisation(vllm_config: VllmConfig) -> None:
    """Raise `ValueError` for quantised linears that were not tried, in a checkpoint or made while it is read."""
    method, config = vllm_config.model_config.quantization, vllm_config.model_config.hf_config
    if method is None:
        return
    stated: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    if method != "compressed-tensors" or not stated:
        raise ValueError(
            f"oneshot-vllm takes the quantised checkpoints of llm-compressor (compressed-tensors), not {method}; leave "
            "out --quantization, or quantise the result with llm-compressor."
        )
    for key, what in (("kv_cache_scheme", "a quantised KV cache"), ("transform_config", "rotated linears")):
        if stated.get(key):
            raise ValueError(
                f"The checkpoint has {what}, which oneshot-vllm has not; quantise the result without that."
            )
    if config.embedding is None and not is_ignored("lm_head", stated.get("ignore") or ()):
        raise ValueError(
            "The checkpoint has a quantised output head, which oneshot-vllm has not; quantise the result with "
            "ignore=['lm_head']."
        )
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        raise ValueError(
            "oneshot-vllm shares no quantised linears between GPUs; give --tensor-parallel-size 1, or open the result "
            "that is not quantised."
        )


def is_ignored(name: str, ignored: Iterable[str]) -> bool:
    """Return whether a list of names, and of patterns after `re:`, has a module."""
    return any(re.match(one[3:], name) if one.startswith("re:") else one == name for one in ignored)


def refuse_untried(vllm_config: VllmConfig) -> None:
    """Raise `ValueError` for adapters, and for layers that processes share."""
    if vllm_config.lora_config is not None:
        raise ValueError(
            "oneshot-vllm has no adapters; leave out --enable-lora, and merge an adapter into the weights before "
            "(merge_and_unload of peft)."
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            "oneshot-vllm has no pipeline parallelism; leave out --pipeline-parallel-size, or compress with --form "
            "stock."
        )


def refuse_uneven(parallel: ParallelConfig, layers: list[dict[str, Any]], names: dict[str, str]) -> None:
    """Raise `ValueError` if the GPUs cannot share a size of a layer equally. `names`: what such a size counts."""
    num_gpus = parallel.tensor_parallel_size
    for number, layer in enumerate(layers):
        for size, counted in names.items():
            if layer[size] % num_gpus:
                raise ValueError(
                    f"Layer {number} has {layer[size]} {counted}, which {num_gpus} GPUs cannot share equally; give a "
                    "--tensor-parallel-size that divides them, such as 1."
                )


def refuse_own_heads(config: Any) -> None:
    """Raise `ValueError` if a layer has other heads than the config, whose heads the backend takes everywhere."""
    for number, layer in enumerate(config.sizes["layers"]):
        if layer["num_attention_heads"] != config.num_attention_heads:
            raise ValueError(
                f"Layer {number} has {layer['num_attention_heads']} heads where the config has "
                f"{config.num_attention_heads}, which vLLM's Transformers backend cannot hold for this family; "
                "compress with --set heads=none."
            )


def refuse_expert_parallelism(parallel: ParallelConfig, layers: list[dict[str, Any]]) -> None:
    """Raise `ValueError` if processes share whole experts, which vLLM counts once for all layers, and counts differ."""
    counts = {layer["experts"]["count"] for layer in layers if layer["experts"]}
    if parallel.enable_expert_parallel and len(counts) > 1:
        raise ValueError(
            f"Layers have {min(counts)} to {max(counts)} experts, which vLLM's expert parallelism cannot hold; leave "
            "out --enable-expert-parallel, or compress with --set expert_counts=equal."
        )


def refuse_shared_ranks(parallel: ParallelConfig, resized: list[dict[str, Any]]) -> None:
    """Raise `ValueError` for linears of low rank on several GPUs."""
    if parallel.tensor_parallel_size > 1 and (linear := next(low_rank(resized), None)):
        raise ValueError(
            f"{linear} has a low rank, which several GPUs cannot share for this family; give "
            "--tensor-parallel-size 1, or compress with --set ranks=none."
        )


def low_rank(resized: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the linears that read through coordinates; `resized` as the modelling file has it."""
    for number, layer in enumerate(resized):
        for linear, (_, source) in layer["linears"].items():
            if isinstance(source, str):
                yield f"{linear} of layer {number}"
