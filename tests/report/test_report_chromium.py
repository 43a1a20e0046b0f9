"""The HTML report in a real browser.

What these catch: an error or a refused style in the browser's console; a request to anywhere; findings that do not unfold; a page or a
drawing that is blank, that is as light on a dark screen, or that has to be scrolled sideways on a phone.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket
from PIL import Image
from report_samples import ALL, DRAWN, draft, hostile, report, written

from pytest_specdecode.report import Report, compare, read_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")

PHONE = 360


class Page:
    """One tab, driven by the browser's own protocol."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            found = json.loads(self._socket.recv())
            if found.get("id") != number:
                self.events.append(found)
                continue
            assert "error" not in found, found
            result: dict[str, Any] = found["result"]
            return result

    def open(self, file: Path, width: int = 1000, scheme: str = "light") -> None:
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width == PHONE
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=file.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self._socket.recv()))

    def ask(self, expression: str) -> Any:
        # The page's own policy forbids scripts; the protocol is not the page's.
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def complaints(self) -> list[Any]:
        self.ask("1")
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def picture(self) -> Image.Image:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")

    def click(self, selector: str) -> None:
        box = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView();"
            "const b = e.getBoundingClientRect(); return [b.x + 20, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert BROWSER is not None
    profile = tmp_path_factory.mktemp("profile")
    command = [
        *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
        *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={profile}"),
        "about:blank",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready = profile / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not (ready.exists() and ready.read_text().count("\n") >= 1):
            assert process.poll() is None, "the browser ended at once"
            assert time.monotonic() < until, "the browser does not start"
            time.sleep(0.05)
        port = ready.read_text().split("\n")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            targets = json.load(answer)
        tab = Page(next(item["webSocketDebuggerUrl"] for item in targets if item["type"] == "page"))
        yield tab
        tab.close()
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages: all pictures and every kind of finding; several drafts against an older report; hostile names; a very long one."""
    folder = tmp_path_factory.mktemp("pages")
    older = folder / "old.json"
    Report(drafts=(draft(*DRAWN), draft(name="y"))).write(older)
    drafts = (draft(*ALL), draft(*DRAWN, name="y" * 60, path="drafts/y"), draft(name="z", spec=None))
    reports = {
        "whole": report(*ALL, *DRAWN),
        "several": Report(drafts=drafts, comparison=compare(read_report(older), drafts)),
        "hostile": hostile(),
        "long": hostile("x" * (1 << 20)),
    }
    found = {}
    for name, item in reports.items():
        written(item, ".html", folder)
        found[name] = (folder / "report.html").rename(folder / f"{name}.html")
    return found


NAMES = ("whole", "several", "hostile", "long")


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_without_a_word_and_without_a_request(page: Page, files: dict[str, Path], name: str) -> None:
    page.open(files[name])
    assert page.complaints() == []
    assert [url for url in page.requests() if not url.startswith("data:")] == [files[name].as_uri()]
    assert page.ask("document.scripts.length") == 0
    assert page.ask("document.querySelectorAll('h2').length") >= 1


def test_a_wrong_page_is_found_out(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "wrong.html"
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
    file.write_text(f"<!DOCTYPE html>{policy}<script>1</script><div style='width: 900px'>x</div>")
    page.open(file, width=PHONE)
    assert page.complaints()


def test_findings_unfold(page: Page, files: dict[str, Path]) -> None:
    page.open(files["whole"])
    state = """(() => { const e = document.querySelector('details.finding');
        return [e.open, e.querySelector('dl').checkVisibility()]; })()"""
    assert page.ask(state) == [False, False]
    page.click("details.finding > summary")
    assert page.ask(state) == [True, True]
    assert "takes 10000" in page.ask("document.querySelector('details.finding').innerText")
    page.click("details.finding > summary")
    assert page.ask(state) == [False, False]


@pytest.mark.parametrize("name", NAMES)
def test_a_phone_need_not_be_scrolled_sideways(page: Page, files: dict[str, Path], name: str) -> None:
    page.open(files[name], width=PHONE)
    page.ask("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert page.ask("innerWidth") == PHONE
    assert page.ask("document.documentElement.scrollWidth") <= PHONE
    wide = "[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect()).filter(b => b.right > 360 || b.width < 200).length"
    assert page.ask(wide) == 0
    small = "[...document.querySelectorAll('svg text')].filter(e => e.getBoundingClientRect().height < 6).length"
    assert page.ask(small) == 0


def test_pictures_are_drawn_and_none_is_cut(page: Page, files: dict[str, Path]) -> None:
    page.open(files["whole"])
    assert page.ask("document.querySelectorAll('figure svg').length") == 5
    outside = """[...document.querySelectorAll('figure svg')].map(svg => { const s = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(t => { const b = t.getBoundingClientRect();
        return b.left < s.left - 2 || b.right > s.right + 2 || b.top < s.top - 2 || b.bottom > s.bottom + 2; })
        .map(t => t.textContent); })"""
    assert page.ask(outside) == [[]] * 5


def lightness(image: Image.Image) -> float:
    """Of the paper: the middle of all pixels' lightness, 0 to 255."""
    histogram = image.convert("L").histogram()
    half, total = sum(histogram) / 2, 0
    for value, number in enumerate(histogram):
        total += number
        if total >= half:
            return value
    raise AssertionError("an empty picture")


@pytest.mark.parametrize("width", [PHONE, 1000])
def test_it_is_dark_on_a_dark_screen_and_never_blank(page: Page, files: dict[str, Path], width: int) -> None:
    found = {}
    color = "getComputedStyle(document.querySelector('figure svg text')).fill"
    line = "getComputedStyle(document.querySelectorAll('figure svg')[3].querySelector('path[style*=accent]')).stroke"
    for scheme in ("light", "dark"):
        page.open(files["whole"], width=width, scheme=scheme)
        image = page.picture()
        assert len(image.getcolors(1 << 24) or []) > 50
        found[scheme] = (lightness(image), page.ask(color), page.ask(line))
    assert found["light"][0] > 230
    assert found["dark"][0] < 40
    assert (found["light"][1], found["dark"][1]) == ("rgb(27, 31, 36)", "rgb(228, 233, 238)")
    assert (found["light"][2], found["dark"][2]) == ("rgb(11, 98, 196)", "rgb(108, 176, 255)")
