"""An opened checkpoint with a known family: the model that is compressed."""

from dataclasses import dataclass, replace

import torch

from oneshot.checkpoint.reader import Checkpoint
from oneshot.errors import CheckpointError, PlanError, cause
from oneshot.families import Description, ModelShape, check_layers, find_family, read_shape

WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A checkpoint whose family is known and whose layers have the shapes that its config states."""

    checkpoint: Checkpoint
    family: Description
    shape: ModelShape

    def read_layer(self, layer: int) -> Tensors:
        """Return the tensors of a layer, without its prefix."""
        with torch.inference_mode():  # the mode belongs to a thread, and a prefetching thread also reads
            tensors = self.checkpoint.read_prefix(self.family.stack.layer_prefix(layer))
            tensors = {name: tensor for name, tensor in tensors.items() if "rotary_emb" not in name}
            if self.shape.mlp_bias:  # zeros if the checkpoint stores no biases, see `with_ffn_biases`
                ffn = self.family.stack.ffn
                for linear in (*ffn.readers, ffn.down):
                    weight = tensors[f"{linear}.weight"]
                    tensors.setdefault(f"{linear}.bias", weight.new_zeros(len(weight)))
            return tensors

    def with_ffn_biases(self) -> "Model":
        """Return the same model with biases in its FFN, zeros if it has none.

        Raises `PlanError` if the family's config cannot state such biases.
        """
        reason = None if self.shape.mlp_bias else self.family.reason_against("ffn biases")
        if reason is not None:
            raise PlanError(reason)
        return replace(self, shape=replace(self.shape, mlp_bias=True))

    def read_embedding(self) -> torch.Tensor:
        """Return the token embedding `(vocabulary, D)`."""
        return self.checkpoint.read_one(self.family.stack.embedding)

    def read_positions(self) -> torch.Tensor | None:
        """Return the position embedding's rows that tokens use, `(positions, D)`; None without one."""
        stack = self.family.stack
        if stack.positions is None:
            return None
        return self.checkpoint.read_one(stack.positions)[stack.position_offset :]

    def read_final_norm(self) -> Tensors:
        """Return the final norm's own tensors."""
        norm = self.family.stack.final_norm
        return {} if norm is None else self.checkpoint.read_prefix(f"{norm.name}.")

    def read_head(self) -> torch.Tensor:
        """Return the output head `(vocabulary, D)`, which may be the embedding."""
        assert self.family.head is not None
        return self.read_embedding() if self.shape.tied else self.checkpoint.read_one(self.family.head)


def identify(checkpoint: Checkpoint) -> Model:
    """Find the family and the sizes of an opened checkpoint; it reads headers and no weights.

    Raises `CheckpointError` for a family that is not supported, quantised weights and tensors of other shapes.
    """
    family = find_family(checkpoint.config)
    _check_dtypes(checkpoint)
    shape = read_shape(family, checkpoint.config, checkpoint.shapes)
    check_layers(family, shape, checkpoint.shapes)
    _check_outside(checkpoint, family, shape)
    return Model(checkpoint, family, shape)


def _check_dtypes(checkpoint: Checkpoint) -> None:
    """Refuse quantised weights: weights are floating-point numbers of 16 bits or more."""
    for name, dtype in checkpoint.dtypes.items():
        if dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{name} is stored as {dtype}, so the weights are quantised; give the unquantised checkpoint and "
                "quantise the result."
            )


def _check_outside(checkpoint: Checkpoint, family: Description, shape: ModelShape) -> None:
    """Check the tensors outside the layers against the stock class of the config, made with one layer.

    Raises `CheckpointError` if transformers cannot make that class, and for the first tensor that does not fit.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = checkpoint.config | {"attn_implementation": "sdpa"}
    config_class = CONFIG_MAPPING[family.model_type]
    try:
        config_class.from_dict(whole)
        hf_config = config_class.from_dict(one_layer_config(whole, family))
        with torch.device("meta"):
            model = getattr(transformers, family.auto_class).from_config(hf_config, dtype=torch.float32)
    except Exception as error:  # transformers raises many unrelated types; the cause is named and chained
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'} does not describe a {family.model_type} model "
            f"({cause(error)}); give a complete, unmodified checkpoint."
        ) from error
    layers = f"{family.stack.layers}."
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(name for name in expected.keys() | checkpoint.shapes.keys() if not name.startswith(layers)):
        stored = checkpoint.shapes.get(name)
        if name.endswith("rotary_emb.inv_freq") or (
            name == family.head and shape.tied and hf_config.tie_word_embeddings
        ):
            continue
        if stored != expected.get(name):
            raise CheckpointError(
                f"{name} has shape {stored} where config.json of a {family.model_type} model asks for "
                f"{expected.get(name)}; give a complete, unmodified checkpoint."
            )


def one_layer_config(config: dict[str, object], family: Description) -> dict[str, object]:
    """Return the config of a model with a single layer; making all layers only to use one would take memory."""
    shared = {name: value for name, value in config.items() if name != "layer_types"}
    return shared | {family.sizes.num_hidden_layers: 1}
