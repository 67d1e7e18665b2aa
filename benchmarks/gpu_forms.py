"""The sections of `gpu.py` on speed: every form of SmolLM2-135M, and of a larger Llama of random weights."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_common import Job
from gpu_models import model_config
from gpu_real import model_and_text
from gpu_runs import SPARSITY

FORMS = ("stock", "per-layer", "nemotron-nas")
BATCHES = ((1, 1024), (16, 512))  # sequences and their tokens, of a prefill
DECODED = 64
ROUND_TO = 16  # of the sizes of a larger model
ROOM = 1024  # tokens of a cache for all that is decoded


def forms(job: Job) -> None:
    """Time a prefill and a decoded token of every form beside the dense model, op by op; the models take turns."""
    from oneshot.evaluation import measure_latency

    models = _loaded(job)
    for ids in _prompts(job):
        measured = measure_latency(list(models.values()), ids, decode_tokens=_num_decoded(job))
        for name, (prefill, decode) in zip(models, measured, strict=True):
            job.emit("speed", form=name, how="eager", **_size(ids), prefill_seconds=prefill, decode_seconds=decode)


def compiled_forms(job: Job) -> None:
    """Time every form with `torch.compile`: decoding by `generate` with a static cache first, then the prefills."""
    import torch

    ids, models, count = next(_prompts(job)), _loaded(job), _num_decoded(job)
    for name, model in models.items():
        first = job.seconds_once(lambda m=model: _generate(m, ids, count + 1))
        many = job.seconds_of(lambda m=model: _generate(m, ids, count + 1), 3)
        one = job.seconds_of(lambda m=model: _generate(m, ids, 1), 3)
        facts = {"form": name, "how": "torch.compile", **_size(ids)}
        job.emit("speed", **facts, decode_seconds=(many - one) / count, first_seconds=first)
    for name, model in models.items():
        # without a GPU only the tracing is tried, because compiling takes a minute
        call = torch.compile(model, dynamic=False, backend="inductor" if job.cuda else "eager")
        first = job.seconds_once(lambda c=call: _prefill(c, ids))
        seconds = job.seconds_of(lambda c=call: _prefill(c, ids))
        facts = {"form": name, "how": "torch.compile", **_size(ids)}
        job.emit("speed", **facts, prefill_seconds=seconds, first_seconds=first)


def graph_forms(job: Job) -> None:
    """Time every form as a server runs it, its kernels launched by one CUDA graph: a prefill and a decoded token."""
    for name, model in _loaded(job).items():
        _time_in_graphs(job, model, {"form": name})


def big_forms(job: Job, name: str, _: str) -> None:
    """Time the forms of a larger Llama as `graph_forms` does; its weights are random, which speed does not see.

    The per-layer form has the sizes that SmolLM2's result has, relative to the dense ones at the same depth. The stock
    form has as many parameters. *Expanded* means that linears whose rank saves little are whole again.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from oneshot.export.modeling_oneshot import OneshotConfig, OneshotForCausalLM

    dense = model_config(name, job)
    small, layers = json.loads((_in_form(job, "per-layer") / "config.json").read_text()), dense.num_hidden_layers
    places = [round(each * (len(small["layers"]) - 1) / (layers - 1)) for each in range(layers)]
    own = dense.to_dict() | {"layers": [_scaled(small, place, dense) for place in places]}
    own |= {"norm_width": dense.hidden_size, "model_type": OneshotConfig.model_type}
    by_layer = OneshotConfig(**{key: value for key, value in own.items() if key != "architectures"})
    with torch.device("meta"):
        whole, smaller = map(_num_parameters, (LlamaForCausalLM(dense), OneshotForCausalLM(by_layer)))
    narrower = dense.intermediate_size - (whole - smaller) / (3 * dense.hidden_size * layers)
    stock = LlamaConfig(**dense.to_dict() | {"intermediate_size": round(narrower / ROUND_TO) * ROUND_TO})
    variants: dict[str, tuple[Any, Any, bool]] = {  # class, config, and whether it is expanded
        "dense": (LlamaForCausalLM, dense, False),
        "stock": (LlamaForCausalLM, stock, False),
        "per-layer": (OneshotForCausalLM, by_layer, False),
        "per-layer, expanded": (OneshotForCausalLM, by_layer, True),
    }
    for form, (model_class, config, is_expanded) in variants.items():
        with torch.device(job.device):
            model = model_class(config).to(_dtype(job)).eval()
        if is_expanded:
            model.expand_()
        facts = {"model": name, "form": form, "parameters": _num_parameters(model), "dense_parameters": whole}
        _time_in_graphs(job, model, facts)
        del model
        if job.cuda:
            torch.cuda.empty_cache()


def _loaded(job: Job) -> dict[str, Any]:
    """Return SmolLM2 and its results in every form, on the device."""
    import torch

    from oneshot.evaluation import load_model

    folders = {"dense": model_and_text(job)[0]} | {form: _in_form(job, form) for form in FORMS}
    device = torch.device(job.device)
    return {name: load_model(folder, device=device, dtype=_dtype(job)) for name, folder in folders.items()}


def _dtype(job: Job) -> Any:
    import torch

    return torch.bfloat16 if job.cuda else torch.float32


def _prompts(job: Job) -> Iterator[Any]:
    """Yield random token ids `(sequences, length)` on the device, of every size that is timed."""
    import torch

    for size in ((1, 16),) if job.tiny else BATCHES:
        yield torch.randint(0, 1000, size, generator=torch.Generator().manual_seed(0)).to(job.device)


def _size(ids: Any) -> dict[str, int]:
    return {"sequences": ids.shape[0], "length": ids.shape[1]}


def _num_decoded(job: Job) -> int:
    return 4 if job.tiny else DECODED


def _num_parameters(model: Any) -> int:
    return sum(each.numel() for each in model.parameters())


def _scaled(small: dict[str, Any], layer: int, dense: Any) -> dict[str, Any]:
    """Return the sizes of a layer of a result, scaled to a larger model."""
    sizes, width = dict(small["layers"][layer]), small["hidden_size"]
    inner = sizes["intermediate_size"] / small["intermediate_size"]
    for kind in ("query_key_rank", "output_rank", "gate_rank", "up_rank"):
        sizes[kind] = round(sizes[kind] / width * dense.hidden_size / ROUND_TO) * ROUND_TO
    return sizes | {
        **dict.fromkeys(("hidden_size", "middle_size", "output_size"), dense.hidden_size),
        **dict.fromkeys(("query_key_size", "value_size"), dense.head_dim),
        "intermediate_size": round(inner * dense.intermediate_size / ROUND_TO) * ROUND_TO,
        "num_attention_heads": dense.num_attention_heads,
        "num_key_value_heads": dense.num_key_value_heads,
    }


def _time_in_graphs(job: Job, model: Any, facts: dict[str, Any]) -> None:
    """Write a row for every size of prompt; `facts`: what else it says."""
    import torch

    with torch.inference_mode():
        for ids in _prompts(job):
            prefill, decode = _graphed_calls(job, model, ids)
            seconds = {"prefill_seconds": job.seconds_of(prefill), "decode_seconds": _each(job, decode)}
            job.emit("speed", **facts, how="CUDA graph", **_size(ids), **seconds)
            del prefill, decode  # and with them the cache


def _graphed_calls(job: Job, model: Any, ids: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a prefill and the decoding of one token behind it; each call of the second makes the cache longer."""
    from transformers import StaticCache

    cache, step = StaticCache(config=model.config, max_cache_len=ids.shape[1] + ROOM), ids[:, :1].clone()
    model(ids, past_key_values=cache, logits_to_keep=1)
    return (
        _graphed(job, lambda: model(ids, use_cache=False, logits_to_keep=1)),
        _graphed(job, lambda: model(step, past_key_values=cache, logits_to_keep=1)),
    )


def _graphed(job: Job, call: Callable[[], object]) -> Callable[[], object]:
    """Return a call that launches the kernels of another; without a GPU the other itself."""
    import torch

    if not job.cuda:
        return call
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries make their workspaces before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_: Callable[[], object] = call) -> None:  # what the call reads must stay, as the graph does not own it
        graph.replay()

    return replay


def _each(job: Job, call: Callable[[], object]) -> float:
    """Return the seconds of one of many calls in a row."""
    count = _num_decoded(job)

    def many() -> None:
        for _ in range(count):
            call()

    return job.seconds_of(many) / count


def _generate(model: Any, ids: Any, count: int) -> None:
    """Write `count` tokens; transformers compiles the decoding of a static cache on CUDA."""
    model.generate(
        ids,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
    )


def _prefill(call: Any, ids: Any) -> None:
    import torch

    with torch.inference_mode():
        call(ids, use_cache=False, logits_to_keep=1)


def _in_form(job: Job, form: str) -> Path:
    """Return the folder of the model in a form; it is compressed with little text, because only its speed matters."""
    from oneshot import Config
    from oneshot.pipeline import compress

    output = job.scratch / "forms" / form
    if not output.exists():
        model, calibration, _ = model_and_text(job)
        text = (
            {"num_sequences": 8, "sequence_length": 64} if job.tiny else {"num_sequences": 32, "sequence_length": 512}
        )
        settings = {"form": form, "calibration": calibration, "sparsity": SPARSITY, "device": job.device, **text}
        output.parent.mkdir(exist_ok=True)
        compress(Config.of(str(model), str(output), overwrite=True, **settings))
    return output
