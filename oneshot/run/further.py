"""The layers of a run's model that predict tokens after the next one: which of them the result of a plan has."""

import logging
from functools import cached_property

from oneshot.checkpoint import FurtherLayers, Model, further_layers
from oneshot.export import Form, FurtherResult, further_result
from oneshot.planning import Plan

logger = logging.getLogger(__name__)


class Further:
    """Such layers of a model in results of a form; no target of a size counts their parameters."""

    def __init__(self, model: Model, form: Form) -> None:
        self._model, self._form = model, form
        self._told: set[str] = set()

    @cached_property
    def layers(self) -> FurtherLayers | str | None:
        """Return the layers of the input, the reason why they are not understood, or None without any."""
        return further_layers(self._model)

    def result(self, plan: Plan) -> FurtherResult | None:
        """Return the layers as the result of a plan has them; None if it has none, of which `tell` tells."""
        found = self._result(plan)
        return found if isinstance(found, FurtherResult) else None

    def tell(self, plan: Plan) -> None:
        """Warn, once for a reason, if the result of a plan has no such layers although the input has."""
        reason, beside = self._result(plan), self._model.checkpoint.beside
        if not isinstance(reason, str) or beside is None or reason in self._told:
            return
        self._told.add(reason)
        first, *others = sorted(beside.shapes)
        logger.warning(
            "The layers that predict tokens after the next one (%s and %d other tensors) are left out of the result, "
            "because %s; generate without use_mtp and without speculative decoding by such layers.",
            first,
            len(others),
            reason,
        )

    def parameters(self, plan: Plan) -> int:
        """Return their stored parameters in the result of a plan."""
        found = self.result(plan)
        return 0 if found is None else found.parameters(self._model.checkpoint.without_values())

    @property
    def most_parameters(self) -> int:
        """Return their stored parameters in the input, if results may have them."""
        beside = self._model.checkpoint.beside
        return 0 if beside is None or not isinstance(self.layers, FurtherLayers) else beside.num_parameters

    def _result(self, plan: Plan) -> FurtherResult | str | None:
        return None if self.layers is None else further_result(self._form, self._model, self.layers, plan)
