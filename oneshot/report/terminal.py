"""Tables on the terminal, at most 80 columns wide."""

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oneshot.architecture import RANKED_KINDS
from oneshot.errors import printable
from oneshot.planning import Profile
from oneshot.report.layer_table import layer_table
from oneshot.report.mixture import COLUMNS, mixture_rows
from oneshot.report.records import Footprint, Report, SublayerReport, grouped_experts
from oneshot.report.words import OPENED, duration, gibibytes, show

WIDTH = 80
DRY_RUN = "dry run: only headers are read, nothing is written"
MAY_BE_WRONG = "may be wrong by a factor of two"
FROM_A_PROFILE = "The sizes of each layer will come from a profile; memory and time are those of equal layers."
PLACES = {"device": "in the device's memory", "host": "in host memory", "disk": "in --offload-dir"}  # by store
SHARED = ("prepare", "curvature", "profile")  # stages that several sizes have together
UNITS = ("heads", "ffn")


def print_report(report: Report) -> None:
    """Print sizes before and after, and one line for every layer."""
    console = open_console()
    names = printable(f"{report.config['checkpoint']} → {report.config['output']}")
    sizes = _table("", "dense", "compressed", "change", title=names)
    for name, values in size_rows(report):
        dense, compressed = values["dense"], values["compressed"]
        change = f"{compressed / dense - 1:+.1%}" if dense else "–"
        sizes.add_row(name, f"{dense:,}", f"{compressed:,}", change)
    console.print(sizes)
    layers = _table(
        "layer", "heads", "FFN", "predicted", "measured", "condition", "max|T|", "s", title="error by layer"
    )
    for layer in report.layers:
        by_kind = {sublayer.kind: sublayer for sublayer in layer.sublayers}
        layers.add_row(
            str(layer.layer),
            *(_kept(by_kind.get(kind)) for kind in UNITS),
            _worst([sublayer.predicted_error for sublayer in layer.sublayers], ".4f"),
            _worst([sublayer.measured_error for sublayer in layer.sublayers], ".4f"),
            _worst([sublayer.condition_number for sublayer in layer.sublayers], ".1e"),
            _worst([sublayer.max_interpolation for sublayer in layer.sublayers], ".2f"),
            f"{layer.seconds:.1f}",
        )
    console.print(layers)
    headings, rows = layer_table(report)
    if any(heading.startswith("rank") for heading in headings):
        ranked = _table(*headings, title="kept sizes and ranks by layer")
        for row in rows:
            ranked.add_row(*row)
        console.print(ranked)
    if report.plan["embedding"]:
        ranks = ", ".join(str(table["rank"]) for table in report.plan["embedding"])
        console.print(f"embedding: ranks {ranks} of {report.dense_shape['hidden_size']} by ranges of the vocabulary")
    shares = [f"{name} in {count}" for name, count in _low_ranks(report.plan["layers"]).items() if count]
    if shares:
        console.print(f"layers with linears of low rank: {', '.join(shares)} of {len(report.plan['layers'])}")
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


def _low_ranks(layers: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many layers of a plan have low rank, by kind of linear."""
    return {
        kind.replace("_", " and "): sum(layer[f"{kind}_rank"] is not None for layer in layers) for kind in RANKED_KINDS
    }


def print_footprint(footprint: Footprint, *, checks: bool = False) -> None:
    """Print what a run would take; `checks`: with the check of its result, if that fits."""
    table = _table("", "predicted", "where, or why", title=DRY_RUN)
    table.add_row("peak host memory", gibibytes(footprint.host_bytes), footprint.host_stage)
    if footprint.device_bytes:
        table.add_row("peak device memory", gibibytes(footprint.device_bytes), footprint.device_stage)
    if checks and footprint.check_bytes:
        table.add_row("peak in the check", *_of_check(footprint))
    table.add_row("activations", footprint.store, PLACES[footprint.store])
    if footprint.experts_together is not None:
        groups = f"in {footprint.expert_groups} groups, a pass over the text for each"
        table.add_row("experts together", str(footprint.experts_together), groups)
    table.add_row("result on disk", _about(footprint) + gibibytes(footprint.result_bytes), "at --output")
    table.add_row("peak on disk", gibibytes(footprint.disk_bytes), "at --output, with what --resume needs")
    table.add_row("scratch files", gibibytes(footprint.scratch_bytes), "in --offload-dir, removed at the end")
    if footprint.form is not None:
        table.add_row("form", footprint.form, f"opened by {OPENED[footprint.form]}")
    if footprint.served:
        table.add_row("planned to open", "", footprint.served)
    dense, compressed = footprint.stored_parameters["dense"], footprint.stored_parameters["compressed"]
    table.add_row(
        "stored parameters", f"{_about(footprint)}{compressed:,}", f"of {dense:,} (−{1 - compressed / dense:.1%})"
    )
    if footprint.groups:
        fitting, _, more = footprint.groups.partition("; ")
        table.add_row("groups of quantisers", fitting, more or "dividing the inputs of all linears")
    if footprint.dtype:
        taken, _, why = footprint.dtype.partition(", ")
        table.add_row("dtype", taken, why)
    for stage, seconds in footprint.seconds.items():
        if stage != "total":
            table.add_row(f"time: {stage}", duration(seconds), _of_text(stage, footprint))
    total = footprint.seconds.get("total", 0.0)
    if checks and footprint.check_fits:
        table.add_row("time: check", duration(footprint.check_seconds), "of the result, beside the original")
        total += footprint.check_seconds
    if footprint.seconds:
        table.add_row("time in all", f"about {duration(total)}", MAY_BE_WRONG)
    console = open_console()
    console.print(table)
    if not footprint.exact:
        console.print(FROM_A_PROFILE)


def print_footprints(footprints: Sequence[Footprint], *, checks: bool = False) -> None:
    """Print what a run of several sizes would take in one table; what they share counts once.

    `checks`: with the check of every result, if that fits.
    """
    has_device = any(footprint.device_bytes for footprint in footprints)
    columns = ["removed", "parameters", "result", "host memory", *["device memory"] * has_device, "disk", "time"]
    table, total = _table(*columns, title=DRY_RUN), 0.0
    for footprint in footprints:
        dense, compressed = footprint.stored_parameters["dense"], footprint.stored_parameters["compressed"]
        own = sum(seconds for stage, seconds in footprint.seconds.items() if stage not in (*SHARED, "total"))
        own += footprint.check_seconds if checks and footprint.check_fits else 0.0
        total += own
        table.add_row(
            f"{1 - compressed / dense:.1%}",
            f"{_about(footprint)}{compressed:,}",
            _about(footprint) + gibibytes(footprint.result_bytes),
            gibibytes(footprint.host_bytes),
            *[gibibytes(footprint.device_bytes)] * has_device,
            gibibytes(footprint.disk_bytes),
            duration(own),
        )
    console = open_console()
    console.print(table)
    shared = {stage: seconds for stage, seconds in footprints[0].seconds.items() if stage in SHARED}
    total += sum(shared.values())
    parts = ", ".join(
        " – ".join(filter(None, (f"{stage} {duration(seconds)}", _of_text(stage, footprints[0]))))
        for stage, seconds in shared.items()
    )
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
    table = _table(
        "layer",
        "FFN error ¾",
        "½ kept",
        "FFN sens.",
        "head sens.",
        "KL without",
        "influence",
        title="sensitivity: KL divergence of the output (nats per token) per relative squared error",
    )
    for layer, errors in enumerate(profile.ffn_errors):
        width = _width(errors)
        table.add_row(
            str(layer),
            *(f"{float(errors[round(share * width)]) ** 0.5:.4f}" for share in (3 / 4, 1 / 2)),
            *(
                f"{float(values[layer]):.4f}"
                for values in (
                    profile.ffn_sensitivity,
                    profile.head_sensitivity,
                    profile.layer_divergence,
                    profile.block_influence,
                )
            ),
        )
    open_console().print(table)


def print_mixture(record: dict[str, Any]) -> None:
    """Print the verdict on a mixture (`report.mixture`)."""
    console = open_console()
    if record["sizes"]:
        table = _table(*COLUMNS, title="verdict: fewer beside narrower experts, at the same stored size (predicted)")
        for row in mixture_rows(record):
            table.add_row(*row)
        console.print(table)
    for sentence in record["sentences"]:
        console.print(sentence, markup=False, highlight=False)


def _width(errors: torch.Tensor) -> int:
    """Return the width of an FFN by its errors; zeros stand behind the whole width of layers narrower than others."""
    losing = errors.nonzero()
    return min(int(losing[-1]) + 1 if len(losing) else len(errors), len(errors) - 1)


def size_rows(report: Report) -> list[tuple[str, dict[str, int]]]:
    """Return the sizes before and after, with their names."""
    rows = [
        ("stored parameters", report.stored_parameters),
        ("parameters in the layers", report.layer_parameters),
        ("FLOPs per token (linears)", report.flops_per_token),
    ]
    if report.further_parameters is not None:
        rows.insert(1, ("parameters that predict further tokens, beside them", report.further_parameters))
    if report.kv_bytes_per_token["dense"]:
        rows.append(("KV cache bytes per token (16 bit)", report.kv_bytes_per_token))
    return rows


def divergence_name(dense_shape: dict[str, Any]) -> str:
    """Return what a report's predicted divergences are (`stream.output_head`)."""
    if dense_shape["causal"]:
        return "predicted KL divergence of the output, nats per token"
    return "predicted change of the last hidden states, half its squared norm over theirs"


def open_console() -> Console:
    """Return a console of at most `WIDTH` columns."""
    console = Console()
    return Console(width=min(console.width, WIDTH)) if console.is_terminal else Console(width=WIDTH)


def _table(*columns: str, title: str) -> Table:
    # as plain text: square brackets in a name are not markup
    table = Table(title=Text(title), padding=(0, 1), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _kept(sublayer: SublayerReport | None) -> str:
    return "–" if sublayer is None else f"{sublayer.dense_size} → {sublayer.kept_size}"


def _worst(values: Sequence[float | None], spec: str) -> str:
    known = [value for value in values if value is not None]
    return show(max(known, default=None), spec)
