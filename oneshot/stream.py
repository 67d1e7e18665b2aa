"""The model, one decoder layer at a time: transformers' own layer class with real weights."""

import copy
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from oneshot.activations import ActivationStore
from oneshot.arch.base import (
    ATTENTION_NORM,
    DOWN_PROJ,
    FFN_NORM,
    GATE_PROJ,
    K_PROJ,
    O_PROJ,
    Q_PROJ,
    UP_PROJ,
    Architecture,
)
from oneshot.errors import CalibrationError, DeviceError
from oneshot.output_head import OutputHead

STREAM_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """`auto` is CUDA where there is one; of several processes on a machine each takes its own, by its local rank.

    Raises `DeviceError` when the device is not there.
    """
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if name in ("auto", "cuda") and local_rank is not None:
        name = f"cuda:{local_rank}"
    if name == "auto":
        return torch.device("cuda")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"--device {name} is not understood; use cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name} is not supported; use cpu or cuda.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise DeviceError(
            f"--device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices; use --device cpu."
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and on CPUs that multiply it in hardware, float32 elsewhere."""
    if name != "auto":
        return STREAM_DTYPES[name]
    capabilities = torch.cpu.get_capabilities()
    fast_on_cpu = capabilities.get("amx_bf16", False) or capabilities.get("avx512_bf16", False)
    return torch.bfloat16 if device.type == "cuda" or fast_on_cpu else torch.float32


class LayerStream:
    """Builds decoder layers of a model from their tensors, without the rest of the model.

    Args:
        config: the model's config.json. sequence_length: tokens in every sequence of the stream.
        device, dtype: where and in what the layers compute.
    """

    def __init__(
        self,
        config: dict[str, Any],
        architecture: Architecture,
        *,
        sequence_length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.masking_utils import create_sliding_window_causal_mask
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.device, self.dtype = device, dtype
        self._architecture = architecture
        one_layer = {name: value for name, value in config.items() if name != "layer_types"} | {"num_hidden_layers": 1}
        hf_config = CONFIG_MAPPING[config["model_type"]].from_dict(one_layer)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation="sdpa")
        self._template = model.get_submodule(architecture.layers)[0].eval().requires_grad_(False)
        self._final_norm = model.get_submodule(architecture.final_norm).requires_grad_(False)
        positions = torch.arange(sequence_length, device=device).unsqueeze(0)
        example = torch.zeros(1, sequence_length, hf_config.hidden_size, dtype=dtype, device=device)
        window = getattr(hf_config, "sliding_window", None)
        mask = None  # scaled dot product attention is causal by itself
        if window is not None and window < sequence_length:
            mask = create_sliding_window_causal_mask(
                config=model.config,
                inputs_embeds=example,
                attention_mask=None,
                past_key_values=None,
                position_ids=positions,
            )
        self._call_arguments: dict[str, Any] = {"attention_mask": mask}
        if architecture.positions is None:
            rotary = type(model.model.rotary_emb)(model.config).to(device)
            self._call_arguments |= {"position_embeddings": rotary(example, positions), "position_ids": positions}

    def embed(
        self, embedding: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Token embeddings, and learned positions `(at least length, D)`, as `(sequences, length, D)` on the device.

        Raises `CalibrationError` for tokens and positions that have no row.
        """
        if int(token_ids.max()) >= len(embedding):
            raise CalibrationError(
                f"The tokenizer gives token {int(token_ids.max())} but the embedding has {len(embedding)} rows; "
                "give the tokenizer that belongs to the model."
            )
        embedded = functional.embedding(token_ids, embedding).to(self.device, self.dtype)
        if positions is None:
            return embedded
        if token_ids.shape[1] > len(positions):
            raise CalibrationError(
                f"--sequence-length {token_ids.shape[1]} is beyond the model's {len(positions)} positions; "
                "give a smaller one."
            )
        return embedded + positions[: token_ids.shape[1]].to(self.device, self.dtype)

    def layer(self, tensors: dict[str, torch.Tensor]) -> "StreamLayer":
        """A layer with these weights, under Llama's names, cast to the stream's dtype on its device."""
        module = copy.deepcopy(self._template)
        weights = {
            name: tensor.to(self.device, self.dtype) for name, tensor in tensors.items() if "rotary_emb" not in name
        }
        module.load_state_dict(self._architecture.to_own_names(weights), assign=True)
        return StreamLayer(module.requires_grad_(False), self._architecture, self._call_arguments)

    def output_head(self, norm: dict[str, torch.Tensor], weight: torch.Tensor) -> OutputHead:
        """The last norm (its own tensors) and the head `(vocabulary, D)`, cast to the stream's dtype on its device."""
        module = copy.deepcopy(self._final_norm)
        module.load_state_dict({name: tensor.to(self.device, self.dtype) for name, tensor in norm.items()}, assign=True)
        return OutputHead(module.requires_grad_(False), weight.to(self.device, self.dtype))


class StreamLayer:
    """One pre-norm decoder layer, `h = x + attn(norm(x))` and `h + ffn(norm(h))`, callable in its two halves."""

    def __init__(self, module: nn.Module, architecture: Architecture, call_arguments: dict[str, Any]) -> None:
        def part(name: str) -> Any:
            return module.get_submodule(architecture.own_name(name))

        self._call_arguments = call_arguments
        self._attention, self._attention_norm, self._ffn_norm = part("self_attn"), part(ATTENTION_NORM), part(FFN_NORM)
        self._q_proj, self._k_proj, self._o_proj = part(Q_PROJ), part(K_PROJ), part(O_PROJ)
        self._gate_proj = part(GATE_PROJ) if architecture.gated else None
        self._up_proj, self._down_proj = part(UP_PROJ), part(DOWN_PROJ)
        self._activation = module.get_submodule(architecture.activation)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """`x + attn(norm(x))`, `(sequences, length, D)`."""
        output, _ = self._attention(hidden_states=self._attention_norm(x), **self._call_arguments)
        return x + output

    def queries_keys(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `q_proj` and `k_proj` give, before norms and rotation, as rows `(tokens, H·h)` and `(tokens, G·h)`."""
        normed = self._attention_norm(x).flatten(0, -2)
        return self._q_proj(normed), self._k_proj(normed)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """The concatenated head outputs that `o_proj` consumes, as rows `(tokens, H·h)`."""
        consumed: list[torch.Tensor] = []
        handle = self._o_proj.register_forward_pre_hook(lambda _, inputs: consumed.append(inputs[0]))
        try:
            self.attention(x)
        finally:
            handle.remove()
        return consumed[0].flatten(0, -2)

    def neurons(self, h: torch.Tensor) -> torch.Tensor:
        """The FFN activations that `down_proj` consumes, as rows `(tokens, n)`."""
        normed = self._ffn_norm(h)
        if self._gate_proj is None:
            return self._activation(self._up_proj(normed)).flatten(0, -2)
        return self._activation(self._gate_proj(normed)).mul_(self._up_proj(normed)).flatten(0, -2)

    def gates(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What an FFN with a gate reads, `(tokens, D)`, and the gate's activations, `(tokens, n)`."""
        assert self._gate_proj is not None
        normed = self._ffn_norm(h).flatten(0, -2)
        return normed, self._activation(self._gate_proj(normed))

    def project_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """`o_proj` of rows `(tokens, H·h)`."""
        return self._o_proj(heads)

    def project_neurons(self, neurons: torch.Tensor) -> torch.Tensor:
        """`down_proj` of rows `(tokens, n)`."""
        return self._down_proj(neurons)

    def ffn(self, h: torch.Tensor) -> torch.Tensor:
        """`h + ffn(norm(h))`, `(sequences, length, D)`."""
        return h + self._down_proj(self.neurons(h)).view_as(h)


def embed_text(
    stream: LayerStream,
    embeddings: Sequence[torch.Tensor],
    token_ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    batch_size: int,
    tier: str,
    folder: Path,
) -> tuple[list[slice], list[ActivationStore]]:
    """The batches of a text, and for each of the embeddings a store of the `tier` that holds the text in it."""
    shape = (token_ids.shape[0], token_ids.shape[1], embeddings[0].shape[1])
    stores = [ActivationStore(shape, stream.dtype, tier=tier, device=stream.device, folder=folder) for _ in embeddings]
    parts = batches(len(token_ids), batch_size)
    for batch in parts:
        for embedding, store in zip(embeddings, stores, strict=True):
            store.write(batch, stream.embed(embedding, token_ids[batch], positions))
    return parts, stores


def release_heap() -> None:
    """Give freed memory back to the system before a peak.

    glibc keeps freed blocks below 32 MiB, such as a layer's weights and a batch's activations, which are of no use to
    the larger matrices that follow. Other C libraries have no `malloc_trim`, and nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def batches(num_sequences: int, batch_size: int) -> list[slice]:
    """Slices of at most `batch_size` sequences."""
    return [slice(start, min(start + batch_size, num_sequences)) for start in range(0, num_sequences, batch_size)]


def prefetch(load: Callable[[int], Any], count: int) -> Iterator[Any]:
    """`load(0) … load(count − 1)`, each next one loaded by a thread while the caller works on the last."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as executor:
        pending = executor.submit(load, 0)
        for index in range(count):
            loaded = pending.result()
            if index + 1 < count:
                pending = executor.submit(load, index + 1)
            yield loaded
