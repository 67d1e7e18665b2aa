"""Sizes before and after, and the sizes of every layer, as rows for the terminal, the page and the card."""

from typing import Any

from oneshot.report.records import Report

COLUMNS = {  # of a plan's layer
    "intermediate_size": "FFN",
    "num_experts": "experts",
    "num_attention_heads": "heads",
    "query_key_size": "query/key size",
    "value_size": "value size",
    "query_key_rank": "rank q, k",
    "output_rank": "rank output",
    "gate_rank": "rank gate",
    "up_rank": "rank up",
}


def layer_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return headings and a row for each layer of sizes that some layer has changed; a dash is a whole linear.

    Without any such size both are empty. A size of 0 is a sublayer that is left out. Neighbours of equal sizes share a
    row.
    """
    layers, dense = report.plan["layers"], report.dense_shape
    shown = [name for name in COLUMNS if any(layer.get(name) not in (None, dense.get(name)) for layer in layers)]
    if not shown:
        return [], []
    rows: list[list[str]] = []
    first = 0
    for number, layer in enumerate(layers):
        kept = dict(layer)
        if number in dense.get("narrow_layers", ()):
            kept["intermediate_size"] //= 2
        sizes = ["–" if kept.get(name) is None else f"{kept[name]:,}" for name in shown]
        if rows and rows[-1][1:] == sizes:
            rows[-1][0] = f"{first}–{number}"
        else:
            first = number
            rows.append([str(number), *sizes])
    return ["layer", *(COLUMNS[name] for name in shown)], rows


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
