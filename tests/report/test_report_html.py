"""The HTML report, as text; `test_report_chromium` opens it.

What these catch: markup made of a name; a script, a style sheet or an address that a browser would fetch; a page that names no viewport;
a finding that is left out; pictures that another run draws otherwise, in fixed colours, or that bring the report down.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_samples import ALL, DRAWN, FAILED, draft, hostile, report, written

from pytest_specdecode.findings import CheckResult
from pytest_specdecode.report import Report
from pytest_specdecode.report.html_page import NO_PICTURES, text

VOID = {"meta", "link", "br"}
OURS = {
    *("html", "head", "meta", "link", "title", "style", "body", "h1", "h2", "h3", "p", "br", "div", "span", "code"),
    *("table", "tr", "th", "td", "ul", "li", "details", "summary", "dl", "dt", "dd", "figure", "figcaption"),
}
DRAWINGS = {"svg", "g", "path", "text", "defs", "use", "clippath", "rect", "style", "tspan"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and holds tags to be closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.said: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


@pytest.mark.parametrize("found", [report(), report(*DRAWN), hostile()], ids=["every-status", "pictures", "hostile"])
def test_a_page_fetches_nothing_and_runs_nothing(found: Report) -> None:
    source = text(found)
    page = Reader(source)
    assert page.tags <= OURS | DRAWINGS
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("href", "src", "xlink:href", "srcset", "action"):
            assert value.startswith("#") or (tag, value) == ("link", "data:,"), (tag, name, value)
    # What is left of an address are names in the checkpoint, as text.
    styles = [value for _, name, value in page.attributes if name == "style"]
    assert not any("url(" in style and "url(#" not in style for style in styles)
    assert "@import" not in source


def test_the_policy_allows_nothing_but_styles(tmp_path: Path) -> None:
    page = Reader(written(report(), ".html", tmp_path))
    policy = next(value for _, _, value in page.attributes if value.startswith("default-src"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes


def test_every_finding_is_there_worst_first() -> None:
    source = text(report())
    found = re.findall(r"<h3>([^<]*)</h3>|<summary>.*?<code>([^<]*)</code>: ([^<]*)</summary>", source)
    assert [tuple(filter(None, item)) for item in found][:13] == [
        ("Served wrong, in silence",),
        ("rope.theta-agrees", "rope_theta is stated with different values"),
        ("Stops the server",),
        ("weights.missing", "fc.weight is missing"),
        ("Falls back to something slower",),
        ("weights.missing", "layers differ"),
        ("Errors that no engine is known to answer",),
        ("weights.missing", "a layer does not build"),
        ("Warnings",),
        ("files.pickle", "pickles lie beside the weights"),
        ("Failures that are expected",),
        ("taps.range", "rope_theta is stated with different values"),
        ("Inconclusive",),
    ]
    said = " ".join(Reader(source).said)
    for due in (
        "takes 10000",
        "SGLang 0.5.6",
        "leave the trained one",
        "two values are two drafts",
        "it is being retrained",
    ):
        assert due in said
    assert "needs the target's config.json" in said


def test_several_drafts_stand_beside_one_another() -> None:
    found = text(Report(drafts=(draft(*ALL, name="a"), draft(replace(FAILED, status="passed", findings=()), name="b"))))
    assert "<th>accepted</th>" not in found
    row = re.search(r"<tr><td><code>rope.theta-agrees</code></td>(.*?)</tr>", found)
    assert row is not None
    assert re.findall(r">(\w+)</span>", row[1]) == ["failed", "passed"]


def test_hostile_texts_are_text() -> None:
    source = text(hostile())
    said = "".join(Reader(source).said)
    assert "<script>alert(1)</script>|`x`**b**" in said
    assert "<script" not in source
    assert "could not be drawn" not in source
    assert all(line.isprintable() for line in source.splitlines())
    assert len(text(hostile("<" * (1 << 20)))) < 400_000


# --- pictures ------------------------------------------------------------------------------------------------------------


def titles(found: Report) -> list[str]:
    return re.findall(r'role="img" aria-label="([^"]*)"', text(found))


def test_every_picture_has_its_figures() -> None:
    assert titles(report(*DRAWN)) == [
        "Shape of the draft",
        "Error of the fused path against float64",
        "Weights per tensor",
        "Acceptance per drafted position",
        "RoPE frequencies, draft against target",
    ]
    assert titles(report()) == ["Shape of the draft"]
    assert titles(Report(drafts=(draft(spec=None),))) == []


@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla", "dflash", "eagle1", "medusa", "mtp"])
def test_the_shape_of_each_family_is_drawn(family: str) -> None:
    said = Reader(text(Report(drafts=(draft(family=family),)))).said
    assert "head" in said
    assert ("fc" in said) is (family in ("eagle3", "eagle3-mla", "dflash"))


def test_the_same_figures_give_the_same_bytes() -> None:
    assert text(report(*DRAWN)) == text(report(*DRAWN))
    drawn = re.findall(r"<svg.*?</svg>", text(report(*DRAWN)), flags=re.DOTALL)
    assert len(drawn) == 5
    for svg in drawn:
        assert not re.search(r"20\d\d-\d\d-\d\d|http|<metadata|<image", svg)


def test_two_drawings_share_no_name() -> None:
    source = text(Report(drafts=(draft(*DRAWN), draft(*DRAWN, name="y", path="drafts/y"))))
    drawn = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    assert len(drawn) == 10
    for svg in drawn:
        own = set(re.findall(r' id="([^"]*)"', svg))
        assert set(re.findall(r'(?:url\(#|href="#)([^")]*)', svg)) <= own
        assert not own & {id for other in drawn if other is not svg for id in re.findall(r' id="([^"]*)"', other)}


def test_pictures_have_the_colours_of_the_page() -> None:
    for svg in re.findall(r"<svg.*?</svg>", text(report(*DRAWN)), flags=re.DOTALL):
        assert "currentColor" in svg
        # Black is what SVG paints where nothing is said; white would be a light page's paper.
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {"#000000"}
        assert "fill: #000000" not in svg


ODD: list[dict[str, Any]] = [
    {},
    {"tensors": 3},
    {"tensors": {"a": None, "b": {"largest": "nan"}, "c": {"largest": 0.0}}},
    {"k_error": [], "k_eager": [[1.0]]},
    {"k_error": [["nan"]], "k_eager": [[1.0]], "v_error": [[0.0]], "v_eager": [[0.0]]},
    {"served": {"positions": [{"position": 1, "rate": "nan", "low": 0, "high": 1}]}, "every": None},
    {"served": {"positions": [{"position": 1, "rate": 0.0, "low": 0.0, "high": 0.0}]}, "accepted_length": "nan"},
    {"draft": [{"label": None, "frequencies": [0.0, -1.0]}], "target": "none"},
]


@pytest.mark.parametrize("figures", ODD)
def test_odd_figures_bring_nothing_down(figures: dict[str, Any]) -> None:
    results = [replace(item, figures=figures) for item in DRAWN]
    assert "Shape of the draft" in titles(report(*results))
    assert "Weights per tensor" not in titles(report(*results))
    assert "could not be drawn" not in text(report(*results))


def test_a_drawing_that_fails_leaves_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_specdecode.report import plots

    def broken(label: object) -> str:
        raise ZeroDivisionError("<oh>")

    monkeypatch.setattr(plots, "_size", broken)
    found = text(report(*DRAWN))
    assert "could not be drawn: ZeroDivisionError: &lt;oh&gt;" in found
    assert "Weights per tensor" in found


def test_many_layers_heads_tensors_and_positions_are_drawn() -> None:
    many = [[1e-3 * (row + column + 1) for column in range(64)] for row in range(90)]
    spread = {f"layers.{number}.mlp.down_proj.weight": {"p50": 0.1, "largest": 1.0} for number in range(300)}
    places = [{"position": place, "rate": 0.5, "low": 0.4, "high": 0.6} for place in range(1, 300)]
    found = report(
        CheckResult(id="fused-kv.matches-reference", status="passed", figures={"k_error": many, "k_eager": many}),
        CheckResult(id="weights.finite", status="passed", figures={"tensors": spread}),
        CheckResult(id="acceptance.length", status="passed", figures={"served": {"positions": places}}),
    )
    assert len(titles(found)) == 4
    assert "236 more tensors are not shown" in text(found)


def test_without_matplotlib_there_is_a_line_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    import pytest_specdecode.report as package

    monkeypatch.delitem(sys.modules, "pytest_specdecode.report.plots", raising=False)
    monkeypatch.delattr(package, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Reader(text(report(*DRAWN)))
    assert sum(said.startswith(NO_PICTURES) for said in page.said) == 1
    assert "svg" not in page.tags
