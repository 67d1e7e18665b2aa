"""Linears of low rank: queries and keys together, attention's output, and the gate and up projections.

`W (m, n)` becomes the matrix of rank r with the least error of its outputs, `min ‖diag(w)^½ (W − W_r) H^½‖_F`. `H` is
the Gram of what the linear reads. Its rows count by what they do:

- a query by the energy of the keys that it meets in the scores, and a key by the energy of the queries; rotation
  mixes the two coordinates of a pair, which share their weight;
- a row of `gate_proj` by the energy of the neuron's other factor, and of the column of `down_proj` that reads the
  neuron; a row of `up_proj` likewise;
- the rows of `o_proj` equally.

Where a norm follows the writer (`compression.branch_norm`), tokens and the writer's rows count as that norm lets them.

`H` shrinks towards its diagonal, because what different inputs have in common changes from text to text; of few tokens
by the share that is chance (`shrinkage_on_other_text`). In a profile it does not: prices of shrunk Grams gain nothing.

With output curvature (`compression.curvature`) the rows of queries and keys, and of `o_proj`, count by a matrix `G`
instead of `diag(w)`, and the columns of `down_proj` by their costs.

With the principal directions `P` of `diag(w)^½ W L`, `L Lᵀ = H`, the best matrix is `W L P Pᵀ L⁻¹` (Eckart and Young
1936). It is stored as r of its columns, from which a matrix makes the others: `r (m + n − r)` numbers. The r columns
are an ordinary linear, which reads r numbers: `W_r x = C (x[J] + T x[others])`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from oneshot_kernels import suffix_sums

from oneshot.architecture import Attention, FeedForward, Mixer, ModelShape, RankedKind, Sublayer, read_by
from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.curvature import LayerCurvature, column_costs
from oneshot.compression.statistics import (
    GramAccumulator,
    HeadGramAccumulator,
    Statistics,
    shrinkage_on_other_text,
    towards_diagonal,
)
from oneshot.linalg.interpolative import spanning_columns
from oneshot.linalg.low_rank import damped_root
from oneshot.linalg.pca import principal_components
from oneshot.linalg.products import product, rounded_product
from oneshot.machine import Workers
from oneshot.machine.transfer import as_like
from oneshot.stream import Layer
from oneshot.tensors import Tensors

FACTORS_EVERY = 8  # tokens of a batch; mean squares need fewer of them than a Gram does
EIGEN_OPERATIONS = 48.0  # eigenvectors of n rows, and products with their roots, ÷ n³


@dataclass(frozen=True)
class Factored:
    """A matrix of low rank, `outputs (m, r) @ inputs (r, n)`; both float32."""

    outputs: torch.Tensor
    inputs: torch.Tensor

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix `(m, n)` in this dtype."""
        return rounded_product(self.outputs, self.inputs, dtype)

    def rows(self, kept: torch.Tensor) -> "Factored":
        """Return the matrix of these rows."""
        return Factored(self.outputs[kept], self.inputs)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the matrix as r of its columns, what makes the others from them, and the order of both.

        With `inputs = inputs[:, J] [I, T]` in the order `[J, others]` they are `outputs inputs[:, J] (m, r)`,
        `Tᵀ (n − r, r)` and int64 `(n,)`.
        """
        read, others, coefficients = spanning_columns(self.inputs)
        return product(self.outputs, self.inputs[:, read]), coefficients.T, torch.cat((read, others))


Ranks = dict[RankedKind, Factored]


def cost_of_rank(outputs: int, inputs: int) -> float:
    """Return the cost of the curve or of one rank of a linear, in operations of float32 products on a CPU."""
    return EIGEN_OPERATIONS * inputs**3 + 4 * inputs**2 * outputs


@dataclass(frozen=True)
class Inputs:
    """The inputs of linears, by their `gram (n, n)`; linears with the same inputs share the root.

    `shrinkage`: share of what different inputs have in common that does not count. `of`: their name.
    """

    gram: torch.Tensor
    shrinkage: float = 0.0
    of: str = "inputs of a linear of low rank"

    @cached_property
    def root(self) -> torch.Tensor:
        """Return `L (n, n)`, `L Lᵀ = H`, in float32; H is the Gram, shrunk towards its diagonal.

        The result is stored in at most as many digits.
        """
        return damped_root(towards_diagonal(self.gram, self.shrinkage), self.of).float()


@dataclass(frozen=True)
class Ranked:
    """A linear that may have low rank: `weight (m, n)`, its `inputs`, and a metric of its outputs.

    `metric`: the rows' weights `(m,)`, or a positive definite matrix `(m, m)`.
    """

    weight: torch.Tensor
    inputs: Inputs
    metric: torch.Tensor

    @property
    def cost(self) -> float:
        """Return the cost of its curve or of one rank, as `cost_of_rank`."""
        return cost_of_rank(*self.weight.shape)

    def errors(self) -> torch.Tensor:
        """Return the share of the outputs' weighted energy that every rank loses; float64 `(min(m, n) + 1,)`, host."""
        _, energies = self._principal
        lost = suffix_sums(energies[: min(self.weight.shape)].cpu())
        return lost / lost[0].clamp_min(torch.finfo(lost.dtype).tiny)

    def nearest(self, rank: int) -> Factored:
        """Return the nearest matrix of a rank."""
        (directions, _), root = self._principal, self.inputs.root
        directions = directions[:, :rank]
        inputs = torch.linalg.solve_triangular(root.T, directions, upper=True).T
        return Factored(product(self.weight.to(root), product(root, directions)), inputs)

    @property
    def _inside(self) -> torch.Tensor:
        """Return the Gram of `W L` in the metric; products before L are in the weight's dtype, as those in H are."""
        root, dense = self.inputs.root, self.weight
        largest = self.metric.amax().clamp_min(torch.finfo(self.metric.dtype).tiny)
        metric = (self.metric / largest).to(dense)
        weighted = metric.unsqueeze(1) * dense if metric.ndim == 1 else product(metric, dense)
        return product(product(root.T, product(dense.T, weighted).to(root)), root)

    @cached_property
    def _principal(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the principal directions of `W L` in the metric, and the energies along them."""
        return principal_components(self._inside, self.inputs.root.dtype)


class RankAccumulator:
    """Sum over batches what the ranks of a sublayer's linears are computed from.

    Args:
        tensors: the layer's. has_curvature: whether `finish` will get the layer's, which weighs queries and keys.
    """

    def __init__(
        self,
        shape: ModelShape,
        sublayer: Sublayer,
        index: int,
        tensors: Tensors,
        device: torch.device,
        *,
        has_curvature: bool,
    ) -> None:
        self._index, self._mixer, self._tensors = index, sublayer.mixer, tensors
        self._branch_norm = BranchNorm.of(sublayer, tensors, device)
        self._inputs = GramAccumulator(shape.hidden_size, output_size=None, device=device)
        if isinstance(self._mixer, Attention):
            size, heads, groups = shape.head_dim, shape.num_attention_heads, shape.num_key_value_heads
            self._heads = GramAccumulator(heads * size, output_size=None, device=device)
            counts = () if has_curvature else (heads, groups)
            self._grams = [HeadGramAccumulator(count, size, device=device) for count in counts]
        else:
            width = tensors[f"{sublayer.writer}.weight"].shape[1]
            self._energies = torch.zeros(2, width, dtype=torch.float64, device=device)

    def update_(self, layer: Layer, x: torch.Tensor, inner: torch.Tensor | None = None) -> None:
        """Add a batch of the stream before the sublayer; `inner`: what the writer reads, if it is known."""
        self._inputs.update_(layer.normed(self._index, x).flatten(0, -2))
        branch_norm, scales = self._branch_norm, None
        if not isinstance(self._mixer, Attention):
            x, inner = x.flatten(0, -2)[::FACTORS_EVERY], None if inner is None else inner[::FACTORS_EVERY]
        if isinstance(self._mixer, Attention) or branch_norm is not None:
            inner = layer.inner(self._index, x) if inner is None else inner
        if branch_norm is not None and inner is not None:
            scales = branch_norm.scales_of(layer, self._index, inner)
        if isinstance(self._mixer, Attention):
            assert inner is not None
            self._heads.update_(inner if scales is None else inner * scales.to(inner))
            if self._grams:
                for grams, rows in zip(self._grams, layer.queries_keys(self._index, x), strict=True):
                    grams.update_(rows)
        else:
            for total, rows in zip(self._energies, layer.neuron_factors(self._index, x), strict=True):
                total += (rows.float() if scales is None else rows.float() * scales).square().sum(0)

    def finish(
        self, workers: Workers, curvature: LayerCurvature | None = None, *, shrinks: bool = False
    ) -> dict[RankedKind, Ranked]:
        """Return the sublayer's linears with the sums of all workers; `curvature` is the layer's.

        `shrinks`: whether Grams shrink towards their diagonals.
        """
        tensors, branch_norm = self._tensors, self._branch_norm

        def inputs_of(sums: Statistics) -> Inputs:
            return Inputs(sums.gram, shrinkage_on_other_text(len(sums.gram), sums.num_rows) if shrinks else 0.0)

        inputs = inputs_of(self._inputs.finish(workers))
        gram = inputs.gram
        if isinstance(self._mixer, Attention):
            heads, grams = inputs_of(self._heads.finish(workers)), [one.finish(workers) for one in self._grams]
            together = torch.cat([tensors[f"{linear}.weight"] for linear in (self._mixer.q, self._mixer.k)])
            output = tensors[f"{self._mixer.out}.weight"]
            of_scores = _query_key_weights(*grams) if curvature is None else curvature.query_key
            of_output = gram.new_ones(len(output)) if branch_norm is None else branch_norm.gain.square()
            of_output = of_output if curvature is None else curvature.output
            return {
                "query_key": Ranked(together.to(gram), inputs, of_scores),
                "output": Ranked(output.to(gram), heads, of_output),
            }
        workers.sum_(self._energies)
        assert isinstance(self._mixer, FeedForward)
        assert self._mixer.gate is not None
        down = tensors[f"{self._mixer.down}.weight"].to(gram)
        if curvature is None:
            columns = (down if branch_norm is None else branch_norm.seen(down)).double().square().sum(0)
        else:
            columns = column_costs(down, curvature.ffn)
        gates, ups = self._energies * columns
        return {
            "gate": Ranked(tensors[f"{self._mixer.gate}.weight"].to(gram), inputs, ups),
            "up": Ranked(tensors[f"{self._mixer.up}.weight"].to(gram), inputs, gates),
        }


def with_ranks(tensors: Tensors, mixer: Mixer, ranks: Mapping[RankedKind, Factored]) -> Tensors:
    """Return the layer whose whole linears are these matrices of low rank."""
    changed = dict(tensors)
    for kind, factored in ranks.items():
        names = [f"{linear}.weight" for linear in mixer.ranked[kind]]
        like = tensors[names[0]]
        parts = factored.whole(like.dtype).to(like.device).split([len(tensors[name]) for name in names])
        changed |= dict(zip(names, parts, strict=True))
    return changed


def fold_ranks(tensors: Tensors, mixer: Mixer, ranks: Mapping[RankedKind, Factored]) -> Tensors:
    """Return the layer whose linears of low rank keep r of their columns, beside what the others are made from."""
    folded = dict(tensors)
    for kind, factored in ranks.items():
        names = [f"{linear}.weight" for linear in mixer.ranked[kind]]
        like, sizes = tensors[names[0]], [len(tensors[name]) for name in names]
        columns, others, order = factored.columns()
        folded |= {
            name: as_like(part, like).contiguous() for name, part in zip(names, columns.split(sizes), strict=True)
        }
        read = read_by(mixer, kind)
        folded |= {f"{read}.weight": as_like(others, like).contiguous(), f"{read}.columns": order}
    return folded


def _query_key_weights(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the weights of the rows of queries and keys, float64 `((H + G)·h,)`, from their Grams by head."""
    of_queries, of_keys = _pair_energies(queries), _pair_energies(keys)
    per_group = len(of_queries) // len(of_keys)
    met_by_keys = of_queries.unflatten(0, (-1, per_group)).sum(1)
    met_by_queries = of_keys.unsqueeze(1).expand(-1, per_group, -1).flatten(0, 1)
    return torch.cat((met_by_queries, met_by_keys)).flatten()


def _pair_energies(grams: torch.Tensor) -> torch.Tensor:
    """Return half the energy of every coordinate's rotary pair, float64 `(heads, h)`; p and p + h/2 are a pair."""
    energies = grams.double().diagonal(dim1=1, dim2=2).unflatten(1, (2, -1)).sum(1) / 2
    return energies.repeat(1, 2)
