"""A finished result: where it is, what it took, and what to do with it next."""

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneshot.api.hub import push
from oneshot.errors import OutputError
from oneshot.evaluation import Evaluations, load_model
from oneshot.export import FORMS
from oneshot.machine import resolve_device
from oneshot.report.records import Report
from oneshot.report.sharing import told_sources, without_local_paths
from oneshot.report.summary import check_lines


@dataclass(frozen=True)
class Result:
    """A compressed checkpoint on disk.

    Attributes:
        output: its folder.
        report: everything worth knowing about the run, as in `oneshot_report.json`.
        source: the checkpoint that was given as a path or a name; None for a model in memory.
    """

    output: Path
    report: Report
    source: str | None = None

    def load(self, *, device: str = "cpu", dtype: Any = "auto") -> Any:
        """Return the compressed model as a model of transformers, in evaluation mode.

        A form with a modelling file is opened by this package's own class, and the file in the folder is not run.

        Args:
            device: `cpu`, `cuda` or `cuda:N`.
            dtype: a dtype of torch, or `auto` for the stored one.

        Raises `OutputError` for a form that transformers does not open.
        """
        form = FORMS[self.report.config["form"]]
        if form.opened_by != "transformers":
            raise OutputError(f"{form.title} is opened by {form.opened_by}: {self.output}; another form loads.")
        return load_model(self.output, device=resolve_device(device), dtype=dtype)

    def evaluate(self, text: Any = (), *, baseline: Any = None, **options: Any) -> Evaluations:
        """Measure the result, and the original beside it if it was given as a path or a name.

        Args:
            text: a source or several, or text in memory.
            baseline: another checkpoint to compare with.
            options: as `oneshot.evaluate` takes them.
        """
        from oneshot.api.evaluate import evaluate

        return evaluate(self.output, text, baseline=self.source if baseline is None else baseline, **options)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the folder to a repository on the hub, which is made if it does not exist; return its address.

        Paths of this machine are left out of the uploaded report and recipe.

        Raises `OutputError` if the hub cannot be reached or refuses.
        """
        return push(self.output, self.report, repo_id, private=private, token=token)

    def _lines(self) -> list[tuple[str, str]]:
        stored, report = self.report.stored_parameters, without_local_paths(self.report)
        removed = 1 - stored["compressed"] / stored["dense"]
        text = "none"
        if report.calibration is not None:
            source = told_sources(str(report.calibration["source"]))  # names: text in memory had a temporary path
            text = f"{report.calibration['num_tokens']:,} tokens of {source}"
        return [
            ("output", str(self.output)),
            ("parameters", f"{stored['dense']:,} → {stored['compressed']:,} (−{removed:.1%})"),
            ("method", f"{report.config['recipe']}, form {report.config['form']}, calibrated on {text}"),
            ("run", f"{report.seconds['total']:.0f} s, peak memory {report.peak_bytes / 2**30:.2f} GiB"),
            *check_lines(report.check),
        ]

    def __repr__(self) -> str:
        lines = [f"  {name + ':' * bool(name):12}{value}" for name, value in self._lines()]
        return "\n".join(["Result of oneshot (.load(), .evaluate(text), .push_to_hub(name))", *lines])

    def _repr_html_(self) -> str:
        """Return the lines as a table, for notebooks."""
        rows = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(value)}</td></tr>" for n, value in self._lines())
        return f"<table>{rows}</table>"
