"""`obs`: backward elimination, in which the columns that a corrected writer misses least go first."""

import torch

from oneshot.linalg.elimination import eliminate
from oneshot.selection.evidence import Evidence
from oneshot.selection.selector import DOUBLE, Blocks, Cost, Extent, Selector

FLOAT = 4  # bytes
SELECTION_DAMPING = 1e-2


class Elimination(Selector):
    """Remove columns, or whole blocks of them, one after the other (`linalg.elimination`).

    Layers cannot share its choice: what goes in one layer changes what others cost there.
    """

    shares_layers = False

    def neurons(self, evidence: Evidence, kept: int) -> torch.Tensor:
        """Return the columns that backward elimination leaves."""
        return eliminate(evidence.known_gram(), evidence.consumer, kept=kept, damping=SELECTION_DAMPING)

    def blocks(self, evidence: Evidence, blocks: Blocks) -> torch.Tensor:
        """Return the blocks that it leaves in every class."""
        return eliminate(
            evidence.known_gram(),
            evidence.consumer,
            kept=blocks.quota,
            block_size=evidence.consumer.shape[1] // blocks.count,
            class_of=blocks.class_of(evidence.consumer.device),
            damping=SELECTION_DAMPING,
        )

    def cost(self, extent: Extent) -> Cost:
        """Return the cost of the inverse Gram and of its updates."""
        square = extent.columns**2
        needed = (FLOAT + 3 * DOUBLE) * square + 2 * DOUBLE * extent.outputs * extent.columns
        return Cost(needed, operations=4.0 * extent.columns**3)
