"""Selectors against their definitions: SciPy's pivoted QR, NumPy's scores, elimination by repeated solves."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from oneshot.compression.statistics import MomentAccumulator
from oneshot.linalg.elimination import eliminate
from oneshot.method import SelectorName
from oneshot.selection import SELECTION_DAMPING, SELECTORS, Evidence, select_heads

Matrix = NDArray[np.float64]
ROWS, NEURONS, OUTPUTS = 60, 12, 5


def select(selector: SelectorName, kept_size: int, *, seed: int = 0) -> tuple[set[int], Matrix, Matrix, Matrix, Matrix]:
    rng = np.random.default_rng(11)
    gate, up, down = (rng.standard_normal(shape) for shape in ((NEURONS, 5), (NEURONS, 5), (5, NEURONS)))
    activations = rng.standard_normal((ROWS, NEURONS)) * rng.uniform(0.2, 3, NEURONS) + rng.uniform(-1, 1, NEURONS)
    accumulator = MomentAccumulator(NEURONS, device=torch.device("cpu"))
    accumulator.update_(torch.from_numpy(activations))
    evidence = Evidence(
        consumer=torch.from_numpy(down),
        producer_energy=torch.from_numpy((gate**2).sum(1) + (up**2).sum(1)),
        gram=torch.from_numpy(activations.T @ activations),
        generator=torch.Generator().manual_seed(seed),
        moments=accumulator.finish(),
    )
    kept = SELECTORS[selector].neurons(evidence, kept_size)
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert len(kept) == kept_size
    return set(kept.tolist()), activations, gate, up, down


def largest(scores: Matrix, count: int) -> set[int]:
    return set(np.argsort(-scores)[:count].tolist())


@pytest.mark.parametrize("kept_size", [1, 7, NEURONS])
def test_selectors_equal_their_definitions(kept_size: int) -> None:
    kept, activations, _, _, down = select("id", kept_size)
    order = scipy.linalg.qr(activations * np.linalg.norm(down, axis=0), mode="r", pivoting=True)[1]
    assert kept == set(order[:kept_size].tolist())

    kept, activations, _, _, down = select("activation-norm", kept_size)
    assert kept == largest(np.linalg.norm(activations, axis=0) * np.linalg.norm(down, axis=0), kept_size)

    kept, _, gate, up, down = select("magnitude", kept_size)
    assert kept == largest(np.linalg.norm(np.hstack([gate, up, down.T]), axis=1), kept_size)

    kept, activations, _, _, down = select("wanda", kept_size)
    assert kept == largest(np.linalg.norm(activations, axis=0) * np.abs(down).sum(0), kept_size)

    kept, activations, _, _, down = select("flap", kept_size)
    assert kept == largest(activations.var(0) * (down**2).sum(0), kept_size)

    kept, activations, _, _, down = select("tcsp-score", kept_size)
    moments = activations.mean(0) + activations.std(0)
    assert (activations.mean(0) < 0).any(), "the sign of a mean must matter"
    assert kept == largest(np.linalg.norm(down, axis=0) * moments, kept_size)


def eliminated_by_solves(gram: Matrix, weight: Matrix, kept: int, block_size: int, classes: list[int]) -> list[int]:
    """Return the blocks that backward elimination keeps; each step solves without every block in turn."""
    system = gram + SELECTION_DAMPING * np.diag(gram).mean() * np.eye(len(gram))
    alive = list(range(len(gram) // block_size))

    def explained(blocks: list[int]) -> float:
        columns = [block * block_size + offset for block in blocks for offset in range(block_size)]
        cross = weight @ system[:, columns]
        return float(np.trace(cross @ np.linalg.solve(system[np.ix_(columns, columns)], cross.T)))

    while True:
        free = [block for block in alive if sum(classes[other] == classes[block] for other in alive) > kept]
        if not free:
            return alive
        alive.remove(max(free, key=lambda block: explained([other for other in alive if other != block])))


@given(seed=st.integers(0, 5000), block_size=st.integers(1, 3), blocks=st.integers(2, 6), classes=st.integers(1, 2))
def test_backward_elimination_equals_repeated_solves(seed: int, block_size: int, blocks: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    activations = rng.standard_normal((ROWS, blocks * block_size)) @ rng.standard_normal((blocks * block_size,) * 2)
    weight = rng.standard_normal((OUTPUTS, blocks * block_size))
    gram, class_of = activations.T @ activations, [block % classes for block in range(blocks)]
    found = eliminate(
        torch.from_numpy(gram),
        torch.from_numpy(weight),
        kept=1,
        block_size=block_size,
        class_of=torch.tensor(class_of),
        damping=SELECTION_DAMPING,
    )
    assert found.tolist() == eliminated_by_solves(gram, weight, 1, block_size, class_of)


@given(seed=st.integers(0, 5000), groups=st.integers(1, 4), per_group=st.integers(1, 4), by_group=st.booleans())
def test_heads_by_scores_have_the_largest_sums(seed: int, groups: int, per_group: int, by_group: bool) -> None:
    outputs, weight, _ = explicit_heads(seed, groups, per_group, 3)
    scores = ((outputs**2).sum(0) * (weight**2).sum(0)).reshape(groups, per_group, 3).sum(2)
    kept_groups, kept_each = (max(1, groups - 1), per_group) if by_group else (groups, max(1, per_group - 1))
    heads = select_heads(
        "activation-norm",
        head_evidence(outputs, weight),
        num_groups=groups,
        heads_per_group=per_group,
        kept_groups=kept_groups,
        kept_heads_per_group=kept_each,
    )
    chosen = np.argsort(-scores.sum(1))[:kept_groups] if kept_groups < groups else np.arange(groups)
    expected = [
        group * per_group + head for group in sorted(chosen) for head in sorted(np.argsort(-scores[group])[:kept_each])
    ]
    assert heads.tolist() == expected


def test_random_neurons_follow_the_seed() -> None:
    assert select("random", 7, seed=1)[0] == select("random", 7, seed=1)[0]
    assert len({frozenset(select("random", 7, seed=seed)[0]) for seed in range(5)}) > 1


def explicit_heads(seed: int, groups: int, per_group: int, head_dim: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return head outputs `Z`, the weight of the writer, and weighted heads as long columns `(rows · h, H)`."""
    rng = np.random.default_rng(seed)
    width = groups * per_group * head_dim
    outputs, weight = rng.standard_normal((ROWS, width)), rng.standard_normal((OUTPUTS, width))
    outputs *= np.repeat(rng.uniform(0.5, 2, groups * per_group), head_dim)
    weighted = outputs * np.linalg.norm(weight, axis=0)
    columns = np.stack(
        [weighted[:, head * head_dim : (head + 1) * head_dim].ravel() for head in range(groups * per_group)], axis=1
    )
    return outputs, weight, columns


def head_evidence(outputs: Matrix, weight: Matrix) -> Evidence:
    width = outputs.shape[1]
    gram = torch.from_numpy(outputs.T @ outputs)
    return Evidence(torch.from_numpy(weight), torch.zeros(width), gram, torch.Generator())


@given(seed=st.integers(0, 5000), groups=st.integers(2, 5), per_group=st.integers(1, 3))
def test_kv_groups_equal_the_pivots_of_scipys_qr(seed: int, groups: int, per_group: int) -> None:
    outputs, weight, columns = explicit_heads(seed, groups, per_group, 4)
    kept_groups = max(1, groups - 1 - seed % 2)
    heads = select_heads(
        "id",
        head_evidence(outputs, weight),
        num_groups=groups,
        heads_per_group=per_group,
        kept_groups=kept_groups,
        kept_heads_per_group=per_group,
    )
    long_groups = np.stack(
        [columns[:, group * per_group : (group + 1) * per_group].ravel() for group in range(groups)], axis=1
    )
    order = scipy.linalg.qr(long_groups, mode="r", pivoting=True)[1][:kept_groups]
    expected = [head for group in sorted(order) for head in range(group * per_group, (group + 1) * per_group)]
    assert heads.tolist() == expected


@given(seed=st.integers(0, 5000), per_group=st.integers(2, 6), kept=st.integers(1, 5))
def test_query_heads_of_one_group_equal_the_pivots_of_scipys_qr(seed: int, per_group: int, kept: int) -> None:
    kept = min(kept, per_group)
    outputs, weight, columns = explicit_heads(seed, 1, per_group, 4)
    heads = select_heads(
        "id",
        head_evidence(outputs, weight),
        num_groups=1,
        heads_per_group=per_group,
        kept_groups=1,
        kept_heads_per_group=kept,
    )
    order = scipy.linalg.qr(columns, mode="r", pivoting=True)[1][:kept]
    assert heads.tolist() == sorted(order.tolist())


@given(seed=st.integers(0, 5000), groups=st.integers(1, 4), per_group=st.integers(1, 4), whole_groups=st.booleans())
def test_every_kept_group_keeps_the_same_number_of_heads(
    seed: int, groups: int, per_group: int, whole_groups: bool
) -> None:
    outputs, weight, _ = explicit_heads(seed, groups, per_group, 2)
    outputs[:, : 2 * per_group] *= 100  # the first group alone would win every free choice
    kept_groups = max(1, groups - 1) if whole_groups else groups
    kept_each = per_group if whole_groups else max(1, per_group - 1)
    heads = select_heads(
        "id",
        head_evidence(outputs, weight),
        num_groups=groups,
        heads_per_group=per_group,
        kept_groups=kept_groups,
        kept_heads_per_group=kept_each,
    )
    counts = (heads // per_group).bincount(minlength=groups).tolist()
    assert sorted(counts) == [0] * (groups - kept_groups) + [kept_each] * kept_groups
    assert heads.tolist() == sorted(set(heads.tolist()))
