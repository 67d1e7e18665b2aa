"""A finished result: where it is, what it took, and what to do with it next."""

import html
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oneshot.api.words import python_words
from oneshot.config import Config
from oneshot.errors import OutputError, cause
from oneshot.evaluation import Evaluations, load_model
from oneshot.export import FORMS
from oneshot.json_text import json_text
from oneshot.machine import resolve_device, stored_dtype
from oneshot.machine.scratch import scratch_folder
from oneshot.report.card import PAGE_NAME, REPORT_NAME
from oneshot.report.records import Report
from oneshot.report.sharing import told_sources, without_local_paths
from oneshot.report.summary import check_lines
from oneshot.settings import RECIPE_NAME, recipe_text


def push(
    folder: Path,
    report: Report,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    api: Any = None,
) -> str:
    """Upload a result's folder into a repository, which is made if it does not exist; return its address.

    Paths of this machine are left out of the uploaded report, page and recipe.

    Args:
        private: visibility of a new repository; None: the account's default. token: None for `hf auth login`'s.
        api: a `huggingface_hub.HfApi`; None makes one.

    Raises `OutputError` if the hub cannot be reached or refuses; the folder stays.
    """
    from huggingface_hub import HfApi

    from oneshot.report.additions import stored_evaluations
    from oneshot.report.page import report_page

    hub = HfApi(token=token) if api is None else api
    shared = replace(without_local_paths(report), evaluations=stored_evaluations(folder))
    try:
        repository = hub.create_repo(repo_id, private=private, exist_ok=True)
        with scratch_folder() as cleaned:
            (cleaned / REPORT_NAME).write_text(json_text(shared.to_dict()) + "\n")
            (cleaned / PAGE_NAME).write_text(report_page(shared), encoding="utf-8", errors="backslashreplace")
            (cleaned / RECIPE_NAME).write_text(recipe_text(Config.from_dict(shared.config)), encoding="utf-8")
            message = f"Compressed with oneshot {report.versions.get('oneshot', '')}"
            replaced = [REPORT_NAME, PAGE_NAME, RECIPE_NAME]
            for each, ignored in ((folder, replaced), (cleaned, [])):
                hub.upload_folder(
                    repo_id=repository.repo_id, folder_path=each, commit_message=message, ignore_patterns=ignored
                )
    except Exception as error:  # the hub's types change with its HTTP library; the cause is named and chained
        raise OutputError(
            f"{folder} is complete but cannot be uploaded to {repo_id} ({cause(error)}); check the name and hf auth "
            f"login, then run hf upload {repo_id} {folder}."
        ) from error
    return str(repository)


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
            dtype: a dtype of torch or its name, or `auto` for the stored one.

        Raises `OutputError` for a form that transformers does not open, and another `OneshotError` for a device or a
        dtype that is not known.
        """
        form = FORMS[self.report.config["form"]]
        if form.opened_by != "transformers":
            raise OutputError(f"{form.title} is opened by {form.opened_by}: {self.output}; another form loads.")
        with python_words():
            return load_model(self.output, device=resolve_device(str(device)), dtype=stored_dtype(dtype))

    def evaluate(self, text: Any = (), *, baseline: Any = None, **options: Any) -> Evaluations:
        """Measure the result, and the original beside it if it was given as a path or a name.

        Args:
            text: a source or several, or text in memory.
            baseline: another checkpoint to compare with.
            options: as `oneshot.evaluate` takes them.

        Raises as `oneshot.evaluate`.
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
