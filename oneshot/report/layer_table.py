"""The kept sizes and ranks of every layer, as one table for the terminal, the page and the card."""

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

    def is_changed(name: str) -> bool:
        return any(layer.get(name) not in (None, dense.get(name)) for layer in layers)

    shown = [name for name in COLUMNS if is_changed(name)]
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
