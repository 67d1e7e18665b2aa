"""Which process computes which of several tasks that do not wait for each other, by what they are predicted to cost."""

from collections.abc import Sequence


class Loads:
    """What the processes of a run have got to compute. All of them keep the same books.

    Attributes:
        stage: of each process since the last time that all waited for each other. whole: of each since the beginning.
    """

    def __init__(self, num_processes: int) -> None:
        self.stage, self.whole = [0.0] * num_processes, [0.0] * num_processes

    def share_out(self, costs: Sequence[float]) -> list[int]:
        """Return the process of each task; the costs are in any unit.

        The longest task first, each to the process with the least work of the stage. So the largest load is at most
        `4/3 − 1/(3 N)` of the smallest possible (Graham 1969) in a stage that begins with this call. Of equal loads the
        one with the least of the whole run is taken, so that no process always gets the longest task.
        """
        owners = [0] * len(costs)
        for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
            owner = min(range(len(self.stage)), key=lambda process: (self.stage[process], self.whole[process]))
            owners[task] = owner
            self.stage[owner] += costs[task]
            self.whole[owner] += costs[task]
        return owners

    def begin_stage(self) -> None:
        """Forget the loads of the last stage."""
        self.stage = [0.0] * len(self.stage)
