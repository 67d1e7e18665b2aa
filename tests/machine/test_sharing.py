"""Tasks that processes share out by their cost: against the best of all ways to share them out."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_threads import Group, ThreadWorkers

from oneshot.machine import Workers
from oneshot.machine.sharing import Loads

COSTS = st.lists(st.floats(0, 1e15), min_size=1, max_size=6)


def parts(costs: list[float], owners: tuple[int, ...] | list[int], size: int) -> list[float]:
    return [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == own) for own in range(size)]


@settings(max_examples=30)
@given(costs=COSTS, size=st.integers(1, 4))
def test_the_largest_part_is_below_the_bound_of_the_best(costs: list[float], size: int) -> None:
    """Graham 1969, equation 2; the best is found by trying all owners of all tasks."""
    best = min(max(parts(costs, owners, size)) for owners in product(range(size), repeat=len(costs)))
    loads = Loads(size)
    found = parts(costs, loads.share_out(costs), size)
    assert max(found) <= (4 / 3 - 1 / (3 * size)) * best * (1 + 1e-12)
    assert loads.stage == loads.whole


def test_a_stage_begins_without_loads_and_no_process_always_has_the_longest_task() -> None:
    loads, longest = Loads(3), []
    for _ in range(6):
        loads.begin_stage()
        longest.append(loads.share_out([1.0, 5.0, 1.0])[1])
        assert max(loads.stage) == 5
    assert sorted(longest) == [0, 0, 1, 1, 2, 2]
    assert loads.whole == [14, 14, 14]


def test_tasks_beside_others_go_where_there_is_less_to_do() -> None:
    loads = Loads(2)
    [busy] = loads.share_out([10.0])
    assert loads.share_out([4.0, 4.0]) == [1 - busy] * 2


def test_one_process_computes_one_job_after_the_other() -> None:
    """So what a job returns need not wait in memory until all others are done."""
    done: list[int] = []
    jobs = [lambda number=number: done.append(number) or number for number in range(3)]
    found = Workers().share_all(jobs, [1.0, 2.0, 3.0])
    assert (next(found), done) == (0, [0])
    assert [*found] == [1, 2]


def test_of_grams_what_is_on_and_above_the_diagonal_is_summed() -> None:
    """What is below differs between processes, because nobody reads it."""
    parts, group = [torch.randn(2, 700, 700, dtype=torch.float64) for _ in range(3)], Group(3)
    own = [part.clone() for part in parts]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda rank: ThreadWorkers(rank, 3, rank, group).sum_grams_(own[rank]), range(3)))
    for part, summed in zip(parts, own, strict=True):
        assert torch.equal(summed.triu(), (parts[0] + parts[1] + parts[2]).triu())
        below = torch.block_diag(torch.ones(512, 512), torch.ones(188, 188)).logical_not().tril()
        assert torch.equal(summed[:, below], part[:, below])
