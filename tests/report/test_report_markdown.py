"""The Markdown report.

What these catch: a summary that grows with the findings; the worst finding below milder ones; a table that a `|` breaks; a link, an image,
a mention, a tag or emphasis made of a tensor's name; a name of a megabyte.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_samples import ALL, BARE, FAILED, HOSTILE, UNSURE, draft, hostile, measured, report, written

from pytest_specdecode.errors import printable
from pytest_specdecode.report import Report, compare, read_report
from pytest_specdecode.report.markdown import LINE_LIMIT, escape, text

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def test_a_draft_by_hand(tmp_path: Path) -> None:
    assert written(report(), ".md", tmp_path).split("\n") == [
        "## Draft model x: failed",
        "",
        "| draft | family | status | failed | warned | inconclusive | passed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| x | eagle3 | failed | 2 | 1 | 1 | 1 |",
        "",
        "|  | check | finding | where | fix |",
        "| --- | --- | --- | --- | --- |",
        "| serves wrong | rope.theta-agrees | rope\\_theta is stated with different values "
        "| config.json: rope\\_parameters.rope\\_theta, rope\\_theta | leave the trained one |",
        "| stops | weights.missing | fc.weight is missing | fc.weight |  |",
        "| falls back | weights.missing | layers differ | layer 1 |  |",
        "| error | weights.missing | a layer does not build | layers.0 |  |",
        "| warning | files.pickle | pickles lie beside the weights |  |  |",
        "| expected | taps.range | rope\\_theta is stated with different values "
        "| config.json: rope\\_parameters.rope\\_theta, rope\\_theta | leave the trained one |",
        "",
        "- inconclusive target.widths: needs the target's config.json",
        "",
    ]


def test_of_many_drafts_the_worst_are_shown() -> None:
    drafts = (*(draft(name=f"good{number}") for number in range(12)), draft(FAILED, name="bad"))
    rows = [line.split(" | ")[0] for line in text(Report(drafts=drafts)).splitlines() if line.startswith("| ")]
    assert rows[:4] == ["| draft", "| ---", "| bad", "| good0"]
    assert rows[11] == "| good8"
    assert "and 3 more drafts" in text(Report(drafts=drafts))


def test_drafts_that_no_older_report_has_are_not_unchanged(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    Report(drafts=(draft(name="a"), draft(name="b"))).write(old)
    drafts = (draft(name="c"), draft(name="d"))
    page = text(Report(drafts=drafts, comparison=compare(read_report(old), drafts)))
    assert "- not in the older report: c, d\n- only in the older report: a, b\n" in page
    assert "nothing changed" not in page


def test_the_worst_stands_first_in_whatever_order_checks_run() -> None:
    found = text(Report(drafts=(draft(*reversed(ALL)),)))
    groups = re.findall(r"^\| (serves wrong|stops|falls back|error|warning|expected) \|", found, flags=re.MULTILINE)
    assert groups == ["serves wrong", "stops", "falls back", "error", "warning", "expected"]


def test_several_drafts_are_one_table() -> None:
    found = text(Report(drafts=(draft(*ALL, name="a"), draft(measured([0.5, 0.25]), name="b"))))
    assert found.startswith("## 2 draft models: 1 failed\n")
    assert "| draft | family | status | failed | warned | inconclusive | passed | accepted |" in found
    assert "| a | eagle3 | failed | 2 | 1 | 1 | 1 |  |" in found
    assert "| b | eagle3 | passed | 0 | 0 | 0 | 1 | 1.75 |" in found
    assert "| serves wrong | a | rope.theta-agrees |" in found


@pytest.mark.parametrize("drafts", [1, 3, 40])
@pytest.mark.parametrize("findings", [0, 1, 17, 400])
@pytest.mark.parametrize("reasons", [0, 3, 60])
def test_it_is_short_whatever_is_found(drafts: int, findings: int, reasons: int, tmp_path: Path) -> None:
    many = replace(FAILED, findings=tuple(replace(BARE, message=f"finding {number}") for number in range(findings)))
    unsure = [replace(UNSURE, id=f"a.b{number}", message=f"reason {number}") for number in range(reasons)]
    whole = tuple(draft(many, *unsure, name=f"draft {number}") for number in range(drafts))
    older = tmp_path / "old.json"
    Report(drafts=(*(replace(item, results=()) for item in whole), draft(name="left"))).write(older)
    found = text(Report(drafts=whole, comparison=compare(read_report(older), whole)))
    assert found.count("\n") < LINE_LIMIT
    shown = len(re.findall(r"^\| error \|", found, flags=re.MULTILINE))
    if findings:
        assert shown >= min(findings, 10)
        left = findings * drafts - shown
        assert (f"and {left} more finding" in found) is (left > 0)


def tokens(source: str) -> set[str]:
    """Kinds of all tokens that the text is made of."""
    found: set[str] = set()
    for token in READER.parse(source):
        found |= {token.type, *(child.type for child in token.children or [])}
    return found


def test_hostile_names_are_text_and_nothing_else() -> None:
    found = text(hostile())
    assert tokens(found) <= {
        *("heading_open", "heading_close", "inline", "text", "text_special", "paragraph_open", "paragraph_close"),
        *("table_open", "table_close", "thead_open", "thead_close", "tbody_open", "tbody_close", "tr_open", "tr_close"),
        *("th_open", "th_close", "td_open", "td_close", "bullet_list_open", "bullet_list_close"),
        *("list_item_open", "list_item_close"),
    }
    assert all(line.isprintable() for line in found.splitlines())
    assert "@someone" not in found
    assert "http://" not in found
    assert "www.evil" not in found
    html = READER.render(found)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;|`x`**b**[l](http://evil.test)" in html
    assert all(len(row) == 6 for row in rows(found)[4:] if row[0] in ("stops", "expected"))


def rows(source: str) -> list[list[str]]:
    """The cells of every row of every table."""
    found: list[list[str]] = []
    inside = False
    for token in READER.parse(source):
        if token.type == "tr_open":
            found.append([])
        inside = token.type in ("td_open", "th_open") or (inside and token.type == "inline")
        if token.type == "inline" and inside:
            found[-1].append(token.content)
    return found


@settings(deadline=None, max_examples=300, derandomize=True)
@given(name=st.text(max_size=60) | st.text(st.sampled_from("|`*_[]()<>!#&;@:/.\\~$ aw"), max_size=40))
def test_an_escaped_text_reads_as_it_was(name: str) -> None:
    source = f"| a |\n| --- |\n| .{escape(name)}. |\n"
    inline = [token for token in READER.parse(source) if token.type == "inline"]
    assert len(inline) == 2
    assert {child.type for child in inline[1].children or []} <= {"text", "text_special"}
    read = "".join(child.content for child in inline[1].children or [])
    assert read == f".{printable(name)}."


def test_long_names_are_cut() -> None:
    found = text(hostile("x" * (1 << 20)))
    assert max(map(len, found.splitlines())) < 2000
    assert len(escape(HOSTILE, 10)) < 80
