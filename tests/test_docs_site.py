"""The documentation as a site, and every link in it.

What goes wrong without this file: a page that no other leads to; a link to a heading that was renamed; a relative link that works in the
repository and not on the site, or the other way round; a configuration that the generator warns about and builds wrong.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *sorted(ROOT.glob("examples/*/README.md"))]

needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("myst_parser") is None,
    reason="the generator is not installed: pip install 'pytest-specdecode[docs]'",
)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """The site of `source`, a warning being an error."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", str(source), str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


class Page(HTMLParser):
    """The links of a page and the places that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.places.add(str(found["id"]))
        for name in ("href", "src"):
            if found.get(name):
                self.links.append(str(found[name]))


def broken(folder: Path) -> Iterator[str]:
    """The links of a site that lead nowhere in it, and what it fetches from elsewhere to be shown."""
    pages = {path: Page(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            if not target.exists():
                yield f"{path.name}: {link}: there is no such file"
            elif anchor and target in pages and anchor not in pages[target].places:
                yield f"{path.name}: {link}: there is no such place"


@needs_sphinx
def test_the_site_builds_without_a_warning_and_its_links_hold(tmp_path: Path) -> None:
    """Every page is there, and can be reached from the index."""
    done = build(DOCS, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert list(broken(tmp_path / "site")) == []
    linked = {link.partition("#")[0] for link in Page(tmp_path / "site" / "index.html").links}
    assert {f"{page.stem}.html" for page in PAGES} - {"index.html"} <= linked
    text = (tmp_path / "site" / "contributing.html").read_text(encoding="utf-8")
    assert "Add a family" in text, "CONTRIBUTING.md is not in the site"


@needs_sphinx
@pytest.mark.parametrize(
    ("page", "text", "says"),
    [
        ("start.md", "[away](nowhere.md)", "nowhere.md"),
        ("start.md", "[away](checks.md#no-such-check)", "no-such-check"),
        ("lost.md", "# Lost\n", "toctree"),
    ],
    ids=["a page that is not there", "a heading that is not there", "a page that nobody links"],
)
def test_a_broken_link_stops_the_build(tmp_path: Path, page: str, text: str, says: str) -> None:
    """So that the test above can fail."""
    source = tmp_path / "docs"
    source.mkdir()
    for name in ("conf.py", "checks.md", "start.md"):
        shutil.copy(DOCS / name, source)
    (source / "start.md").write_text("# Start\n", encoding="utf-8")
    (source / "index.md").write_text("# Index\n\n```{toctree}\nstart\nchecks\n```\n", encoding="utf-8")
    with (source / page).open("a", encoding="utf-8") as file:
        file.write(f"\n{text}\n")
    done = build(source, tmp_path / "site")
    assert done.returncode == 1
    assert says in done.stderr


# --- without the generator ----------------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#{1,4} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    """To a file of the repository, and to a heading in it."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^()\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{link}: there is no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: there is no such heading"


def test_every_page_is_in_the_index() -> None:
    """And in its list of pages, by which the site is ordered."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^[\w-]+$", "".join(re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)), re.MULTILINE
    )
    names = {page.stem for page in PAGES} - {"index"}
    assert sorted(listed) == sorted(names)
    assert set(re.findall(r"\]\(([\w-]+)\.md\)", text)) == names
