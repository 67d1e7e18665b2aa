"""The documentation site, as far as it can be judged without a browser: titles, pictures, requests to other hosts."""

import re
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = spec_from_file_location("site_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def titled(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield titles and pages of the navigation."""
    for title, item in (pair for entry in entries for pair in entry.items()):
        if isinstance(item, str):
            yield title, item
        else:
            yield from titled(item)


def source_of(hooks: Any, page: str) -> Path:
    """Return the file that a page of the site is made from."""
    outside = {site: source for source, site in hooks.OUTSIDE.items()}
    return ROOT / outside.get(page, f"docs/{page}")


@pytest.mark.parametrize(("title", "page"), [pair for pair in titled(NAVIGATION) if pair[0] != "Home"])
def test_a_title_of_the_navigation_is_the_heading_of_its_page(hooks: Any, title: str, page: str) -> None:
    heading, *_ = source_of(hooks, page).read_text().splitlines()
    assert heading.replace("`", "") == f"# {title}"


def test_every_page_keeps_its_pictures_and_asks_no_other_host(hooks: Any) -> None:
    """A picture that is not on the site would become its caption, and a badge would be a request to another host."""
    pictures = 0
    for _, page in titled(NAVIGATION):
        markdown = source_of(hooks, page).read_text()
        shown = hooks.on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri=page)))
        own = [path for path in IMAGE.findall(markdown) if ":" not in path]
        targets = IMAGE.findall(shown)
        assert len(targets) == len(own)
        assert not [path for path in targets if ":" in path]
        assert "[![" not in shown
        pictures += len(own)
    assert pictures >= 3
