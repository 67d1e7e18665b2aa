"""The residual stream's principal directions: where every norm reads it, by groups of neighbouring blocks.

One dense pass over the text sums a Gram at the input of every norm; the Grams of a group are summed and decomposed
(Group-PCA, SP3 appendix F.1; one group for the whole model is TCSP section 4). See METHODS section 5.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from oneshot.config import CompressionConfig
from oneshot.linalg.pca import energies_along, principal_directions
from oneshot.records import CalibrationSet, HiddenPlan
from oneshot.source import SourceModel
from oneshot.statistics import GramAccumulator
from oneshot.stream import LayerStream, embed_text, prefetch
from oneshot.workers import ALONE, Workers


@dataclass(frozen=True)
class Subspaces:
    """Principal directions of every group of positions, on disk until asked for (positions as in `HiddenPlan`).

    Attributes:
        folder: where the directions of each group lie, `(D, D)` float64.
        group_of: the group of every position.
        energies: float64 `(positions, D)`, the energy of the rows at a position along each direction of its group.
    """

    folder: Path
    group_of: tuple[int, ...]
    energies: torch.Tensor

    def basis(self, position: int, size: int) -> torch.Tensor:
        """`P (D, size)` float64 with orthonormal columns, the strongest direction first."""
        return load_file(_path(self.folder, self.group_of[position]))["directions"][:, :size].clone()

    def relative_error(self, position: int, size: int) -> float:
        """`‖X − X P Pᵀ‖_F / ‖X‖_F` of the rows at a position."""
        energies = self.energies[position]
        total = energies.sum().clamp_min(torch.finfo(energies.dtype).tiny)  # the rows may all be zero
        return float((energies[size:].sum() / total).sqrt())


class StreamSubspaces:
    """The subspaces of a plan, and the residual stream inside them, in the model's own coordinates."""

    def __init__(self, subspaces: Subspaces, plan: HiddenPlan, device: torch.device) -> None:
        self._subspaces, self._plan, self._device = subspaces, plan, device
        self._bases: dict[int, torch.Tensor] = {}

    def size(self, position: int) -> int:
        """The width d of the stream at a position."""
        return self._plan.sizes[position]

    def relative_error(self, position: int) -> float:
        """`‖X − X P Pᵀ‖_F / ‖X‖_F` of the rows that the norm at a position reads in the dense model."""
        return self._subspaces.relative_error(position, self.size(position))

    def mean_error(self) -> float:
        """The root mean square of all positions' relative errors."""
        errors = torch.tensor([self.relative_error(position) for position in range(len(self._plan.sizes))])
        return float(errors.square().mean().sqrt())

    def basis(self, position: int) -> torch.Tensor:
        """`P (D, d)` float64 of a position; one object for one group. The last three groups stay in memory."""
        group = self._plan.group_of[position]
        if group not in self._bases:
            self._bases = {kept: basis for kept, basis in self._bases.items() if kept >= group - 2}
            self._bases[group] = self._subspaces.basis(position, self.size(position)).to(self._device)
        return self._bases[group]

    def inside(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """The residual stream `(…, D)` within the subspace of a position, `x P Pᵀ`."""
        basis = self.basis(position).to(x)
        return x @ basis @ basis.T

    def enter(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """The stream behind a block whose output lies in the subspace of the next position already."""
        return self.inside(x, position) if self._plan.changes_at(position) else x


def principal_subspaces(
    config: CompressionConfig,
    source: SourceModel,
    calibration: CalibrationSet,
    group_of: tuple[int, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
    scratch: Path,
    tier: str,
    advance: Callable[[float], None],
    workers: Workers = ALONE,
) -> Subspaces:
    """The principal directions of what the norms see, group by group.

    A group's directions come from its own positions' Grams and, with `shared_weight`, from those of all others, because
    what the stream carries past a group is lost, too, where the group's subspace does not hold it.

    With `token_weighting = "unit"` rows are divided by their root mean square, as the norms do: a few tokens with
    massive activations would be the principal directions otherwise. A LayerNorm's rows lose their mean first. `advance`
    hears of tokens done, layer after layer.
    """
    shape, token_ids = source.shape, calibration.token_ids
    stream = LayerStream(
        source.checkpoint.config, source.architecture, sequence_length=token_ids.shape[1], device=device, dtype=dtype
    )
    batches, (hidden,) = embed_text(
        stream,
        [source.checkpoint.read_one(source.architecture.embedding)],
        token_ids[workers.part(len(token_ids))],
        source.read_positions(),
        batch_size=config.batch_size,
        tier=tier,
        folder=scratch,
    )

    def rows(x: torch.Tensor) -> torch.Tensor:
        return weighted_rows(x, centred=shape.norm_bias, weighting=config.token_weighting)

    for number, tensors in enumerate(prefetch(source.read_layer, shape.num_hidden_layers)):
        layer = stream.layer(tensors)
        grams = [GramAccumulator(shape.hidden_size, output_size=None, device=device) for _ in range(2)]
        for batch in batches:
            x = hidden.read(batch)
            h = layer.attention(x)
            grams[0].update_(rows(x))
            grams[1].update_(rows(h))
            hidden.write(batch, layer.ffn(h))
            advance(x.shape[0] * x.shape[1])
        for half, gram in enumerate(grams):
            save_file({"gram": gram.finish(workers=workers).gram.cpu()}, _gram_path(scratch, 2 * number + half))
    last = GramAccumulator(shape.hidden_size, output_size=None, device=device)
    for batch in batches:
        last.update_(rows(hidden.read(batch)))
    hidden.close()
    save_file({"gram": last.finish(workers=workers).gram.cpu()}, _gram_path(scratch, 2 * shape.num_hidden_layers))
    return _decompose(scratch, group_of, config.shared_weight, device, workers)


def weighted_rows(x: torch.Tensor, *, centred: bool, weighting: str) -> torch.Tensor:
    """What a norm reads `(…, D)` as float32 rows, less their mean (`centred`), over their root mean square (`unit`)."""
    rows = x.flatten(0, -2).float()
    if centred:
        rows = rows - rows.mean(1, keepdim=True)
    if weighting == "unit":
        rows = rows / rows.square().mean(1, keepdim=True).sqrt().clamp_min(torch.finfo(rows.dtype).tiny)
    return rows


def _decompose(
    folder: Path, group_of: tuple[int, ...], shared_weight: float, device: torch.device, workers: Workers
) -> Subspaces:
    """The directions of every group from the Grams on disk, and every position's energies along its group's."""

    def gram(position: int) -> torch.Tensor:
        return load_file(_gram_path(folder, position))["gram"].to(device).double()

    def total(positions: Iterable[int]) -> torch.Tensor:
        return reduce(torch.add, map(gram, positions))

    everywhere = total(range(len(group_of))) if shared_weight else 0.0
    energies = []
    for group in range(group_of[-1] + 1):
        members = [position for position, member in enumerate(group_of) if member == group]
        own = total(members)
        counted = own + shared_weight * (everywhere - own) if shared_weight else own
        directions = workers.share(group, partial(_directions, counted)).to(device)
        energies += [energies_along(gram(position), directions).cpu() for position in members]
        save_file({"directions": directions.cpu().contiguous()}, _path(folder, group))
    return Subspaces(folder, group_of, torch.stack(energies))


def _directions(gram: torch.Tensor) -> torch.Tensor:
    return principal_directions(gram).cpu()


def _gram_path(folder: Path, position: int) -> Path:
    return folder / f"gram-{position}.safetensors"


def _path(folder: Path, group: int) -> Path:
    return folder / f"directions-{group}.safetensors"
