"""The sections of `gpu.py` on the quality of real models: SmolLM2-135M, Qwen2.5-Coder-0.5B and Gemma 3 270M.

Where the bundle has not arrived, or with `--tiny`, a small model of random weights and its own text stand in for
SmolLM2.
"""

import shutil
import time
from pathlib import Path
from typing import Any

from gpu_bundle import GEMMA, NAMES, data_folder, real_model
from gpu_common import Job
from gpu_runs import random_model

SPARSITIES = (0.1, 0.2, 0.3)
LARGEST = {GEMMA: 0.2}  # of these sizes, if the embedding stays whole: most of its parameters are there
WINDOWS = 16
TASK_LIMIT = 500  # documents of a task
TASK_BATCH = 16


def make_models(job: Job) -> None:
    """Make the models that sections share, before several of them begin at once."""
    model_and_text(job)
    if not job.tiny:
        for name in NAMES:
            real_model(job.bundle, job.scratch, name)


def quality(job: Job, seed: str = "0") -> None:
    """Compress SmolLM2 at three sizes on the device, and judge the results on five kinds of text.

    The last results stay in the scratch folder, for `healing`.
    """
    model, calibration, real = model_and_text(job)
    _quality(job, model, f"{calibration}+self", real, {"seed": int(seed)})


def other_model(job: Job, name: str, texts: str, seed: str = "0") -> None:
    """Compress another real model, whose text is general, its own, or both, and judge it on Python code as well.

    Args:
        texts: names of `--calibration`, joined by `+`; `general.jsonl` is the bundle's.
    """
    _other(job, name, texts, {"seed": int(seed)})


def stock_form(job: Job, name: str, texts: str = "general.jsonl") -> None:
    """Judge what another real model loses in the stock form, by default with general text alone."""
    _other(job, name, texts, {"form": "stock"}, most=LARGEST.get(name, 1))


def tasks(job: Job, name: str, form: str, seed: str) -> None:
    """Compress a real model by default, judge it on texts, and let lm-eval ask it and the dense model five tasks."""
    settings = {"form": form, "seed": int(seed)}
    _other(
        job, name, "general.jsonl+self", settings, most=LARGEST.get(name, 1) if form == "stock" else 1, with_tasks=True
    )


def flap(job: Job, name: str) -> None:
    """Judge what another real model loses with general text by FLAP's choice of neurons.

    Its biases of FFNs are left out, because the configs of these models have none.
    """
    settings = {"recipe": "flap", "form": "per-layer", "correction": "none"}
    _other(job, name, "general.jsonl", settings, most=LARGEST.get(name, 1))


def _other(
    job: Job, name: str, texts: str, settings: dict[str, Any], *, most: float = 1, with_tasks: bool = False
) -> None:
    """Compress and judge another real model, if its file has arrived."""
    model = real_model(job.bundle, job.scratch, name)
    if model is None:
        job.emit("quality", recipe="none", skipped=f"{name} has not arrived")
        return
    _quality(job, model, _texts(job, texts), True, settings, with_code=True, most=most, with_tasks=with_tasks)


def _texts(job: Job, texts: str) -> str:
    names = (str(data_folder(job.bundle) / name) if name.endswith(".jsonl") else name for name in texts.split("+"))
    return "+".join(names)


def _quality(
    job: Job,
    model: Path,
    calibration: str,
    real: bool,
    settings: dict[str, Any],
    *,
    with_code: bool = False,
    most: float = 1,
    with_tasks: bool = False,
) -> None:
    """Compress a model at `SPARSITIES` up to `most`, and judge the results; `with_tasks` also by lm-eval."""
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
    reports = compress_sizes(config, [size for size in SPARSITIES if size <= most])
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
    if with_tasks:
        _tasks(
            job,
            [(model, 0.0), *((Path(report.config["output"]), report.sparsity["asked"]) for report in reports)],
            config,
        )


def _tasks(job: Job, folders: list[tuple[Path, float]], config: Any) -> None:
    """Ask models of one size after the other, the dense model first, the five tasks whose answers are likelihoods."""
    import torch
    from judging import TASKS_OF_LIKELIHOODS, local_tasks, task_values

    from oneshot.evaluation import run_tasks

    include_path = local_tasks(data_folder(job.bundle), _folder(job))
    for folder, asked in folders:
        started = time.perf_counter()
        results = run_tasks(
            folder,
            TASKS_OF_LIKELIHOODS,
            limit=TASK_LIMIT,
            include_path=str(include_path),
            device=torch.device(job.device),
            batch_size=TASK_BATCH,
        )
        values = [value for value, _ in task_values(results, "chosen").values()]
        job.emit(
            "tasks",
            model=folders[0][0].name,
            recipe="dense" if folder == folders[0][0] else config.recipe,
            form=config.form,
            asked=asked,
            seed=config.seed,
            tasks=results,
            task_limit=TASK_LIMIT,
            mean_accuracy=sum(values) / len(values),
            task_seconds=time.perf_counter() - started,
        )


def _config(job: Job, model: Path, calibration: str, real: bool, output: Path, settings: dict[str, Any]) -> Any:
    """Return what is asked of a model in the per-layer form at the smallest size; `settings` may say otherwise."""
    from harness import read_alone

    from oneshot import Config

    text = {"num_sequences": 128, "sequence_length": 1024} if real else {"num_sequences": 8, "sequence_length": 64}
    own = {"form": "per-layer", "sparsity": SPARSITIES[0], "device": job.device, "overwrite": True}
    return Config.of(str(model), str(output), calibration=read_alone(calibration), **own | text | settings)


def healing(job: Job) -> None:
    """Train the last results of `quality` further, by distillation and by adapters, and judge them before and after."""
    import torch
    from heal import Training, heal

    model, calibration, real = model_and_text(job)
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


def model_and_text(job: Job) -> tuple[Path, str, bool]:
    """Return the folder of the model, its calibration text, and whether it is the real one."""
    model = None if job.tiny else real_model(job.bundle, job.scratch)
    if model is not None:
        return model, str(data_folder(job.bundle) / "general.jsonl"), True
    folder, _ = random_model(job, "tiny" if job.tiny else "1.1B")
    return folder, str(folder / "text.txt"), False
