"""What quantised types cost the tensors of the original, and by that what they cost any plan of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from oneshot.architecture import StackShape
from oneshot.export.gguf import FILE_NAME, expected_tensors, with_all_ffns
from oneshot.export.quantisers import FLOAT, bytes_of, types_of
from oneshot.export.result_model import Advance, result_importance
from oneshot.export.result_of_stock import open_result
from oneshot.export.result_sensitivity import SENSITIVITY_TOKENS
from oneshot.export.tensor_types import Priced, beside_bytes, near_and_fast, price_result, seconds_of_kinds
from oneshot.machine import Machine
from oneshot.planning import Plan
from oneshot.text import Text

BESIDE_OF_LAYER = 128  # bytes that a file with sizes of its own for a layer may have more
LAYER = "model.layers."


@dataclass(frozen=True)
class OriginalTypes:
    """The tensors of the original with what every type costs them.

    Attributes:
        priced: its matrices. names: of each in the file, by module. beside_bytes: of the file without them.
    """

    priced: Sequence[Priced]
    names: Mapping[str, str]
    beside_bytes: int

    def loss_of(self, plan: Plan, stack: StackShape, file_bytes: int) -> float:
        """Return the nats a token that rounding a plan's matrices to a file of this size costs; infinite if none is.

        A smaller tensor loses as much as the whole one: neurons that stay carry more, and the relative loss of a type
        was the same or larger in compressed models (docs/llama-cpp.md, Size and loss).

        Args:
            stack: the sizes of the plan.
        """
        shapes, numbers = expected_tensors(with_all_ffns(stack)), {kept: i for i, kept in enumerate(plan.kept_layers)}
        damages, seconds, sizes = [], [], []
        for one in self.priced:
            name = self._name_in(one.module, numbers)
            if name is None:  # of a layer that is left out
                continue
            known = dict(zip(one.kinds, one.damages, strict=True))
            kinds = [kind for kind in types_of(shapes[name][1]) if kind in known] or [FLOAT]
            damages.append(np.array([known.get(kind, 0.0) for kind in kinds]))
            seconds.append(seconds_of_kinds(one.module, shapes[name], kinds, self.priced))
            sizes.append(np.array([bytes_of(shapes[name], kind) for kind in kinds], float))
        budget = file_bytes - self.beside_bytes - BESIDE_OF_LAYER * len(plan.layers)
        chosen = near_and_fast(damages, seconds, sizes, budget)
        if chosen is None:
            return inf
        return sum(float(damage[option]) for damage, option in zip(damages, chosen, strict=True))

    def _name_in(self, module: str, numbers: Mapping[int, int]) -> str | None:
        """Return the name in a file whose layers have these numbers; None for a layer that it does not have."""
        if not module.startswith(LAYER):
            return self.names[module]
        layer = int(module.removeprefix(LAYER).split(".")[0])
        if layer not in numbers:
            return None
        return self.names[module].replace(f"blk.{layer}.", f"blk.{numbers[layer]}.")


def price_original(
    folder: Path, text: Text, machine: Machine, seed: int, *, advance: Advance, rounds: Callable[[], None]
) -> OriginalTypes:
    """Return what types cost the tensors of a GGUF result that has all of the original's parameters.

    Args:
        text: which inputs are measured on, and gradients on its beginning. advance: receives the tokens that passed a
            layer. rounds: is called before what takes longest, the rounding.
    """
    path = folder / FILE_NAME
    inputs = result_importance(open_result(path, text, machine), advance)
    rounds()
    priced, names = price_result(path, inputs, text.first(SENSITIVITY_TOKENS), machine, seed)
    return OriginalTypes(priced, names, beside_bytes(path, names))
