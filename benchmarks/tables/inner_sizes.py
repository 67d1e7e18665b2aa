"""Tables of what parts of one layer cost, and of what squared errors in the stream cost."""

from harness import Row, read_rows

from tables.cells import markdown, origin


def inner_sizes_table() -> str:
    """Return nats per million parameters saved, for every part and size by layer."""
    row = read_rows("inner_sizes")[-1]
    layers = sorted({probe["layer"] for probe in row["probes"]})
    sizes: dict[tuple[str, int], dict[int, Row]] = {}
    for probe in row["probes"]:
        sizes.setdefault((probe["kind"], probe["size"]), {})[probe["layer"]] = probe
    lines = []
    for (kind, size), of_layer in sizes.items():
        name, first = f"{kind}, {size}" if size else kind, of_layer[layers[0]]
        for label, saved in ((name, "saved"), (f"{name}, stored as [I; C]", "saved_pivoted")):
            if first[saved] is not None:
                costs = [1e6 * of_layer[layer]["nats"] / of_layer[layer][saved] for layer in layers]
                lines.append([label, f"{first[saved]:,}", *(f"{cost:.4f}" for cost in costs)])
    return markdown(
        ["part, what stays", "saved", *(f"layer {layer}" for layer in layers)],
        lines,
        "KL divergence of the output in nats per million parameters saved, if only this part of this layer is reduced; "
        f"{row['model']}, fp32, {row['calibration']}: {row['statistics_tokens']:,} tokens of statistics, "
        f"{row['probe_tokens']:,} other tokens of probes; {origin([row])}.",
    )


def stream_errors_table() -> str:
    """Return nats per unit of squared error in the stream, relative to those of the layer's FFN neurons."""
    row = read_rows("inner_sizes")[-1]
    layers = sorted({probe["layer"] for probe in row["probes"]})
    worth = {(probe["kind"], probe["size"], probe["layer"]): probe["nats"] / probe["energy"] for probe in row["probes"]}
    usual = {layer: worth["FFN neurons", min(size for kind, size, _ in worth if kind == "FFN neurons"), layer]
             for layer in layers}  # fmt: skip
    lines = [
        [f"{kind}, {size}", *(f"{worth[kind, size, layer] / usual[layer]:.2f}" for layer in layers)]
        for kind, size in dict.fromkeys((kind, size) for kind, size, _ in worth)
        if size and not kind.startswith("linear")
    ]
    return markdown(
        ["part, what stays", *(f"layer {layer}" for layer in layers)],
        lines,
        "KL divergence of the output ÷ mean squared error of the stream after the layer, relative to the same quotient "
        f"of the layer's FFN neurons; {row['model']}, the same run as above; {origin([row])}.",
    )
