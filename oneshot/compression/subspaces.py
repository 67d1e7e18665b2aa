"""Principal directions of the residual stream at the input of every norm, by groups of neighbouring sublayers.

One dense pass over the text sums a Gram at the input of every norm. The Grams of a group are summed and decomposed
(Group-PCA, SP3 appendix F.1; one group for the whole model is TCSP section 4).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import Model
from oneshot.compression.fold_post_norm import SubspaceNorm
from oneshot.compression.statistics import GramAccumulator
from oneshot.linalg.pca import energies_along, principal_directions
from oneshot.machine import Machine
from oneshot.machine.transfer import Uploader
from oneshot.method import TokenWeighting
from oneshot.planning import HiddenPlan
from oneshot.stream import DensePass, States, read_ahead
from oneshot.text import Text


@dataclass(frozen=True)
class Subspaces:
    """Principal directions of every group of positions, stored on disk (positions as in `HiddenPlan`).

    Attributes:
        folder: holds the directions of each group, `(D, D)` float64.
        group_of: the group of every position.
        energies: float64 `(positions, D)`, the energy of the rows at a position along each direction of its group.
    """

    folder: Path
    group_of: tuple[int, ...]
    energies: torch.Tensor

    def basis(self, position: int, size: int) -> torch.Tensor:
        """Return `P (D, size)` float64 with orthonormal columns, the strongest direction first."""
        return load_file(_path(self.folder, self.group_of[position]))["directions"][:, :size].clone()

    def relative_error(self, position: int, size: int) -> float:
        """Return `‖X − X P Pᵀ‖_F / ‖X‖_F` of the rows at a position."""
        energies = self.energies[position]
        total = energies.sum().clamp_min(torch.finfo(energies.dtype).tiny)  # the rows may all be zero
        return float((energies[size:].sum() / total).sqrt())


class StreamSubspaces:
    """Keep the residual stream inside the subspaces of a plan, in the model's own coordinates."""

    def __init__(self, subspaces: Subspaces, plan: HiddenPlan, device: torch.device) -> None:
        self._subspaces, self._plan, self._device = subspaces, plan, device
        self._bases: dict[int, torch.Tensor] = {}

    def on(self, device: torch.device) -> "StreamSubspaces":
        """Return the same subspaces with bases on another device."""
        return StreamSubspaces(self._subspaces, self._plan, device)

    def size(self, position: int) -> int:
        """Return the width d of the stream at a position."""
        return self._plan.sizes[position]

    def relative_error(self, position: int) -> float:
        """Return `‖X − X P Pᵀ‖_F / ‖X‖_F` of the rows that the norm at a position reads in the dense model."""
        return self._subspaces.relative_error(position, self.size(position))

    def mean_error(self) -> float:
        """Return the root mean square of all positions' relative errors."""
        errors = torch.tensor([self.relative_error(position) for position in range(len(self._plan.sizes))])
        return float(errors.square().mean().sqrt())

    def basis(self, position: int) -> torch.Tensor:
        """Return `P (D, d)` float64 of a position; one object for one group. Three groups stay in memory."""
        group = self._plan.group_of[position]
        if group not in self._bases:
            self._bases = {kept: basis for kept, basis in self._bases.items() if kept >= group - 2}
            self._bases[group] = self._subspaces.basis(position, self.size(position)).to(self._device)
        return self._bases[group]

    def norm(self, norm: Any, position: int) -> SubspaceNorm:
        """Return what a LayerNorm after the sum at a position becomes in the model's own coordinates."""
        return SubspaceNorm(norm, self.basis(position))

    def inside(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Return the residual stream `(…, D)` within the subspace of a position, `x P Pᵀ`."""
        basis = self.basis(position).to(x)
        return x @ basis @ basis.T

    def enter(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Return the stream after a sublayer whose output already lies in the subspace of the next position."""
        return self.inside(x, position) if self._plan.changes_at(position) else x


def find_subspaces(
    model: Model,
    text: Text,
    group_of: tuple[int, ...],
    machine: Machine,
    *,
    token_weighting: TokenWeighting = "unit",
    shared_weight: float = 0.0,
    advance: Callable[[float], None] = lambda tokens: None,
) -> Subspaces:
    """Return the principal directions of what the norms read, group by group.

    A group's directions come from its own positions' Grams. With `shared_weight` they also come from the Grams of all
    other positions, because a direction that the group lacks is lost for the later ones.

    Norms that follow their sublayers read the sums (SP3 equations 5 to 8); position 0 is then the sum of the
    embeddings. With `token_weighting = "unit"` rows are divided by their root mean square, as the norms do. Otherwise a
    few tokens with massive activations would be the principal directions. A LayerNorm's rows first lose their mean.
    `advance` receives the number of tokens done, layer after layer.
    """
    shape, family = model.shape, model.family
    states = States(model, machine, text, advance=advance)
    position = 0

    def measure(read: Iterable[torch.Tensor]) -> None:
        """Store the Gram of what the norm at the present position reads."""
        nonlocal position
        accumulator = GramAccumulator(shape.hidden_size, output_size=None, device=machine.device)
        for x in read:
            accumulator.update_(weighted_rows(x, centred=shape.layer_norms, weighting=token_weighting))
        gram = accumulator.finish(workers=machine.workers).gram
        save_file({"gram": gram.cpu()}, _gram_path(machine.scratch, position))
        position += 1

    # 1. The sum of the embeddings, if norms follow their sublayers.
    if family.stack.norms_after:
        measure(states.sums_of_embeddings(model.read_embedding()))
    # 2. Layer by layer what every norm reads, while the stream moves on.
    upload = Uploader(machine.device)
    for number, tensors in enumerate(read_ahead(model, machine.device)):
        stack = family.stack_of(number)
        if number == stack.first_layer > 0:
            measure(x for x, _ in states.read())  # what the encoder's final norm reads
            states.enter_decoder()
        states.passes = len(stack.sublayers)
        layer = states.layer(number, upload(tensors))
        for index in range(len(stack.sublayers)):
            if stack.norms_after:
                passed = DensePass(index, layer)
                states.defer(passed)
                measure(passed.sum for _ in states.read())
            else:
                measure(x for x, _ in states.read())
                states.defer(lambda x, _, layer=layer, index=index: layer.run(index, x))  # type: ignore[misc]
        del tensors, layer
    # 3. What the final norm reads; then the directions of every group.
    states.advance = lambda tokens: None
    if not family.stack.norms_after:
        measure(x for x, _ in states.read())
    states.close()
    return _decompose(machine.scratch, group_of, shared_weight, machine)


def weighted_rows(x: torch.Tensor, *, centred: bool, weighting: str) -> torch.Tensor:
    """Return what a norm reads as float32 rows, minus their mean (`centred`), over their root mean square (`unit`)."""
    rows = x.flatten(0, -2).float()
    if centred:
        rows = rows - rows.mean(1, keepdim=True)
    if weighting == "unit":
        rows = rows / rows.square().mean(1, keepdim=True).sqrt().clamp_min(torch.finfo(rows.dtype).tiny)
    return rows


def _decompose(folder: Path, group_of: tuple[int, ...], shared_weight: float, machine: Machine) -> Subspaces:
    """Return the directions of every group from the Grams on disk, and every position's energies along them."""
    device, workers = machine.device, machine.workers

    def gram(position: int) -> torch.Tensor:
        return load_file(_gram_path(folder, position))["gram"].to(device).double()

    def total(positions: Iterable[int]) -> torch.Tensor:
        return reduce(torch.add, map(gram, positions))

    everywhere = total(range(len(group_of))) if shared_weight else 0.0
    members = [[at for at, member in enumerate(group_of) if member == group] for group in range(group_of[-1] + 1)]
    # 1. Every worker decomposes some groups.
    for group, positions in enumerate(members):
        if workers.owns(group):
            own = total(positions)
            counted = own + shared_weight * (everywhere - own) if shared_weight else own
            save_file({"directions": principal_directions(counted).cpu().contiguous()}, _path(folder, group))
            del own, counted
    # 2. All workers get all directions.
    energies = []
    for group, positions in enumerate(members):
        found = workers.share(group, lambda group=group: load_file(_path(folder, group)))  # type: ignore[misc]
        if not workers.owns(group):
            save_file(found, _path(folder, group))
        directions = found["directions"].to(device)
        energies += [energies_along(gram(position), directions).cpu() for position in positions]
    return Subspaces(folder, group_of, torch.stack(energies))


def _gram_path(folder: Path, position: int) -> Path:
    return folder / f"gram-{position}.safetensors"


def _path(folder: Path, group: int) -> Path:
    return folder / f"directions-{group}.safetensors"
