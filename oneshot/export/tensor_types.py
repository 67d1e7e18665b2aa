"""A GGUF result whose tensors have types of their own: those with the least damage within the bytes of the file.

Rounding `W (m, n)` by `Δ` costs about `½ Σ g_i Δ_ij² h_j` nats for each token. `g` are mean squared gradients at the
outputs, the diagonal of their Fisher matrix, and `h` mean squares of the inputs. Errors of different columns are taken
as independent. `Δ` is the type's real rounding.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from oneshot.architecture import StackShape
from oneshot.compression.statistics import Statistics
from oneshot.config import Config
from oneshot.errors import PlanError
from oneshot.export.gguf import expected_tensors, with_all_ffns
from oneshot.export.gguf_tensors import below_float16, beyond_float16
from oneshot.export.quantisers import bytes_of, rounded, seconds_of, types_of, usable_importance
from oneshot.export.result_model import EMBEDDING, HEAD, ResultModel
from oneshot.export.result_of_stock import open_result
from oneshot.export.result_sensitivity import HEAD_INPUTS, SENSITIVITY_TOKENS, output_squares
from oneshot.export.rounded_tensors import RoundedTensors
from oneshot.linalg.allocation import least_damage, total_of
from oneshot.machine import Machine
from oneshot.machine.durable import UNFINISHED, make_durable
from oneshot.stream import InputSquares
from oneshot.text import Text

SAMPLED_ROWS = 96  # of a linear, by which its damages are estimated
SAMPLED_TOKENS = 1024  # of a table: those that count most
NOTICED = 0.01  # nats a token: less is lost where weights are next to nothing, and may be
PADDING = 32  # bytes at most before a tensor of the file
TYPES_NAME = "tensor-types.txt"
logger = logging.getLogger(__name__)

Weights = tuple[np.ndarray, np.ndarray]  # of rows `(m,)` and of columns `(n,)`


@dataclass(frozen=True)
class Priced:
    """A tensor of a result with the types that it can have.

    Attributes:
        module: by the name of the per-layer form. shape: `(m, n)`. importance: what rounding weighs columns by; None:
            nothing. products: of what the rows of an output head read; None of others. kinds: names of types. damages:
            of each, in nats a token. bytes: of each.
    """

    module: str
    shape: tuple[int, int]
    importance: np.ndarray | None
    products: Statistics | None
    kinds: tuple[str, ...]
    damages: np.ndarray
    bytes: np.ndarray


def quantise_result(
    path: Path,
    inputs: InputSquares,
    text: Text,
    machine: Machine,
    config: Config,
    *,
    tell: Callable[[int], None] = lambda layer: None,
) -> None:
    """Give the matrices of a GGUF result types of their own, in place, and write the types beside it.

    Args:
        inputs: of `result_importance`, of this text. tell: receives the number of a layer before it is rounded.

    Raises `PlanError` if the smallest types take more than `config` allows.
    """
    priced, names = price_result(path, inputs, text.first(SENSITIVITY_TOKENS), machine, config.seed)
    if config.target.gguf_bytes is not None:
        budget = float(config.target.gguf_bytes - beside_bytes(path, names))
    else:
        assert config.bits is not None
        budget = config.bits / 8 * sum(math.prod(one.shape) for one in priced)
    kinds = chosen_types(priced, budget)
    logger.info("The types of the tensors cost %.3f nats a token before error feedback.", damage_of(priced, kinds))
    write_quantised(path, priced, kinds, names, open_result(path, text, machine), tell)
    open_result(path, text, machine)  # which compares the tensors with config.json


def price_result(
    path: Path, inputs: InputSquares, text: Text, machine: Machine, seed: int
) -> tuple[list[Priced], dict[str, str]]:
    """Return the matrices of a GGUF result with the damage of every type, and their names in the file by module.

    Args:
        inputs: of `result_importance`. text: of which gradients are measured.
    """
    with torch.inference_mode(False), torch.no_grad():  # graphs take no tensors of inference mode
        model = open_result(path, text, machine)
        outputs, of_head = output_squares(model, seed, lambda tokens: None)
    seen = torch.bincount(text.token_ids.flatten(), minlength=model.config["vocab_size"])
    priced = priced_tensors(model, inputs, outputs, of_head, seen / text.num_tokens)
    return priced, {one.module: model.source.name_of(f"{one.module}.weight") for one in priced}


def priced_tensors(
    model: ResultModel, inputs: InputSquares, outputs: InputSquares, of_head: Statistics, frequencies: torch.Tensor
) -> list[Priced]:
    """Return the matrices of a result with the damage of every type.

    Args:
        inputs, outputs, of_head: of `result_importance` and `output_squares`. frequencies: shares `(N,)` of tokens in
            the text.
    """
    priced = []
    for name, shape in sorted(model.source.shapes.items()):
        if len(shape) != 2:
            continue
        module = name.removesuffix(".weight")
        importance, weights = _weights(module, model.has_head, inputs, outputs, frequencies)
        importance, kinds = usable_importance(importance), types_of(shape[1])
        [values] = model.source.read([name]).values()
        rows = _sampled(weights)
        sample = values[torch.from_numpy(rows)].float().numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # scales of blocks are float16, as values of F16
            found = {kind: _damage(rounded(sample, kind, importance) - sample, rows, weights) for kind in kinds}
        damages = {kind: damage for kind, damage in found.items() if math.isfinite(damage)}
        if not damages:
            raise beyond_float16(module, float(np.abs(sample).max()))
        least, all_of_it = min(damages.values()), _damage(sample, rows, weights)
        if least > max(NOTICED, all_of_it / 2):
            raise below_float16(module, float(np.abs(sample).max()))
        sizes = [bytes_of(shape, kind) for kind in damages]
        of_kinds = np.array(list(damages.values())), np.array(sizes, float)
        products = _products(module, model.has_head, outputs, of_head)
        priced.append(Priced(module, shape, importance, products, tuple(damages), *of_kinds))
    return priced


def refuse_impossible(stack: StackShape, config: Config) -> None:
    """Raise `PlanError`, with the least, if matrices of these sizes cannot be as small as a config asks for.

    Nothing is read; what a file holds beside them is not counted.
    """
    shapes = [shape for shape in expected_tensors(with_all_ffns(stack)).values() if len(shape) == 2]
    least = sum(min(bytes_of(shape, kind) for kind in types_of(shape[1])) for shape in shapes)
    weights = sum(math.prod(shape) for shape in shapes)
    allowed = config.target.gguf_bytes if config.bits is None else config.bits / 8 * weights
    if allowed is not None and allowed < least:
        raise too_small(least, weights, allowed)


def most_bytes(stack: StackShape) -> int:
    """Return the bytes of tensors of these sizes whose matrices have the largest types, and vectors float32."""
    shapes = expected_tensors(with_all_ffns(stack)).values()
    return sum(
        max(bytes_of(shape, kind) for kind in types_of(shape[1])) if len(shape) == 2 else 4 * math.prod(shape)
        for shape in shapes
    )


def too_small(least: float, weights: int, allowed: float) -> PlanError:
    """Return the error of a size that no types have."""
    return PlanError(
        f"The smallest types of this model's tensors take {least / 1e6:.2f} MB ({8 * least / weights:.2f} bits a "
        f"weight), and {max(0.0, allowed) / 1e6:.2f} MB are there for them; give more, or remove parameters."
    )


def chosen_types(priced: Sequence[Priced], budget: float) -> dict[str, str]:
    """Return the type of every tensor, by its module, within so many bytes, as `near_and_fast` chooses.

    Raises `PlanError`, with the least bytes, if the smallest types are larger.
    """
    seconds = [seconds_of_kinds(one.module, one.shape, one.kinds, priced) for one in priced]
    chosen = near_and_fast([one.damages for one in priced], seconds, [one.bytes for one in priced], budget)
    if chosen is None:
        least = sum(float(one.bytes.min()) for one in priced)
        raise too_small(least, sum(math.prod(one.shape) for one in priced), budget)
    return {one.module: one.kinds[option] for one, option in zip(priced, chosen, strict=True)}


def near_and_fast(
    damages: Sequence[np.ndarray], seconds: Sequence[np.ndarray], sizes: Sequence[np.ndarray], budget: float
) -> list[int] | None:
    """Choose one option of every item within so many bytes, by damage and time; None if nothing is as small.

    A percent of the least possible damage is given for each percent of the seconds on a CPU, where types of about one
    size differ by a factor of two.
    """
    nearest = least_damage(damages, sizes, budget)
    if nearest is None:
        return None
    price = total_of(damages, nearest) / max(total_of(seconds, nearest), 1.0)
    of_both = [damage + price * second for damage, second in zip(damages, seconds, strict=True)]
    return least_damage(of_both, sizes, budget)


def seconds_of_kinds(module: str, shape: tuple[int, ...], kinds: Sequence[str], priced: Sequence[Priced]) -> np.ndarray:
    """Return the CPU seconds `(kinds,)` of a matrix, as `seconds_of`; nothing of an embedding that is no head."""
    if module == EMBEDDING and any(other.module == HEAD for other in priced):
        return np.zeros(len(kinds))
    return np.array([seconds_of(shape, kind) for kind in kinds])


def damage_of(priced: Sequence[Priced], kinds: Mapping[str, str]) -> float:
    """Return the damage of a choice in nats a token."""
    return sum(float(one.damages[one.kinds.index(kinds[one.module])]) for one in priced)


def beside_bytes(path: Path, names: Mapping[str, str]) -> int:
    """Return the bytes of a GGUF file without these tensors: its header, vectors, and the most that is between."""
    import gguf

    reader = gguf.GGUFReader(path)
    others = sum(int(tensor.n_bytes) for tensor in reader.tensors if tensor.name not in names.values())
    return int(reader.data_offset) + others + PADDING * len(reader.tensors)


def write_quantised(
    path: Path,
    priced: Sequence[Priced],
    kinds: Mapping[str, str],
    names: Mapping[str, str],
    model: ResultModel,
    tell: Callable[[int], None],
) -> None:
    """Replace a GGUF file by one whose matrices have these types, and write the types beside it.

    Args:
        names: names of tensors in the file, by module. model: this file, with the text that layers are rounded on.
            tell: receives the number of a layer before it is rounded.
    """
    import gguf

    tables = {one.module: (one.importance, one.products) for one in priced if one.module in (EMBEDDING, HEAD)}
    matrices = RoundedTensors(model, kinds, tables, tell)

    reader, by_tensor = gguf.GGUFReader(path), {names[one.module]: one for one in priced}
    unfinished = path.with_name(path.name + UNFINISHED)
    writer = gguf.GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
    skipped = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in skipped:
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.GUESSED)  # there is no one type
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    types = gguf.GGMLQuantizationType
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        one = by_tensor.get(tensor.name)
        kind, size = tensor.tensor_type, int(tensor.n_bytes)
        if one is not None:
            kind, size = types[kinds[one.module]], bytes_of(shape, kinds[one.module])
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        one = by_tensor.get(tensor.name)
        writer.write_tensor_data(tensor.data if one is None else matrices.take(one.module))
    writer.close()
    matrices.close()
    make_durable(unfinished, path)
    # llama-quantize searches for patterns: one of `output.weight` would be found in `attn_output.weight`
    lines = [rf"^{re.escape(names[module])}$={kind.lower()}" for module, kind in kinds.items()]
    path.with_name(TYPES_NAME).write_text("\n".join(lines) + "\n")


def _weights(
    module: str, has_head: bool, inputs: InputSquares, outputs: InputSquares, frequencies: torch.Tensor
) -> tuple[np.ndarray | None, list[Weights]]:
    """Return what rounding of a matrix weighs columns by, and the weights of rows and columns of its damage."""
    if module not in (EMBEDDING, HEAD):
        read = _mean(inputs, module)
        return read, [(_mean(outputs, module), read)]
    weights, read_by_head = [], _mean(outputs, HEAD_INPUTS)
    if module == EMBEDDING:
        weights.append((frequencies.numpy(), _mean(outputs, EMBEDDING)))
    if module == HEAD or not has_head:
        weights.append((_mean(outputs, HEAD), read_by_head))
    return (read_by_head if module == HEAD or not has_head else None), weights


def _products(module: str, has_head: bool, outputs: InputSquares, of_head: Statistics) -> Statistics | None:
    """Return the Gram of what the rows of the output head read; None of other matrices.

    A token's row costs by this Gram as often as the token is predicted. A table that is also the embedding costs by the
    gradients at its rows as often as the token is read, which is about as often, so their squares are added.
    """
    if module != (HEAD if has_head else EMBEDDING):
        return None
    if has_head:
        return of_head
    read = outputs.sums[EMBEDDING] * (of_head.num_rows / outputs.counts[EMBEDDING])
    return replace(of_head, gram=of_head.gram + torch.diag(read).to(of_head.gram))


def _mean(squares: InputSquares, name: str) -> np.ndarray:
    mean: np.ndarray = (squares.sums[name] / squares.counts[name]).cpu().numpy()
    return mean


def _sampled(weights: Sequence[Weights]) -> np.ndarray:
    """Return the rows by which damages are estimated: evenly spaced, or the rows of a table that count most."""
    count = len(weights[0][0])
    if count <= SAMPLED_TOKENS * 4 and len(weights) == 1:
        return np.unique(np.linspace(0, count - 1, min(count, SAMPLED_ROWS)).round().astype(np.int64))
    share = sum(rows / max(float(rows.sum()), 1e-30) for rows, _ in weights)
    return np.sort(np.argsort(-share)[:SAMPLED_TOKENS])


def _damage(errors: np.ndarray, rows: np.ndarray, weights: Sequence[Weights]) -> float:
    """Return half the weighed squares of errors of some rows, for all rows as much as these weigh."""
    total = 0.0
    for of_rows, of_columns in weights:
        sampled = of_rows[rows]
        scale = float(of_rows.sum()) / max(float(sampled.sum()), 1e-30)
        total += 0.5 * scale * float(sampled @ (errors.astype(np.float64) ** 2 @ of_columns))
    return total
