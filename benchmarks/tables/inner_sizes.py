"""Table of what parts of one layer's attention cost."""

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
