"""Upload a result to the Hugging Face hub."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from oneshot.config import Config
from oneshot.errors import OutputError, cause
from oneshot.json_text import json_text
from oneshot.machine.scratch import scratch_folder
from oneshot.report.card import REPORT_NAME
from oneshot.report.records import Report
from oneshot.report.sharing import without_local_paths
from oneshot.settings import RECIPE_NAME, recipe_text

PAGE = "report.html"


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
            (cleaned / PAGE).write_text(report_page(shared), encoding="utf-8", errors="backslashreplace")
            (cleaned / RECIPE_NAME).write_text(recipe_text(Config.from_dict(shared.config)), encoding="utf-8")
            message = f"Compressed with oneshot {report.versions.get('oneshot', '')}"
            replaced = [REPORT_NAME, PAGE, RECIPE_NAME]
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
