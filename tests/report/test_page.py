"""`report.html`: its numbers, its safety, and its look in a browser."""

import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig
from PIL import Image

from oneshot.pipeline import compress
from oneshot.report.page import report_page
from oneshot.report.plots import KINDS
from oneshot.report.records import Check, LayerReport, Report, SublayerReport

LIGHT, DARK = (0xF3, 0xF5, 0xF7), (0x10, 0x14, 0x18)  # --page in the style sheet
PHONE, DESKTOP = 390, 1280
VOID = {"meta", "link", "br"}  # elements without an end tag; SVG's are closed at once
HOSTILE = '/models/it\'s "50%"<img src=x onerror=alert(1)><script>alert(2)<\\script>&amp;{{ 7 * 7 }}'


class Page(HTMLParser):
    """Parse a page into elements with their attributes, tables, definitions and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.definitions: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "dd":
            self.definitions.append((self.texts["dt"][-1], self.texts["dd"][-1]))

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data
        if self._open and self._open[-1] in ("th", "td"):
            self.tables[-1][-1][-1] += data.strip()

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def ffn(kept: int, predicted: float | None = 0.25, measured: float | None = 0.5) -> SublayerReport:
    return SublayerReport("ffn", 1536, kept, predicted, measured, 2886.0, 0.33)


def make_report(layers: tuple[tuple[SublayerReport, ...], ...] = ((ffn(1024),),), **changes: Any) -> Report:
    """Return a report with these sublayers layer by layer; all its numbers are different."""
    report = Report(
        config={
            "checkpoint": "/models/dense-135m",
            "output": "out",
            "target": {"sparsity": 0.2, "parameters": None},
            "method": {"ffn": "id"},
            "text": {"calibration": "text.jsonl", "num_sequences": 32},
            "machine": {"device": "cpu", "batch_size": 4},
            "recipe": "oneshot",
            "form": "stock",
            "profile": None,
            "seed": 3,
        },
        method={"ffn": "id", "heads": "none", "correction": "two-stream", "hidden": "none"},
        versions={"python": "3.11.7", "oneshot": "0.1.0"},
        dense_shape={
            "causal": True,
            "num_hidden_layers": len(layers),
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "head_dim": 64,
        },
        plan={"layers": [], "query_key_size": None, "value_size": None, "hidden": None, "embedding": []},
        stored_parameters={"dense": 134515008, "compressed": 107972928},
        layer_parameters={"dense": 106202880, "compressed": 79660800},
        flops_per_token={"dense": 268959744, "compressed": 215875584},
        kv_bytes_per_token={"dense": 23040, "compressed": 23040},
        sparsity={"asked": 0.2, "reached": 0.1973},
        calibration={
            "source": "text.jsonl",
            "num_sequences": 32,
            "sequence_length": 1024,
            "num_tokens": 32768,
            "token_hash": "c5a8",
        },
        layers=tuple(
            LayerReport(index, sublayers, 1.5 + index, (3 + index) * 2**29, 0) for index, sublayers in enumerate(layers)
        ),
        seconds={"prepare": 10.0, "layers": 30.0, "total": 40.0},
        peak_bytes=5 * 2**29,
        peak_device_bytes=0,
    )
    return replace(report, **changes)


def points(page: str, colour: str) -> list[list[tuple[float, float]]]:
    """Return the lines of this colour in the page's plots, as points in the SVG's coordinates."""
    lines = re.findall(rf'<polyline points="([^"]*)" stroke="{colour}"', page)
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())] for line in lines]


# Content


def test_the_headline_names_model_sizes_recipe_and_sparsity() -> None:
    page = Page(report_page(make_report()))
    (headline,) = [text for text in page.texts["p"] if "→" in text]
    assert " ".join(headline.split()) == "134,515,008 → 107,972,928 stored parameters -19.7%"
    assert page.texts["h1"] == page.texts["title"] == ["dense-135m, compressed"]
    assert ("Source", "/models/dense-135m") in page.definitions
    assert ("Recipe", "oneshot (FFN id, heads none, hidden size none, correction two-stream)") in page.definitions
    assert ("Form", "stock") in page.definitions
    assert ("Sparsity", "asked 20.00%, reached 19.73%") in page.definitions


def test_the_table_of_sizes_has_dense_beside_compressed() -> None:
    assert Page(report_page(make_report())).tables[0] == [
        ["Size", "dense", "compressed", "change"],
        ["Stored parameters", "134,515,008", "107,972,928", "-19.7%"],
        ["Parameters in the layers", "106,202,880", "79,660,800", "-25.0%"],
        ["FLOPs per token", "268,959,744", "215,875,584", "-19.7%"],
        ["KV bytes per token", "23,040", "23,040", "+0.0%"],
    ]


def test_time_text_and_memory() -> None:
    page = Page(report_page(make_report(peak_device_bytes=2**28)))
    assert page.tables[1] == [
        ["Stage", "seconds", "share"],
        ["prepare", "10.0", "25.0%"],
        ["layers", "30.0", "75.0%"],
        ["total", "40.0", ""],
    ]
    widths = [attributes["style"] for attributes in page.of("span") if "style" in attributes]
    assert widths == ["width: 25.0%", "width: 75.0%"]
    assert ("Text", "text.jsonl") in page.definitions
    assert ("Tokens", "32,768 (32 sequences of 1,024)") in page.definitions
    assert ("SHA-256", "c5a8") in page.definitions
    assert ("Peak memory", "2.50 GiB") in page.definitions
    assert ("Time", "40 s") in page.definitions
    assert ("On the GPU", "0.25 GiB") in page.definitions


def test_every_sublayer_of_every_layer_has_its_row() -> None:
    heads = SublayerReport("heads", 9, 6, 0.125, None, 1e5, 1.25, eigenvalue_fallback=True)
    rows = Page(report_page(make_report(((ffn(1024), heads), ())))).tables[2]
    assert rows[1:] == [
        ["0", "ffn", "1,536", "1,024", "0.2500", "0.5000", "2.9e+03", "0.33", "1.5", "1.50"],
        ["heads", "9", "6", "0.1250", "–", "1.0e+05 (eigenvalues)", "1.25"],
        ["1", "as it was", "2.5", "2.00"],
    ]


def test_all_settings_and_versions_are_folded() -> None:
    report = make_report()
    page = Page(report_page(report))
    (folded,) = page.texts["details"]
    config = report.config
    general = {name: value for name, value in config.items() if not isinstance(value, dict)}
    assert {"checkpoint", "output", "recipe", "form", "profile", "seed"} == general.keys()
    for record in (
        general,
        config["target"],
        config["text"],
        config["machine"],
        report.method,
        {name: value for name, value in report.plan.items() if name != "layers"},
        {name: "yes" if value is True else value for name, value in report.dense_shape.items()},
        report.versions,
    ):
        for name, value in record.items():
            assert name in folded
            assert (name, "–" if value in (None, []) else str(value)) in page.definitions


def test_ranks_of_the_embedding_are_shown() -> None:
    assert ("Embedding", "whole") in Page(report_page(make_report())).definitions
    embedding = [{"rows": 100, "rank": 576}, {"rows": 100, "rank": 320}]
    page = Page(report_page(make_report(plan=make_report().plan | {"embedding": embedding})))
    assert ("Embedding", "ranks 576, 320 of 576, by ranges of the vocabulary") in page.definitions


def test_sizes_inside_heads_and_the_hidden_error_are_shown() -> None:
    plan = make_report().plan | {"value_size": 48}
    captions = " ".join(Page(report_page(make_report(plan=plan, hidden_error=0.1234))).texts["figcaption"])
    assert "Kept value size per head: 48 of 64." in captions
    assert "query/key" not in captions
    assert "leaves 0.1234 of the residual stream out" in captions


def test_the_quality_is_in_words_and_numbers_with_the_answers() -> None:
    check = Check("text.jsonl", 2048, {"dense": 20.0, "compressed": 21.5}, "Why?", {"dense": "<b>", "compressed": ""})
    page = Page(report_page(make_report(check=check)))
    shown = " ".join(" ".join(page.texts["p"]).split())
    assert "a little worse than the original" in shown
    assert "Perplexity 20.00 → 21.50 (× 1.07) on 2,048 tokens of text.jsonl" in shown
    assert page.texts["blockquote"] == ["<b>", "(nothing)"]
    skipped = Page(report_page(make_report(check=Check(skipped="It was left out."))))
    assert "It was left out." in skipped.texts["p"]
    assert "Not measured: this run made no check." in Page(report_page(make_report())).texts["p"]


def test_what_was_kept_is_said() -> None:
    target = make_report().config["target"] | {"keep": ("layers.0.*", "embed_tokens")}
    page = Page(report_page(make_report(config=make_report().config | {"target": target})))
    assert ("Kept as it was", "layers.0.*, embed_tokens") in page.definitions
    assert "Kept as it was" not in dict(Page(report_page(make_report())).definitions)


def test_warnings_are_listed_once() -> None:
    report = make_report(warnings=("few tokens",))
    layers = tuple(replace(layer, warnings=("few tokens", "a Gram")) for layer in report.layers)
    assert Page(report_page(replace(report, layers=layers))).texts["li"] == ["few tokens", "a Gram"]


def test_neighbours_that_stay_share_a_row() -> None:
    rows = Page(report_page(make_report(((), (), (), (ffn(1024),), ())))).tables[2]
    assert [row[0] for row in rows[1:]] == ["0–2", "3", "4"]
    assert rows[1] == ["0–2", "as it was", "7.5", "2.50"]


# Plots


def test_the_curve_marks_this_run() -> None:
    curve = {"0.1": 0.01, "0.3": 0.09}
    report = make_report(
        predicted_curve=curve, predicted_divergence={"plan": 0.09}, sparsity={"asked": 0.3, "reached": 0.3}
    )
    page = report_page(report)
    blue = points(page, "#0072b2")[0]
    assert len(blue) == 3
    (x, y) = (float(value) for value in re.search(r'<circle cx="([^"]*)" cy="([^"]*)"', page).groups())
    assert (x, y) == pytest.approx(blue[-1], abs=0.1)
    assert "this run" in Page(page).texts["text"]


def test_the_plot_of_sizes_draws_the_kept_shares() -> None:
    """Check the shares of a model without reports of heads, and with one layer without any report: both keep 100 %."""
    page = report_page(make_report(((ffn(768),), (), (ffn(384),))))
    line = points(page, KINDS["ffn"][1])[0]
    heads = points(page, KINDS["heads"][1])[0]
    assert len(line) == len(heads) == 3
    top = heads[0][1]
    drops = [y - top for _, y in line]
    assert drops[1] == pytest.approx(0, abs=1e-3)
    assert drops[0] > 0
    assert drops[2] == pytest.approx(1.5 * drops[0], rel=1e-3)  # 25 % kept against 50 %
    assert [y for _, y in heads] == [top] * 3


def test_the_plot_of_errors_draws_the_predictions() -> None:
    line = points(report_page(make_report(((ffn(768, 0.1),), (ffn(768, 0.2),), (ffn(768, 0.4),)))), KINDS["ffn"][1])[1]
    assert line[0][1] - line[2][1] == pytest.approx(3 * (line[0][1] - line[1][1]), rel=1e-3)


def test_hidden_sizes_are_drawn_if_there_are_some() -> None:
    inputs = tuple(SublayerReport(kind, 576, 448, 0.1, 0.1, None, None) for kind in ("attention input", "ffn input"))
    names = {KINDS[kind][0] for kind in ("attention input", "ffn input")}
    assert names <= set(Page(report_page(make_report((inputs, inputs)))).texts["text"])
    assert not names & set(Page(report_page(make_report())).texts["text"])


@pytest.mark.parametrize("layers", [1, 2, 30, 126])
def test_the_layers_below_a_plot_are_whole_numbers(layers: int) -> None:
    texts = Page(report_page(make_report(((ffn(1024),),) * layers))).texts["text"]
    ticks = [int(text) for text in texts[: texts.index("layer")] if text.isdigit()]
    assert ticks == sorted(set(ticks) & set(range(layers)))


# Robustness


@pytest.mark.parametrize("odd", [None, math.nan, math.inf])
def test_errors_that_are_not_finite(odd: float | None) -> None:
    page = Page(report_page(make_report(((ffn(768, odd, odd),), (ffn(768, odd, 0.5),)), calibration=None)))
    assert page.tables[2][1][4:6] == ["–" if odd is None else str(odd)] * 2
    assert ("Text", "none: this recipe only reads weights") in page.definitions
    assert len(page.of("svg")) == 2


def test_without_any_error_there_is_no_plot_of_errors() -> None:
    page = Page(report_page(make_report(((ffn(768, None, None),),))))
    assert len(page.of("svg")) == 1
    assert "No error was predicted or measured in any layer." in page.texts["p"]


def test_sizes_and_times_of_zero() -> None:
    nothing = {"dense": 0, "compressed": 0}
    page = Page(report_page(make_report((), kv_bytes_per_token=nothing, seconds={"layers": 0.0, "total": 0.0})))
    assert all(row[0] != "KV bytes per token" for row in page.tables[0])  # an encoder has no cache
    assert page.tables[1][1] == ["layers", "0.0", "0.0%"]


def test_hostile_names_stay_text() -> None:
    report = make_report()
    calibration = (report.calibration or {}) | {"source": HOSTILE}
    page = Page(report_page(replace(report, config=report.config | {"checkpoint": HOSTILE}, calibration=calibration)))
    assert {("Source", HOSTILE), ("checkpoint", HOSTILE), ("Text", HOSTILE)} <= set(page.definitions)
    assert page.texts["h1"] == [f"{Path(HOSTILE).name}, compressed"]
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in Page(report_page(report)).elements}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_same_report_gives_the_same_bytes() -> None:
    assert report_page(make_report()) == report_page(make_report())


def test_the_page_loads_nothing() -> None:
    page = Page(report_page(make_report()))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "image", "base", "form", "a"}
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert value == "data:," if tag == "link" else str(value).startswith("#")
            assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", value or ""))
    for style in page.texts["style"]:
        assert "url(" not in style
        assert "@import" not in style
    (policy,) = [attributes["content"] for attributes in page.of("meta") if "http-equiv" in attributes]
    assert str(policy).startswith("default-src 'none';")


# Accessibility


def test_headers_have_a_scope_and_plots_a_name() -> None:
    page = Page(report_page(make_report()))
    assert all(attributes.get("scope") in ("col", "row", "rowgroup") for attributes in page.of("th"))
    plots = [attributes for attributes in page.of("div") if attributes.get("class") == "plot"]
    assert len(plots) == 2
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in plots)
    assert page.of("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")


def test_ids_are_unique_and_every_reference_has_its_id() -> None:
    text = report_page(make_report(((ffn(1024), SublayerReport("heads", 9, 6, 0.1, 0.1, None, None)),) * 3))
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"|aria-labelledby="([^"]*)"', text)
    assert {"".join(groups) for groups in named} <= set(ids)


# In a browser


@pytest.fixture
def chromium(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Give `chromium(page, *options)`, which returns stdout and stderr of a headless Chromium."""
    command = shutil.which("chromium")
    if command is None:
        pytest.skip("chromium is not installed (apt-get install chromium, as .ci/run does)")

    def run(page: Path, *options: str) -> tuple[str, str]:
        fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"]
        result = subprocess.run(
            [command, *fixed, f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return result.stdout, result.stderr

    return run


def measured_width(chromium: Callable[..., tuple[str, str]], page: Path, window: int) -> int:
    """Return the width that the page takes in a window of this width."""
    wrapper = page.with_name("wrapper.html")
    wrapper.write_text(
        f'<iframe src="{page.name}" width="{window}" height="800" style="border: 0" onload="document.title = '
        'this.contentDocument.documentElement.scrollWidth"></iframe>'
    )
    dom, _ = chromium(wrapper, "--allow-file-access-from-files", "--virtual-time-budget=10000", "--dump-dom")
    return int(Page(dom).texts["title"][0])


def test_the_page_of_a_compressed_model_in_a_browser(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    chromium: Callable[..., tuple[str, str]],
    tmp_path: Path,
) -> None:
    config = make_config(make_checkpoint(layers=3), recipe="stat")
    report = compress(config)
    page = Path(config.output) / "report.html"
    assert page.read_text(encoding="utf-8") == report_page(report)
    picture = tmp_path / "page.png"
    for scheme, background in ((1, LIGHT), (0, DARK)):
        window = (PHONE, 1200)
        _, log = chromium(
            page,
            f"--window-size={window[0]},{window[1]}",
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--screenshot={picture}",
        )
        assert "CONSOLE" not in log
        with Image.open(picture) as image:
            shown = image.convert("RGB")
        assert shown.size == window
        assert shown.getpixel((2, 2)) == background
        colours = shown.getcolors(maxcolors=window[0] * window[1])
        assert colours is not None
        assert len(colours) > 100  # text and plots, not an empty page
    unfolded = page.with_name("unfolded.html")
    unfolded.write_text(page.read_text(encoding="utf-8").replace("<details>", "<details open>"), encoding="utf-8")
    for width in (320, PHONE, DESKTOP):
        assert measured_width(chromium, unfolded, width) == width


def test_chromium_reports_the_console_and_the_width(chromium: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    """Check the instruments: the test above would also pass with a browser that reports nothing."""
    page = tmp_path / "wide.html"
    page.write_text('<body style="margin: 0"><div style="width: 900px">wide</div><script>nothing()</script>')
    _, log = chromium(page, f"--screenshot={tmp_path / 'wide.png'}")
    assert "CONSOLE" in log
    assert measured_width(chromium, page, PHONE) == 900
