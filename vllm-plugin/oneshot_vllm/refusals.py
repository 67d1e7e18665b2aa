"""What the plugin refuses, by the configs alone: before vLLM starts a worker or reads a weight."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from oneshot_vllm.config import reads_ranges

STYLES = ("colwise", "rowwise")  # of tensor parallelism, in which linears of low rank can be shared


class LlamaRefusals(VerifyAndUpdateConfig):
    """Of the form with Llama's layers."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raise `ValueError` for what vLLM offers and these layers do not have."""
        refuse_quantisation(vllm_config)
        refuse_sharded_adapters(vllm_config)
        config: Any = vllm_config.model_config.hf_config
        parallel = vllm_config.parallel_config
        names = {
            "num_attention_heads": "heads",
            "output_rank": "ranks of attention's output",
            "intermediate_size": "neurons",
        }
        refuse_uneven(parallel, config.layers, names)
        refuse_kv_heads(parallel, config.layers)
        refuse_broken_groups(parallel, config)
        refuse_stages(parallel, config.layers)


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
        refuse_adapters(vllm_config)
        config: Any = vllm_config.model_config.hf_config
        parallel, layers = vllm_config.parallel_config, config.sizes["layers"]
        refuse_own_heads(config)
        refuse_expert_parallelism(parallel, layers)
        refuse_shared_ranks(parallel, config)
        refuse_stages(parallel, layers)
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
    has_linear_head = not reads_ranges(config) and config.output_head is None  # ranges are tables, not linears
    if has_linear_head and not is_ignored("lm_head", stated.get("ignore") or ()):
        raise ValueError(
            "The checkpoint has a quantised output head, which oneshot-vllm has not; quantise the result with "
            "ignore=['lm_head']."
        )


def is_ignored(name: str, ignored: Iterable[str]) -> bool:
    """Return whether a list of names, and of patterns after `re:`, has a module."""
    return any(re.match(one[3:], name) if one.startswith("re:") else one == name for one in ignored)


def refuse_sharded_adapters(vllm_config: VllmConfig) -> None:
    """Raise `ValueError` for adapters in ways that were not tried."""
    adapters = vllm_config.lora_config
    if adapters is not None and (adapters.fully_sharded_loras or vllm_config.model_config.quantization is not None):
        raise ValueError(
            "oneshot-vllm has adapters for linears that are not quantised, and a whole adapter on every GPU; leave out "
            "--enable-lora, or --fully-sharded-loras and the quantisation."
        )


def refuse_adapters(vllm_config: VllmConfig) -> None:
    """Raise `ValueError` for adapters."""
    if vllm_config.lora_config is not None:
        raise ValueError(
            "oneshot-vllm has no adapters; leave out --enable-lora, and merge an adapter into the weights before "
            "(merge_and_unload of peft)."
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


def refuse_kv_heads(parallel: ParallelConfig, layers: list[dict[str, Any]]) -> None:
    """Raise `ValueError` if GPUs have neither equally many KV heads, nor are equally many for each KV head."""
    num_gpus = parallel.tensor_parallel_size
    for number, layer in enumerate(layers):
        groups = layer["num_key_value_heads"]
        if groups and groups % num_gpus and num_gpus % groups:
            raise ValueError(
                f"Layer {number} has {groups} KV heads, which {num_gpus} GPUs cannot share equally; give a "
                "--tensor-parallel-size that divides them or is a multiple, such as 1."
            )


def refuse_broken_groups(parallel: ParallelConfig, config: Any) -> None:
    """Raise `ValueError` if a GPU's inputs of a quantised linear are no whole groups."""
    num_gpus, stated = parallel.tensor_parallel_size, getattr(config, "quantization_config", None) or {}
    schemes = [scheme.get("weights") or {} for scheme in (stated.get("config_groups") or {}).values()]
    if num_gpus > 1 and any(scheme.get("actorder") in ("group", "dynamic", True) for scheme in schemes):
        raise ValueError(
            "The checkpoint has groups in the order of activations, which GPUs cannot share; give "
            "--tensor-parallel-size 1, or quantise with actorder='static'."
        )
    grouped = [scheme for scheme in schemes if scheme.get("strategy") in ("group", "tensor_group")]
    for group in {scheme.get("group_size") or 1 for scheme in grouped}:
        for number, layer in enumerate(config.layers):
            read = layer["output_rank"] or layer["num_attention_heads"] * layer["value_size"]
            shared = {"inputs of attention's output": read, "neurons": layer["intermediate_size"]}
            for counted, size in shared.items():
                if size % (group * num_gpus):
                    raise ValueError(
                        f"Layer {number} has {size} {counted}, which {num_gpus} GPUs cannot share in groups of {group} "
                        f"weights; give another --tensor-parallel-size, or compress with --serve "
                        f"tp={num_gpus},group={group}."
                    )


def refuse_stages(parallel: ParallelConfig, layers: list[dict[str, Any]]) -> None:
    """Raise `ValueError` if a stage of a pipeline has no attention, so that it caches nothing."""
    stages = parallel.pipeline_parallel_size
    if stages > len(layers):
        raise ValueError(
            f"The result has {len(layers)} layers, which {stages} stages cannot share; give a smaller "
            "--pipeline-parallel-size."
        )
    for stage in range(stages if stages > 1 else 0):
        start, end = get_pp_indices(len(layers), stage, stages)
        if not any(layer["num_attention_heads"] for layer in layers[start:end]):
            raise ValueError(
                f"Stage {stage} of the pipeline would have no layer with attention; give another "
                "--pipeline-parallel-size."
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


def refuse_shared_ranks(parallel: ParallelConfig, config: Any) -> None:
    """Raise `ValueError` for linears of low rank that GPUs cannot share."""
    num_gpus = parallel.tensor_parallel_size
    plan = getattr(config, "base_model_tp_plan", None) or {}
    for number, linear, rank in low_rank(config.resized) if num_gpus > 1 else ():
        style = style_of(f"layers.{number}.{linear}", plan)
        if style not in STYLES:
            raise ValueError(
                f"{linear} of layer {number} has a low rank, which several GPUs cannot share for this family; give "
                "--tensor-parallel-size 1, or compress with --set ranks=none."
            )
        if style == "rowwise" and rank % num_gpus:
            raise ValueError(
                f"{linear} of layer {number} has a rank of {rank}, which {num_gpus} GPUs cannot share equally; give a "
                "--tensor-parallel-size that divides it, such as 1."
            )


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """Return how GPUs share a linear, by its name in the model and transformers' plan, which vLLM's backend follows."""
    return next((style for pattern, style in plan.items() if re.match(pattern, name)), None)


def low_rank(resized: list[dict[str, Any]]) -> Iterator[tuple[int, str, int]]:
    """Yield the linears that read through coordinates: layer, name and rank; `resized` as the modelling file has it."""
    for number, layer in enumerate(resized):
        for linear, (_, source) in layer["linears"].items():
            if isinstance(source, str):
                yield number, linear, layer["reads"][source][1]
