"""The report in a real browser: sorting, filtering, print, dark mode, phone, keyboard, contrast, no network."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scaling.analysis.findings import Findings
from scaling.analysis.report import build_report
from tests.conftest import missing

pytestmark = [pytest.mark.browser, pytest.mark.slow]

EVIL = '"><script>window.bad=1</script><img src=x onerror="window.bad=1"> & <b>'
AA = 4.5  # WCAG 2.1, contrast of text, level AA

# Contrast of each visible text node with the nearest opaque background, least first.
CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || element.closest("script, style, svg") || !element.getClientRects().length) continue;
    const ink = parse(getComputedStyle(element).color);
    let behind = element, paper = null;
    while (behind && !paper) {
      const color = parse(getComputedStyle(behind).backgroundColor);
      if (color.length === 3 || color[3] === 1) paper = color;
      behind = behind.parentElement;
    }
    const [a, b] = [light(ink), light(paper ?? [255, 255, 255])].sort((x, y) => y - x);
    found.push({ratio: (a + 0.05) / (b + 0.05), text: node.data.trim().slice(0, 40), tag: element.tagName});
  }
  return found.sort((x, y) => x.ratio - y.ratio).slice(0, 5);
})()
"""


def _driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chromium", Path(__file__).with_name("chromium.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = _driver()
    command = driver.find()
    if command is None:
        missing("Chromium (Debian package chromium)")
    with driver.Chromium(command, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def report(planted: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = planted.table(methods=("baseline", "mhar", EVIL))
    runs.loc[3, "val_loss"] = math.nan
    runs.loc[3, "status"] = "diverged"
    found = planted.findings(runs, planted.histories(runs.drop(index=3)))
    return build_report(runs, None, out=tmp_path_factory.mktemp("report"), findings=found, formats=())


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    opened = browser.open(report)
    yield opened
    opened.close()


def _column(page: Any, name: str) -> list[str]:
    script = f"""(() => {{
      const table = document.getElementById("table-runs");
      const at = [...table.tHead.rows[0].cells].findIndex((head) => head.textContent.startsWith({name!r}));
      return [...table.tBodies[0].rows].map((row) => row.cells[at].dataset.v ?? row.cells[at].textContent);
    }})()"""
    found = page.run(script)
    assert found, f"no column {name}"
    return list(found)


def _click_head(page: Any, name: str) -> str:
    script = f"""(() => {{
      const head = [...document.querySelectorAll("#table-runs th")].find((h) => h.textContent.startsWith({name!r}));
      head.querySelector("button").click();
      return head.getAttribute("aria-sort");
    }})()"""
    return str(page.run(script))


def test_nothing_is_requested_logged_or_thrown(page: Any) -> None:
    urls = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert [url for url in urls if not url.startswith(("file:", "data:"))] == []
    assert sum(url.startswith("file:") for url in urls) == 1
    page.run("document.querySelectorAll('th button').forEach((button) => button.click())")
    assert page.events("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled") == []
    assert page.run("window.bad === undefined && document.querySelectorAll('img').length === 0")


def test_sorting_by_a_number_puts_missing_values_last_both_ways(page: Any) -> None:
    name = "held-out loss"
    for direction, sign in (("ascending", 1), ("descending", -1)):
        assert _click_head(page, name) == direction
        shown = _column(page, name)
        assert shown[-1] == "–"
        values = [float(value) for value in shown[:-1]]
        assert values == sorted(values, key=lambda value: sign * value)


def test_sizes_are_sorted_by_their_parameters(page: Any) -> None:
    _click_head(page, "size")
    texts = "[...document.querySelectorAll('#table-runs tbody tr')].map((row) => row.cells[2].textContent)"
    assert list(dict.fromkeys(page.run(texts))) == ["0.05m", "0.158m", "0.5m", "1.58m"]


def test_filtering_shows_the_rows_that_hold_every_word(page: Any) -> None:
    assert page.run("document.getElementById('count').textContent") == "24 of 24 runs"
    page.run("document.getElementById('filter').focus()")
    page.type("MHAR 0.5m")
    assert page.run("document.getElementById('count').textContent") == "2 of 24 runs"
    shown = page.run("[...document.querySelectorAll('#table-runs tbody tr')].filter((r) => r.offsetParent).length")
    assert shown == 2
    page.run("const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input')); 0")
    assert page.run("document.getElementById('count').textContent") == "24 of 24 runs"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(page: Any, scheme: str) -> None:
    page.look(scheme=scheme)
    worst = page.run(CONTRAST)
    assert worst and worst[0]["ratio"] >= AA, worst
    dark = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 128")
    assert dark == (scheme == "dark")
    ink = page.run("getComputedStyle(document.querySelector('.plot.wide svg [style*=\"stroke: var(--ink)\"]')).stroke")
    assert (ink == "rgb(236, 236, 241)") == (scheme == "dark")


def test_a_phone_needs_no_sideways_scrolling_of_the_page(page: Any) -> None:
    page.look(width=390, height=844)
    assert page.run("document.documentElement.scrollWidth") <= 390
    wide, narrow = page.run("['wide', 'narrow'].map((k) => document.querySelector(`.plot.${k}`).offsetParent !== null)")
    assert narrow and not wide
    size = page.run("document.querySelector('.plot.narrow svg').getBoundingClientRect().width")
    assert 340 <= size <= 390
    outside = page.run(
        "[...document.querySelectorAll('p, li, h1, h2, h3, figcaption, caption span, dd, dt')]"
        ".filter((e) => e.getBoundingClientRect().right > 391).map((e) => e.textContent.slice(0, 60))"
    )
    assert outside == []


def test_print_leaves_controls_out_and_every_run_in(page: Any) -> None:
    page.look(media="print", scheme="dark")
    hidden = page.run("['.controls', 'nav', '.skip'].map((s) => getComputedStyle(document.querySelector(s)).display)")
    assert hidden == ["none"] * 3
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(254, 254, 254)"
    assert page.run("getComputedStyle(document.querySelector('.runs')).maxHeight") == "none"
    sheet = page.pdf()
    assert sheet.startswith(b"%PDF-") and sheet.count(b"/Type /Page\n") + sheet.count(b"/Type /Page ") >= 3


def test_the_keyboard_reaches_everything(page: Any) -> None:
    tab, enter = {"key": "Tab", "code": 9}, {"key": "Enter", "code": 13, "text": "\r"}
    page.press(**tab)
    assert page.run("document.activeElement.className") == "skip"
    assert page.run("document.activeElement.getBoundingClientRect().left") >= 0
    page.press(**enter)
    assert page.run("location.hash") == "#summary"
    page.run("document.querySelector('#table-runs th button').focus()")
    page.press(**enter)
    assert page.run("document.querySelector('#table-runs th').getAttribute('aria-sort')") == "ascending"
    stops = set()
    page.run("document.activeElement.blur(); document.querySelector('.skip').focus(); 0")
    for _ in range(90):
        page.press(**tab)
        stops.add(page.run("document.activeElement.tagName + '.' + document.activeElement.className"))
        outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.run("document.activeElement === document.body")
    assert {"INPUT.", "BUTTON.", "A.", "DIV.scroll runs"} <= stops


def test_it_reads_without_scripts(browser: Any, report: Path, tmp_path: Path) -> None:
    text = report.read_text(encoding="utf-8")
    bare = tmp_path / "bare.html"
    bare.write_text(text[: text.index("<script>")] + "</body></html>", encoding="utf-8")
    opened = browser.open(bare)
    assert opened.run("document.querySelectorAll('#table-runs tbody tr').length") == 24
    assert opened.run("document.querySelectorAll('th button').length") == 0
    opened.close()


def test_two_thousand_runs_open_sort_and_filter_at_once(browser: Any, planted: ModuleType, tmp_path: Path) -> None:
    runs = planted.table(sizes=8, methods=tuple(f"m{i}" for i in range(25)), seeds=10)
    found = Findings(table=runs, histories=None, baseline=None, x="flops")
    path = build_report(runs, None, out=tmp_path, findings=found, formats=())
    opened = browser.open(path)
    assert opened.load_s < 5
    click = "document.querySelectorAll('#table-runs th button')[5].click()"
    words = "f = document.getElementById('filter'); f.value = 'm7'; f.dispatchEvent(new Event('input'))"
    for action in (click, words):
        began = time.monotonic()
        opened.run(f"{action}; document.body.offsetHeight")
        assert time.monotonic() - began < 2
    assert opened.run("document.getElementById('count').textContent") == "80 of 2,000 runs"
    shown = "document.querySelectorAll('#table-runs tbody tr').length"
    opened.run("f.value = ''; f.dispatchEvent(new Event('input'))")
    assert opened.run(shown) == 250
    opened.run("document.getElementById('all').click()")
    assert opened.run(shown) == 2000
    opened.close()
