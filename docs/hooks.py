"""Hooks of the documentation site: pages from files outside `docs/`, links to them, equations as MathML."""

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

# file of the repository: file of the site
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/layers.svg": "assets/layers.svg",
    "benchmarks/results/quality.svg": "assets/quality.svg",
    "kernels/oneshot_kernels/count_sketch/README.md": "kernels/count-sketch.md",
    "kernels/oneshot_kernels/gram/README.md": "kernels/gram.md",
    "kernels/oneshot_kernels/pivoted_qr/README.md": "kernels/pivoted-qr.md",
}
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside `docs/` to the site."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between files of the repository as links between pages, and free tables from their markers.

    A link to a file that is not on the site keeps its text alone. A link to a file that does not exist stays, and the
    strict build refuses it.
    """
    sources = {site: source for source, site in OUTSIDE.items()}
    here = page.file.src_uri
    folder = posixpath.dirname(sources.get(here, f"docs/{here}"))

    def rewrite(match: re.Match[str]) -> str:
        text, (path, anchor, name) = match[1], match[2].partition("#")
        if not path or ":" in path:
            return match[0]
        target = posixpath.normpath(posixpath.join(folder, path))
        if target.startswith("docs/"):
            site = target.removeprefix("docs/")
        elif target in OUTSIDE:
            site = OUTSIDE[target]
        elif (ROOT / target).exists():
            return text[1:-1]
        else:
            return match[0]
        return f"{text}({posixpath.relpath(site, posixpath.dirname(here) or '.')}{anchor}{name})"

    return re.sub(r"<!-- (?:table: \w+|end) -->", "\n", LINK.sub(rewrite, markdown))


def on_page_content(content: str, **_: Any) -> str:
    """Replace equations by MathML, which browsers show without a script."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[2] == "[" else "inline"
        return f'<{match[1]} class="equation">{convert(html.unescape(match[3]).strip(), display=display)}</{match[1]}>'

    return EQUATION.sub(mathml, content)
