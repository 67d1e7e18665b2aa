"""Hooks of the documentation site: pages from files outside `docs/`, links to them, equations as pictures."""

import ast
import html
import logging
import posixpath
import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mkdocs.structure.files import File

log = logging.getLogger("mkdocs.hooks")  # a warning here fails the strict build
with warnings.catch_warnings(action="ignore"):  # ziamath opens its font by a deprecated function
    import ziafont
    import ziamath

ROOT = Path(__file__).resolve().parent.parent

EXAMPLES = ("chat_model.py", "first_result.ipynb", "heal_and_serve.py", "mixture.py")
# file of the repository: file of the site
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/layers.svg": "assets/layers.svg",
    "benchmarks/results/pareto.svg": "assets/pareto.svg",
    "benchmarks/results/quality.svg": "assets/quality.svg",
    "examples/README.md": "examples/index.md",
    **{f"examples/{name}": f"examples/{name}" for name in EXAMPLES},
    "kernels/oneshot_kernels/count_sketch/README.md": "kernels/count-sketch.md",
    "kernels/oneshot_kernels/gram/README.md": "kernels/gram.md",
    "kernels/oneshot_kernels/pivoted_qr/README.md": "kernels/pivoted-qr.md",
}
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
# page of the API: the file whose `__all__` it must show
API = {"api/oneshot.md": "oneshot/__init__.py", "api/kernels.md": "kernels/oneshot_kernels/__init__.py"}
EQUATION_SIZE = 20  # pixels of the font that equations are drawn with; the page scales them to its own
INDEX = re.compile(
    r"<autoref [^>]*identifier=['\"]?([^'\">]*[^\w.'\">-][^'\">]*)['\"]?[^>]*>(.*?)</autoref>", re.DOTALL
)
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside `docs/` to the site."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between files of the repository as links between pages; leave out badges and markers of tables.

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

    without_badges = re.sub(r"^\[!\[.*\n", "", markdown, flags=re.MULTILINE)  # they would be asked of another host
    return re.sub(r"<!-- (?:table: \w+|end) -->", "\n", LINK.sub(rewrite, without_badges))


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Draw equations, and check that a page of the API shows every public name.

    Equations become SVG paths, which need neither a script nor a mathematical font. Indices of docstrings such as
    `G[J][:, J]` look like references to Markdown and become text again.
    """
    if page.file.src_uri in API:
        for name in public_names(ROOT / API[page.file.src_uri]) - {"__version__"}:
            if not re.search(rf'id="[\w.]+\.{name}"', content):
                log.warning("%s: the public name %s is missing", page.file.src_uri, name)
        content = INDEX.sub(r"[\2][\1]", content)
    return EQUATION.sub(lambda match: drawn(html.unescape(match[3]).strip(), match[1], match[2] == "["), content)


def public_names(module: Path) -> set[str]:
    """Return `__all__` of a module without importing it."""
    for statement in ast.parse(module.read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == "__all__":
            return set(ast.literal_eval(statement.value))
    return set()


def drawn(latex: str, element: str, display: bool) -> str:
    """Return an HTML element with the equation as SVG in the colour of the text."""
    ziafont.config.svg2 = False  # paths instead of symbols, whose ids would collide on a page
    ziafont.config.precision = ziamath.config.precision = 1
    equation = ziamath.Latex(latex, size=EQUATION_SIZE, inline=not display, color="currentColor")
    svg = ElementTree.fromstring(equation.svg())
    for name in ("width", "height"):
        svg.set(name, f"{float(svg.attrib[name]) / EQUATION_SIZE:.3f}em")
    svg.attrib |= {"role": "img", "aria-label": latex}
    if not display:
        svg.set("style", f"vertical-align: {equation.getyofst() / EQUATION_SIZE:.3f}em")
    ElementTree.register_namespace("", "http://www.w3.org/2000/svg")
    drawing = ElementTree.tostring(svg, encoding="unicode")
    return f'<{element} class="equation">{drawing}</{element}>'
