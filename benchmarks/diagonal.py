"""TCSP's diagonal form of a BERT (its appendix D) as a checkpoint that can be judged: a baseline, and no option.

The package writes SP3's form, which is exact at full width. The diagonal form is not (`compression/fold_diagonal.py`).
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModel

from oneshot.checkpoint import open_model
from oneshot.compression.fold_diagonal import fold_diagonal, fold_diagonal_output
from oneshot.export import verify, write_companions
from oneshot.export.encoder import MODELLING_FILE, encoder_config
from oneshot.linalg.pca import principal_directions
from oneshot.text import Text, load_examples, load_tokenizer


def write_diagonal(
    dense: Path, calibration: Path, folder: Path, *, size: int, rescaled: bool, num_tokens: int, longest: int, seed: int
) -> dict[str, Any]:
    """Write a plain BERT with `size` coordinates after its first layer, and return the sizes of the result.

    Args:
        rescaled: with the factor `√(D/k)` that the paper's norms lack.
    """
    model, tokenizer = open_model(str(dense), folder.parent), load_tokenizer(dense)
    text = load_examples(
        [str(calibration)], tokenizer, num_tokens=num_tokens, longest=longest, seed=seed, with_types=True
    )
    basis, stack, shape = one_subspace(dense, text)[:, :size], model.family.stack, model.shape
    outside = {name for name in model.checkpoint.tensor_names if not model.family.is_in_layers(name)}
    tensors, layers = model.checkpoint.read(sorted(outside)), []
    for number in range(shape.num_hidden_layers):
        before = model.read_norm_before(number) if number else None
        folded = fold_diagonal(model.read_layer(number), stack, before, basis, rescaled=rescaled)
        tensors |= {stack.layer_prefix(number) + name: tensor.contiguous() for name, tensor in folded.items()}
        first = shape.hidden_size if number == 0 else size
        layers.append(
            replace(
                shape.layer(number), hidden_size=first, middle_size=first, output_size=size, ffn_shortcut=number == 0
            )
        )
    output = fold_diagonal_output(model.read_norm_before(shape.num_hidden_layers), basis)
    tensors |= {f"output_map.{part}": tensor.contiguous() for part, tensor in output.items()}
    stored = replace(shape.stack(), layers=tuple(layers))
    has_pooler = "pooler.dense.weight" in outside
    folder.mkdir()
    config = encoder_config(model.checkpoint.config, shape, stored, has_pooler=has_pooler)
    write_companions(dense, folder, config, dtype=None)
    shutil.copyfile(MODELLING_FILE, folder / MODELLING_FILE.name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    parameters = verify(folder).num_parameters
    return {
        "stored_parameters": parameters,
        "sparsity": 1 - parameters / model.checkpoint.num_parameters,
        "tokens": text.num_tokens,
    }


def one_subspace(dense: Path, text: Text) -> torch.Tensor:
    """Return the principal directions `(D, D)` float64 of all sums that norms read after the first attention.

    Rows are neither centred nor weighted (TCSP equations 6 to 10).
    """
    stock = AutoModel.from_pretrained(dense, dtype=torch.float32).eval()
    gram = torch.zeros(stock.config.hidden_size, stock.config.hidden_size, dtype=torch.float64)

    def add(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        rows = inputs[0].flatten(0, -2).double()
        gram.add_(rows.T @ rows)

    for name, module in stock.named_modules():
        if name.endswith("output.LayerNorm") and not name.endswith("layer.0.attention.output.LayerNorm"):
            module.register_forward_pre_hook(add)
    with torch.inference_mode():
        for batch in text.batches(32):
            stock(batch.token_ids, token_type_ids=batch.token_types)
    return principal_directions(gram)
