"""The base of forms with a modelling file, which transformers runs to open a result."""

from oneshot.report.card import python_usage


class OwnCode:
    """A checkpoint of safetensors whose layers have sizes of their own, with code in its folder."""

    title = "A checkpoint whose layers have their own sizes"
    opened_by = "transformers"
    is_safetensors = True

    def usage(self, task: str) -> str:
        """Return code that opens the result."""
        return python_usage(task, runs_code=True)
