"""The sections of `gpu.py` on real models: SmolLM2-135M, Qwen2.5-Coder-0.5B and Gemma 3 270M.

Where the bundle has not arrived, or with `--tiny`, a small model of random weights and its own text stand in for
SmolLM2.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_bundle import GEMMA, NAMES, data_folder, real_model
from gpu_common import Job
from gpu_runs import SPARSITY, random_model

FORMS = ("stock", "per-layer", "nemotron-nas")
SPARSITIES = (0.1, 0.2, 0.3)
LARGEST = {GEMMA: 0.2}  # of these sizes; most of its parameters are in its embedding
WINDOWS = 16
BATCHES = ((1, 1024), (16, 512))  # sequences and their tokens, of a prefill
DECODED = 64
ROUND_TO = 16  # of the sizes of a larger model
ROOM = 1024  # tokens of a cache for all that is decoded
SWEEP_SHARES = (0.25, 1.0)  # of the residual


def make_models(job: Job) -> None:
    """Make the models that sections share, before several of them begin at once."""
    _model_and_text(job)
    if not job.tiny:
        for name in NAMES:
            real_model(job.bundle, job.scratch, name)


def quality(job: Job, seed: str = "0") -> None:
    """Compress SmolLM2 at three sizes on the device, and judge the results on five kinds of text.

    The last results stay in the scratch folder, for `healing`.
    """
    model, calibration, real = _model_and_text(job)
    _quality(job, model, f"{calibration}+self", real, {"seed": int(seed)})


def other_model(job: Job, name: str, texts: str, seed: str = "0") -> None:
    """Compress another real model, whose text is general, its own, or both, and judge it on Python code as well.

    Args:
        texts: names of `--calibration`, joined by `+`; `general.jsonl` is the bundle's.
    """
    model = real_model(job.bundle, job.scratch, name)
    if model is None:
        job.emit("quality", recipe="none", skipped=f"{name} has not arrived")
        return
    _quality(job, model, _texts(job, texts), True, {"seed": int(seed)}, with_code=True)


def stock_form(job: Job, name: str) -> None:
    """Judge what another real model loses with general text in the stock form.

    FLAP's recipe is not beside it: it adds biases to FFNs, and the configs of these models have none.
    """
    model = real_model(job.bundle, job.scratch, name)
    if model is None:
        job.emit("quality", recipe="none", skipped=f"{name} has not arrived")
        return
    _quality(job, model, _texts(job, "general.jsonl"), True, {"form": "stock"}, with_code=True)


def _texts(job: Job, texts: str) -> str:
    names = (str(data_folder(job.bundle) / name) if name.endswith(".jsonl") else name for name in texts.split("+"))
    return "+".join(names)


def _quality(
    job: Job, model: Path, calibration: str, real: bool, settings: dict[str, Any], *, with_code: bool = False
) -> None:
    import torch
    from harness import own_settings
    from judging import judge, losses, score, text_records, text_scores

    from oneshot.pipeline import compress_sizes

    folder, device = _folder(job), torch.device(job.device)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    windows = _windows(job, model, calibration.removesuffix("+self"), real, with_code=with_code)
    started = time.perf_counter()
    dense = losses(text_scores([model], windows, device=device)[0])
    shared = {"model": model.name, "texts": text_records(windows)}
    job.emit("quality", recipe="dense", **shared, **dense, judge_seconds=time.perf_counter() - started)
    config = _config(job, model, calibration, real, folder / "compressed", settings)
    started = time.perf_counter()
    reports = compress_sizes(config, [size for size in SPARSITIES if size <= LARGEST.get(model.name, 1)])
    wall = time.perf_counter() - started
    job.emit("quality seconds", seconds=[report.seconds for report in reports], wall_seconds_of_all=wall)
    started = time.perf_counter()
    for report, measured in zip(reports, judge(reports, windows, model, device=device), strict=True):
        job.emit(
            "quality",
            recipe=config.recipe,
            form=config.form,
            asked=report.sparsity["asked"],
            sparsity=report.sparsity["reached"],
            seed=config.seed,
            settings=own_settings(report.to_dict()),
            **shared,
            seconds=report.seconds,
            judge_seconds=time.perf_counter() - started,
            peak_device_bytes=report.peak_device_bytes,
            warnings=list(report.warnings)[:5],
            **measured,
            **score(measured["perplexity"], dense["perplexity"]),
        )


def _config(job: Job, model: Path, calibration: str, real: bool, output: Path, settings: dict[str, Any]) -> Any:
    """Return what is asked of a model in the per-layer form at the smallest size; `settings` may say otherwise."""
    from oneshot import Config

    text = {"num_sequences": 128, "sequence_length": 1024} if real else {"num_sequences": 8, "sequence_length": 64}
    own = {"form": "per-layer", "sparsity": SPARSITIES[0], "device": job.device, "overwrite": True}
    return Config.of(str(model), str(output), calibration=calibration, **own | text | settings)


def curvature_uses(job: Job, seed: str, times: str = "1") -> None:
    """Compress SmolLM2 by every idea about output curvature, and sweep the default's result once more.

    Args:
        times: the usual text; with more of it only the default is compressed.
    """
    import torch
    from curvature_uses import IDEAS, calibration_tokens, compressed_by_idea
    from judging import losses, model_losses, score, text_records, text_scores
    from second_sweep import swept_

    from oneshot.evaluation import load_model
    from oneshot.text import load_token_ids

    model, calibration, real = _model_and_text(job)
    folder, device = _folder(job), torch.device(job.device)
    folder.mkdir(parents=True, exist_ok=True)
    windows = _windows(job, model, calibration, real)
    dense = losses(text_scores([model], windows, device=device)[0])["perplexity"]
    lengths = {"num_sequences": int(times) * (128 if real else 8), "sequence_length": 1024 if real else 64}
    more = lengths | {"seed": int(seed), "sparsity": SPARSITY}
    text = calibration_tokens(_config(job, model, f"{calibration}+self", real, folder / "ideas", more), folder)
    config = _config(job, model, text, real, folder / "ideas", more)
    shared = {"model": model.name, "texts": text_records(windows)}
    shared["calibration_tokens"] = lengths["num_sequences"] * lengths["sequence_length"]
    ideas = IDEAS if real else IDEAS[:1] + IDEAS[-1:]
    for row, result in compressed_by_idea(config, ideas if times == "1" else IDEAS[:1], dense, windows):
        job.emit("idea", **row, **shared)
        if row["idea"] != IDEAS[0].name:
            continue
        ids = load_token_ids(text, **lengths, seed=int(seed)).token_ids.to(device)
        for share in SWEEP_SHARES:
            again, whole = (load_model(one, device=device, dtype=torch.float32) for one in (result, model))
            distances = swept_(again, whole, ids, share)
            measured = model_losses(again, windows)
            measured |= {"idea": f"second sweep, {share:g} of the residual", "distances": distances}
            job.emit("idea", **row | measured | score(measured["perplexity"], dense), **shared)


def healing(job: Job) -> None:
    """Train the last results of `quality` further, by distillation and by adapters, and judge them before and after."""
    import torch
    from heal import Training, heal

    model, calibration, real = _model_and_text(job)
    windows = _windows(job, model, calibration, real)
    if real:
        training = Training(ways=("distil", "lora"), steps=300, batch=8, length=512)
    else:
        training = Training(ways=("distil",), steps=2, batch=2, length=16)
    made = (_folder(job, section) / "compressed" for section in ("quality", "quality, seed 1", "quality, seed 2"))
    folder = next(folder for folder in made if folder.exists())
    results = sorted(path.parent for path in folder.glob("*/oneshot_report.json"))[-2:]
    for row in heal(model, results, Path(calibration), windows, training, torch.device(job.device)):
        job.emit("heal", **row)


def _windows(job: Job, model: Path, text: str, real: bool, *, with_code: bool = False) -> dict[str, Any]:
    """Return the windows that a model is judged on: of the bundle's texts, or of its `text` if it is not real."""
    from judging import CODE, KINDS, judging_windows

    from oneshot.evaluation import load_windows
    from oneshot.text import load_tokenizer

    tokenizer = load_tokenizer(model)
    if not real:
        return {"own": load_windows(text, tokenizer, sequence_length=64, max_windows=2)}
    kinds = (*KINDS, CODE) if with_code else tuple(KINDS)
    return judging_windows(data_folder(job.bundle), _folder(job), tokenizer, WINDOWS, kinds=kinds)


def _folder(job: Job, section: str | None = None) -> Path:
    """Return the folder of a section's results."""
    return job.scratch / (section or job.section).replace(", ", "-").replace(" ", "-")


def forms(job: Job) -> None:
    """Time a prefill and a decoded token of every form beside the dense model, op by op; the models take turns."""
    import torch

    from oneshot.evaluation import load_model, measure_latency

    dtype = torch.bfloat16 if job.cuda else torch.float32
    folders = {"dense": _model_and_text(job)[0]} | {form: _in_form(job, form) for form in FORMS}
    models = {
        name: load_model(folder, device=torch.device(job.device), dtype=dtype) for name, folder in folders.items()
    }
    for sequences, length in ((1, 16),) if job.tiny else BATCHES:
        ids = torch.randint(0, 1000, (sequences, length), generator=torch.Generator().manual_seed(0))
        measured = measure_latency(list(models.values()), ids, decode_tokens=4 if job.tiny else DECODED)
        for name, (prefill, decode) in zip(models, measured, strict=True):
            facts = {"form": name, "how": "eager", "sequences": sequences, "length": length}
            job.emit("speed", **facts, prefill_seconds=prefill, decode_seconds=decode)


def compiled_forms(job: Job) -> None:
    """Time every form with `torch.compile`: decoding by `generate` with a static cache first, then the prefills."""
    import torch

    from oneshot.evaluation import load_model

    dtype, length = torch.bfloat16 if job.cuda else torch.float32, 16 if job.tiny else BATCHES[0][1]
    ids = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(0)).to(job.device)
    folders = {"dense": _model_and_text(job)[0]} | {form: _in_form(job, form) for form in ("per-layer", *FORMS)}
    models = {
        name: load_model(folder, device=torch.device(job.device), dtype=dtype) for name, folder in folders.items()
    }
    for name, model in models.items():
        facts = {"form": name, "how": "torch.compile", "sequences": 1, "length": length}
        count = 4 if job.tiny else DECODED
        first = job.seconds_once(lambda m=model, c=count: _generate(m, ids, c + 1))
        many = job.seconds_of(lambda m=model, c=count: _generate(m, ids, c + 1), 3)
        one = job.seconds_of(lambda m=model: _generate(m, ids, 1), 3)
        job.emit("speed", **facts, decode_seconds=(many - one) / count, first_seconds=first)
    for name, model in models.items():
        facts = {"form": name, "how": "torch.compile", "sequences": 1, "length": length}
        # without a GPU only the tracing is tried, because compiling takes a minute
        call = torch.compile(model, dynamic=False, backend="inductor" if job.cuda else "eager")
        first = job.seconds_once(lambda c=call: _prefill(c, ids))
        seconds = job.seconds_of(lambda c=call: _prefill(c, ids))
        job.emit("speed", **facts, prefill_seconds=seconds, first_seconds=first)


def graph_forms(job: Job) -> None:
    """Time every form as a server runs it, its kernels launched by one CUDA graph: a prefill and a decoded token."""
    import torch

    from oneshot.evaluation import load_model

    dtype = torch.bfloat16 if job.cuda else torch.float32
    folders = {"dense": _model_and_text(job)[0]} | {form: _in_form(job, form) for form in FORMS}
    models = {
        name: load_model(folder, device=torch.device(job.device), dtype=dtype) for name, folder in folders.items()
    }
    with torch.inference_mode():
        for sequences, length in ((1, 16),) if job.tiny else BATCHES:
            ids = torch.randint(0, 1000, (sequences, length), generator=torch.Generator().manual_seed(0)).to(job.device)
            calls = {name: _graphed_calls(job, model, ids) for name, model in models.items()}
            for name, (prefill, decode) in calls.items():
                facts = {"form": name, "how": "CUDA graph", "sequences": sequences, "length": length}
                job.emit("speed", **facts, prefill_seconds=job.seconds_of(prefill), decode_seconds=_each(job, decode))


def big_forms(job: Job, name: str, _: str) -> None:
    """Time the forms of a larger Llama as `graph_forms` does; its weights are random, which speed does not see.

    The per-layer form has the sizes that SmolLM2's result has, relative to the dense ones at the same depth. The stock
    form has as many parameters. *Expanded* means that linears whose rank saves little are whole again.
    """
    import json

    import torch
    from gpu_models import MODELS, VOCABULARY
    from transformers import LlamaConfig, LlamaForCausalLM

    from oneshot.export.modeling_oneshot import OneshotConfig, OneshotForCausalLM

    hidden, width, layers, heads, groups, size, tied = MODELS["tiny" if job.tiny else name]
    dense = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        vocab_size=2048 if job.tiny else VOCABULARY,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
    )
    small = json.loads((_in_form(job, "per-layer") / "config.json").read_text())
    sizes = [_scaled(small, round(each * (len(small["layers"]) - 1) / (layers - 1)), dense) for each in range(layers)]
    own = dense.to_dict() | {"layers": sizes, "norm_width": hidden, "model_type": "oneshot"}
    own.pop("architectures", None)

    def made(form: str) -> Any:
        with torch.device(job.device):
            torch.set_default_dtype(torch.bfloat16 if job.cuda else torch.float32)
            if form in ("dense", "stock"):
                model: Any = LlamaForCausalLM(LlamaConfig(**dense.to_dict() | {"intermediate_size": widths[form]}))
            else:
                model = OneshotForCausalLM(OneshotConfig(**own))
            torch.set_default_dtype(torch.float32)
        if form == "per-layer, expanded":
            model.expand_()
        return model.eval()

    widths = {"dense": width}
    with torch.device("meta"):
        whole, smaller = (
            sum(each.numel() for each in model.parameters())
            for model in (LlamaForCausalLM(dense), OneshotForCausalLM(OneshotConfig(**own)))
        )
    widths["stock"] = round((width - (whole - smaller) / (3 * hidden * layers)) / ROUND_TO) * ROUND_TO
    for form in ("dense", "stock", "per-layer", "per-layer, expanded"):
        model = made(form)
        stored = sum(each.numel() for each in model.parameters())
        with torch.inference_mode():
            for sequences, length in ((1, 16),) if job.tiny else BATCHES:
                ids = torch.randint(0, 1000, (sequences, length), generator=torch.Generator().manual_seed(0))
                prefill, decode = _graphed_calls(job, model, ids.to(job.device))
                facts = {"model": name, "form": form, "how": "CUDA graph", "sequences": sequences, "length": length}
                seconds = {"prefill_seconds": job.seconds_of(prefill), "decode_seconds": _each(job, decode)}
                job.emit("speed", **facts, parameters=stored, dense_parameters=whole, **seconds)
                del prefill, decode
        del model
        if job.cuda:
            torch.cuda.empty_cache()


def _scaled(small: dict[str, Any], layer: int, dense: Any) -> dict[str, Any]:
    """Return the sizes of a layer of a result as those of a larger model."""
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
    count = 4 if job.tiny else DECODED

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


def _model_and_text(job: Job) -> tuple[Path, str, bool]:
    """Return the folder of the model, its calibration text, and whether it is the real one."""
    model = None if job.tiny else real_model(job.bundle, job.scratch)
    if model is not None:
        return model, str(data_folder(job.bundle) / "general.jsonl"), True
    folder, _ = random_model(job, "tiny" if job.tiny else "1.1B")
    return folder, str(folder / "text.txt"), False


def _in_form(job: Job, form: str) -> Path:
    """Return the folder of the model in a form; it is compressed with little text, because only its speed matters."""
    from oneshot import Config
    from oneshot.pipeline import compress

    output = job.scratch / "forms" / form
    if not output.exists():
        model, calibration, _ = _model_and_text(job)
        text = (
            {"num_sequences": 8, "sequence_length": 64} if job.tiny else {"num_sequences": 32, "sequence_length": 512}
        )
        settings = {"form": form, "calibration": calibration, "sparsity": SPARSITY, "device": job.device, **text}
        output.parent.mkdir(exist_ok=True)
        compress(Config.of(str(model), str(output), overwrite=True, **settings))
    return output
