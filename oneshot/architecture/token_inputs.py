"""Names of a layer's inputs beside the stream: a row of a table for every token in every layer (Gemma 4 E2B)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenInputs:
    """Name the table of all layers, and the branch that a layer adds after its FFN.

    Of the stream `x` and the layer's `width` numbers `p` of the token, a layer adds
    `after(out(activation(gate(x)) * p))`. The stock model makes `p` of the table and of the token's embedding
    (`stream/memory`).

    Attributes:
        table, projection, norm: modules of the model; the first two have `width` columns or rows for every layer.
        gate, activation, out, after: modules of a layer.
    """

    width: int
    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    activation: str = "act_fn"
    out: str = "per_layer_projection"
    after: str = "post_per_layer_input_norm"

    @property
    def outside(self) -> tuple[str, ...]:
        """Return the names of its tensors outside the layers, without the prefix of the model."""
        return tuple(f"{name}.weight" for name in (self.table, self.projection, self.norm))

    def columns(self, layer: int) -> slice:
        """Return the columns of the table, and the rows of the projection, that belong to a layer."""
        return slice(layer * self.width, (layer + 1) * self.width)

    def of_layers(self, shapes: Mapping[str, tuple[int, ...]], num_layers: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of table and projection for so many layers; `shapes`: for any number of them."""
        table, projection, _ = self.outside
        columns = num_layers * self.width
        return {table: (shapes[table][0], columns), projection: (columns, shapes[projection][1])}
