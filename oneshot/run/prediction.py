"""What a result of a run will take: its footprint, its stages, and the bytes of its files."""

from collections.abc import Callable
from dataclasses import replace

from oneshot.config import Config
from oneshot.export import expected_bytes, part_dtype
from oneshot.export.quantised import quantised_bytes
from oneshot.export.tensor_types import most_bytes
from oneshot.footprint import (
    Work,
    check_stages,
    current_bounds,
    describe_work,
    load_libraries,
    predict_footprint,
    stage_seconds,
)
from oneshot.machine import Machine
from oneshot.planning import Plan
from oneshot.report.records import Footprint
from oneshot.run.dtype import fitting_dtype
from oneshot.run.run import Run
from oneshot.schedule import Schedule


def footprint_of(run: Run, config: Config, schedule: Schedule, plan: Plan | None, *, dry: bool = False) -> Footprint:
    """Return what the run of a plan will take (None: only a profile); raises `MemoryLimitError` before any work.

    The run takes bfloat16 if float32 is only faster, and memory does not hold the run in it. `dry`: also predict
    seconds, for which the machine is timed.
    """
    load_libraries(run.model, run.machine, config.text.calibration)
    bounds, work_on = current_bounds(config.machine, run.machine.device), _work_on(run, config, schedule, plan)
    if not run.has_computed:
        run.take_dtype(fitting_dtype(run.dtype, run.machine, work_on, bounds))
    result_bytes, beside_bytes = (0, 0)
    if plan is not None:
        parameters, is_final = run.grid.stack(plan).stored_parameters(), not schedule.plans_by_profile
        result_bytes, beside_bytes = file_bytes(run, config, parameters, plan, is_final=is_final)
    work = work_on(run.machine)
    check = check_stages(work, run.gguf, result_bytes) if run.form.opened_by == "transformers" else []

    def predicted(work: Work) -> Footprint:
        return predict_footprint(
            work,
            bounds,
            config.machine,
            result_bytes=result_bytes,
            beside_bytes=beside_bytes,
            check=check,
            measure_time=dry,
            dtype=run.dtype.reason,
        )

    footprint = predicted(work)
    if run.model.shape.experts is None:
        return footprint
    together = [each for each in run.machine.workers.gather((footprint.experts_together,)) if each is not None]
    if together and footprint.experts_together != min(together):  # processes sum statistics of the same experts
        footprint = predicted(work_on(replace(run.machine, experts_together=min(together))))
    return footprint


def stages_of(
    run: Run, config: Config, schedule: Schedule, plan: Plan | None, footprint: Footprint
) -> dict[str, float]:
    """Return the stages of a run in order, and predicted seconds of which only ratios count."""
    machine = replace(run.machine, experts_together=footprint.experts_together)
    return stage_seconds(_work_on(run, config, schedule, plan)(machine), footprint.store)


def file_bytes(run: Run, config: Config, parameters: int, plan: Plan, *, is_final: bool) -> tuple[int, int]:
    """Return the bytes of so many weights, and of those beside them that a form with a file of its own needs.

    `plan`: whose layers for tokens after the next one are in the same files. `is_final`: no profile will replace it.
    Before one the embedding counts as whole, so a quantised result is rather smaller.
    """
    further, quantisation = run.further.parameters(plan), run.quantisation
    if quantisation is not None:
        stack = run.grid.stack(plan)
        share = parameters / stack.stored_parameters()
        may_exceed = not is_final and config.target.size_bytes is None  # as a plan from a profile may not either
        awaits_ranks = may_exceed and run.method.plans_ranks and run.grid.has_ranks
        weights = quantised_bytes(quantisation, stack, awaits_ranks=awaits_ranks)
        return round(share * weights) + further * quantisation.dtype.itemsize, 0
    parameters += further
    of_parts, of_result = (
        expected_bytes(dtype, run.model.checkpoint, parameters)
        for dtype in (part_dtype(config.save_dtype), config.save_dtype)
    )
    if config.quantises:  # a second file, which replaces the first
        stack = run.grid.stack(plan)
        rounded = round((config.bits or 0) / 8 * parameters) or config.target.gguf_bytes or of_result
        rounded = min(rounded, round(parameters / stack.stored_parameters() * most_bytes(stack)))
        return min(of_result, rounded), of_parts + of_result
    return of_result, 0 if run.form.is_safetensors else of_parts


def _work_on(run: Run, config: Config, schedule: Schedule, plan: Plan | None) -> Callable[[Machine], Work]:
    """Return what gives the numbers of the run on a machine."""
    return lambda machine: describe_work(config, run.model, run.method, run.grid, schedule, plan, machine)
