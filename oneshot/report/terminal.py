"""Tables on the terminal, at most 80 columns wide."""

from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oneshot.architecture import RANKED_KINDS, TABLES
from oneshot.errors import printable
from oneshot.planning import Profile
from oneshot.report.layer_table import divergence_name, layer_table, size_rows
from oneshot.report.mixture import COLUMNS, mixture_rows
from oneshot.report.records import Footprint, LayerReport, Report, grouped_experts
from oneshot.report.words import OPENED, duration, gibibytes, show

WIDTH = 80
DRY_RUN = "dry run: only headers are read, nothing is written"
MAY_BE_WRONG = "may be wrong by a factor of two"
FROM_A_PROFILE = "The sizes of each layer will come from a profile; memory and time are those of equal layers."
PLACES = {"device": "in the device's memory", "host": "in host memory", "disk": "in --offload-dir"}  # by store
SHARED = ("prepare", "curvature", "profile")  # stages that several sizes have together
UNITS = ("heads", "ffn")
WORST = {  # of a layer, and their formats
    "predicted_error": ".4f",
    "measured_error": ".4f",
    "condition_number": ".1e",
    "max_interpolation": ".2f",
}


def print_report(report: Report) -> None:
    """Print sizes before and after, and one line for every layer."""
    console = open_console()
    names = printable(f"{report.config['checkpoint']} → {report.config['output']}")
    console.print(_table(names, ("", "dense", "compressed", "change"), starmap(_size_row, size_rows(report))))
    headings = ("layer", "heads", "FFN", "predicted", "measured", "condition", "max|T|", "s")
    console.print(_table("error by layer", headings, map(_error_row, report.layers)))
    columns, rows = layer_table(report)
    if any(column.startswith("rank") for column in columns):
        console.print(_table("kept sizes and ranks by layer", columns, rows))
    for table in TABLES:
        if report.plan.get(table):  # older reports have none of the head
            ranks, width = ", ".join(str(one["rank"]) for one in report.plan[table]), report.dense_shape["hidden_size"]
            console.print(f"{table.replace('_', ' ')}: ranks {ranks} of {width} by ranges of the vocabulary")
    layers = report.plan["layers"]
    counts = {kind: sum(layer[f"{kind}_rank"] is not None for layer in layers) for kind in RANKED_KINDS}
    shares = [f"{kind.replace('_', ' and ')} in {count}" for kind, count in counts.items() if count]
    if shares:
        console.print(f"layers with linears of low rank: {', '.join(shares)} of {len(layers)}")
    if report.predicted_divergence is not None:
        shown = ", ".join(f"{name} {value:.3f}" for name, value in report.predicted_divergence.items())
        console.print(f"{divergence_name(report.dense_shape)}: {shown}")
    asked, reached = report.sparsity["asked"], report.sparsity["reached"]
    console.print(
        f"sparsity asked {show(asked, '.4f')}, reached {show(reached, '.4f')} of the stored parameters; "
        f"{report.seconds['total']:.1f} s, peak memory {gibibytes(report.peak_bytes)}"
        + (f" (predicted {report.footprint.host_bytes / 2**30:.2f})" if report.footprint else "")
    )
    if report.footprint is not None and report.footprint.experts_together is not None:
        console.print(f"memory held {grouped_experts(report.footprint)}")


def _size_row(name: str, values: dict[str, int]) -> tuple[str, ...]:
    dense, compressed = values["dense"], values["compressed"]
    return name, f"{dense:,}", f"{compressed:,}", f"{compressed / dense - 1:+.1%}" if dense else "–"


def _error_row(layer: LayerReport) -> tuple[str, ...]:
    by_kind = {sublayer.kind: sublayer for sublayer in layer.sublayers}
    kept = ("–" if one is None else f"{one.dense_size} → {one.kept_size}" for one in map(by_kind.get, UNITS))
    worst = (
        show(max((value for one in layer.sublayers if (value := getattr(one, name)) is not None), default=None), spec)
        for name, spec in WORST.items()
    )
    return str(layer.layer), *kept, *worst, f"{layer.seconds:.1f}"


def print_footprint(footprint: Footprint, *, checks: bool = False) -> None:
    """Print what a run would take; `checks`: with the check of its result, if that fits."""
    about = _about(footprint)
    rows = [("peak host memory", gibibytes(footprint.host_bytes), footprint.host_stage)]
    if footprint.device_bytes:
        rows.append(("peak device memory", gibibytes(footprint.device_bytes), footprint.device_stage))
    if checks and footprint.check_bytes:
        rows.append(("peak in the check", *_of_check(footprint)))
    rows.append(("activations", footprint.store, PLACES[footprint.store]))
    if footprint.experts_together is not None:
        groups = f"in {footprint.expert_groups} groups, a pass over the text for each"
        rows.append(("experts together", str(footprint.experts_together), groups))
    rows += [
        ("result on disk", about + gibibytes(footprint.result_bytes), "at --output"),
        ("peak on disk", gibibytes(footprint.disk_bytes), "at --output, with what --resume needs"),
        ("scratch files", gibibytes(footprint.scratch_bytes), "in --offload-dir, removed at the end"),
    ]
    if footprint.form is not None:
        rows.append(("form", footprint.form, f"opened by {OPENED[footprint.form]}"))
    if footprint.served:
        rows.append(("planned to open", "", footprint.served))
    if footprint.text:
        tokens, _, sources = footprint.text.partition(" of ")
        rows.append(("calibration text", tokens, f"of {sources}"))
    dense, compressed = footprint.stored_parameters["dense"], footprint.stored_parameters["compressed"]
    rows.append(("stored parameters", f"{about}{compressed:,}", f"of {dense:,} (−{1 - compressed / dense:.1%})"))
    if footprint.groups:
        fitting, _, more = footprint.groups.partition("; ")
        rows.append(("groups of quantisers", fitting, more or "dividing the inputs of all linears"))
    if footprint.dtype:
        taken, _, why = footprint.dtype.partition(", ")
        rows.append(("dtype", taken, why))
    stages = {stage: seconds for stage, seconds in footprint.seconds.items() if stage != "total"}
    rows += [(f"time: {stage}", duration(spent), _of_text(stage, footprint)) for stage, spent in stages.items()]
    total = footprint.seconds.get("total", 0.0)
    if checks and footprint.check_fits:
        rows.append(("time: check", duration(footprint.check_seconds), "of the result, beside the original"))
        total += footprint.check_seconds
    if footprint.seconds:
        rows.append(("time in all", f"about {duration(total)}", MAY_BE_WRONG))
    console = open_console()
    console.print(_table(DRY_RUN, ("", "predicted", "where, or why"), rows))
    if not footprint.exact:
        console.print(FROM_A_PROFILE)


def print_footprints(footprints: Sequence[Footprint], *, checks: bool = False) -> None:
    """Print what a run of several sizes would take in one table; what they share counts once.

    `checks`: with the check of every result, if that fits.
    """
    has_device = any(footprint.device_bytes for footprint in footprints)
    columns = ["removed", "parameters", "result", "host memory", *["device memory"] * has_device, "disk", "time"]
    rows, total = [], 0.0
    for footprint in footprints:
        dense, compressed = footprint.stored_parameters["dense"], footprint.stored_parameters["compressed"]
        own = sum(seconds for stage, seconds in footprint.seconds.items() if stage not in (*SHARED, "total"))
        own += footprint.check_seconds if checks and footprint.check_fits else 0.0
        total += own
        row = (
            f"{1 - compressed / dense:.1%}",
            f"{_about(footprint)}{compressed:,}",
            _about(footprint) + gibibytes(footprint.result_bytes),
            gibibytes(footprint.host_bytes),
            *[gibibytes(footprint.device_bytes)] * has_device,
            gibibytes(footprint.disk_bytes),
            duration(own),
        )
        rows.append(row)
    console = open_console()
    console.print(_table(DRY_RUN, columns, rows))
    shared = {stage: seconds for stage, seconds in footprints[0].seconds.items() if stage in SHARED}
    total += sum(shared.values())
    parts = ", ".join(
        " – ".join(filter(None, (f"{stage} {duration(seconds)}", _of_text(stage, footprints[0]))))
        for stage, seconds in shared.items()
    )
    if footprints[0].text:
        console.print(f"calibration text: {footprints[0].text}", markup=False)
    console.print(f"time that all sizes share: {duration(sum(shared.values()))} ({parts})")
    console.print(f"time in all: about {duration(total)}; it {MAY_BE_WRONG}")
    disk = sum(footprint.result_bytes for footprint in footprints)
    console.print(f"all results on disk: {max(map(_about, footprints))}{gibibytes(disk)}")
    if not all(footprint.exact for footprint in footprints):
        console.print(FROM_A_PROFILE)


def _of_text(stage: str, footprint: Footprint) -> str:
    """Return the remark of the stage in which the model writes text."""
    writes = stage == "prepare" and footprint.text_seconds
    return f"{duration(footprint.text_seconds)} of it to write the text" if writes else ""


def _about(footprint: Footprint) -> str:
    """Return what stands before the size of a result: a profile may decide where its parameters are."""
    return "" if footprint.exact else "about "


def _of_check(footprint: Footprint) -> tuple[str, str]:
    """Return the predicted peaks of the check, and a remark."""
    peak = gibibytes(footprint.check_bytes)
    if footprint.check_device_bytes:
        peak += f", {gibibytes(footprint.check_device_bytes)} of the device"
    return peak, "the whole original is loaded" if footprint.check_fits else "left out, because it does not fit"


def print_profile(profile: Profile) -> None:
    """Print what each layer would lose, and what that would do to the model's output."""
    title = "sensitivity: KL divergence of the output (nats per token) per relative squared error"
    headings = ("layer", "FFN error ¾", "½ kept", "FFN sens.", "head sens.", "KL without", "influence")
    of_layers = (profile.ffn_sensitivity, profile.head_sensitivity, profile.layer_divergence, profile.block_influence)
    rows = []
    for layer, errors in enumerate(profile.ffn_errors):
        kept = [round(share * _width(errors)) for share in (3 / 4, 1 / 2)]
        values = [*(float(errors[size]) ** 0.5 for size in kept), *(float(each[layer]) for each in of_layers)]
        rows.append((str(layer), *(f"{value:.4f}" for value in values)))
    open_console().print(_table(title, headings, rows))


def print_mixture(record: dict[str, Any]) -> None:
    """Print the verdict on a mixture (`report.mixture`)."""
    console = open_console()
    if record["sizes"]:
        title = "verdict: fewer beside narrower experts, at the same stored size (predicted)"
        console.print(_table(title, COLUMNS, mixture_rows(record)))
    for sentence in record["sentences"]:
        console.print(sentence, markup=False, highlight=False)


def _width(errors: torch.Tensor) -> int:
    """Return the width of an FFN by its errors; zeros stand behind the whole width of layers narrower than others."""
    losing = errors.nonzero()
    return min(int(losing[-1]) + 1 if len(losing) else len(errors), len(errors) - 1)


def open_console() -> Console:
    """Return a console of at most `WIDTH` columns."""
    console = Console()
    return Console(width=min(console.width, WIDTH)) if console.is_terminal else Console(width=WIDTH)


def _table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    # as plain text: square brackets in a name are not markup
    table = Table(title=Text(title), padding=(0, 1), pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
