"""The report in a real browser: it draws, asks the network for nothing, and says nothing on the console."""

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from blocktable.curves import POINTS
from blocktable.study import Cell, Record, Source, grid, mark_front, run_cell

pytest.importorskip("plotly", reason="plotly is not installed: extra `report`")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: the report is not seen by a browser")

TALL = {"width": 1200, "height": 20_000}  # what is near the screen is drawn, so this one shows everything
WATCH = """
window.came = [];
new MutationObserver(() => {
  for (const one of [".sketch", ".cartesianlayer"]) {
    if (!came.includes(one) && document.querySelector(one)) came.push(one);
  }
}).observe(document, { childList: true, subtree: true });
"""
PATIENCE = 60_000  # milliseconds that a busy machine may take to draw


@pytest.fixture(scope="module")
def records() -> list[Record]:
    cells = grid(block_size=[16, 64], num_blocks=[None], pool_tokens=[8192, 16384], backends=[("FLASHINFER_MLA",)])
    found = [run_cell(cell, Source(limit=10)) for cell in cells]
    mark_front(found)
    return found


def page(records: list[Record], source: str = "traffic") -> str:
    from blocktable.report import page as made

    return made(records, source)


class Seen:
    """What a browser made of a page, once so many figures were drawn: their number, its console, what it asked for."""

    def __init__(self, browser: Any, html: str, folder: Path, drawn: int, viewport: Any = TALL, **how: Any) -> None:
        file = folder / "page.html"
        file.write_text(html, encoding="utf-8")
        page = browser.new_page(viewport=viewport, **how)
        self.console: list[str] = []
        self.asked: set[str] = set()
        page.add_init_script(WATCH)
        page.on("console", lambda message: self.console.append(message.text))
        page.on("pageerror", lambda error: self.console.append(str(error)))
        page.on("request", lambda request: self.asked.add(request.url))
        page.goto(file.as_uri())
        layers = page.locator(".cartesianlayer")  # one per figure
        layers.nth(drawn - 1).wait_for(state="attached", timeout=PATIENCE)  # without eval, which the page forbids
        page.wait_for_timeout(500)  # for what would come without being waited for
        self.drawn = layers.count()
        self.came, self.left = page.evaluate("[window.came, document.querySelectorAll('.sketch').length]")
        self.asked = {url for url in self.asked if not url.startswith(("file:", "data:", "blob:"))}
        page.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without its own calls home."""
    sync = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: no browser looks at the report"
    )

    with sync.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


PHONE = {"viewport": {"width": 390, "height": 20_000}, "color_scheme": "dark"}


@in_browser
@pytest.mark.parametrize("how", [{}, PHONE], ids=["screen", "dark phone"])
def test_every_figure_is_drawn_without_network_or_complaint(
    browser: Any, records: list[Record], tmp_path: Path, how: dict[str, Any]
) -> None:
    html = page(records)
    figures = html.count('class="figure"')
    seen = Seen(browser, html, tmp_path, figures, **how)
    assert seen.console == []
    assert seen.asked == set()
    assert seen.drawn == figures >= 8


@in_browser
def test_the_page_of_one_run_is_drawn_too(browser: Any, tmp_path: Path) -> None:
    record = run_cell(Cell(block_size=16, max_model_len=4096), Source(limit=20))
    mark_front([record])
    html = page([record])
    assert Seen(browser, html, tmp_path, html.count('class="figure"')).console == []


@in_browser
def test_a_small_screen_does_not_wait_for_what_is_far_below_it(
    browser: Any, records: list[Record], tmp_path: Path
) -> None:
    html = page(records)
    seen = Seen(browser, html, tmp_path, 1, {"width": 390, "height": 600})
    assert seen.console == []
    assert 1 <= seen.drawn < html.count('class="figure"')


@in_browser
def test_nobody_waits_for_plotly_to_be_read(browser: Any, records: list[Record], tmp_path: Path) -> None:
    """Its script takes seconds of processor time; until it is read the figures are there as lines."""
    seen = Seen(browser, page(records), tmp_path, 2)
    assert seen.came == [".sketch", ".cartesianlayer"]
    assert seen.left == 0


@in_browser
def test_the_browser_would_notice(browser: Any, records: list[Record], tmp_path: Path) -> None:
    """A request, a message and an error are seen by the same eyes."""
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page(records))
    fault = (
        '<img src="http://127.0.0.1:9/x.png"><script>console.log("hello"); throw new Error("broken")</script></body>'
    )
    seen = Seen(browser, open_page.replace("</body>", fault), tmp_path, 1)
    assert any("hello" in line for line in seen.console)
    assert any("broken" in line for line in seen.console)
    assert seen.asked == {"http://127.0.0.1:9/x.png"}


class Tables(HTMLParser):
    """The tables of a page, as lists of rows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._inside = False
        self.feed(re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        self._inside = tag in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.tables[-1][-1].append(data)
        self._inside = False


def figures(html: str) -> Any:
    return json.loads(re.search(r"const figures = (.*);\n", html)[1].replace("\\u003c", "<"))  # type: ignore[index]


def test_every_figure_is_a_table_too_and_the_cells_are_compared(records: list[Record]) -> None:
    html = page(records)
    comparison, *tables = Tables(html).tables
    assert len(tables) == html.count('class="figure"')
    assert len(comparison) == 1 + len(records)
    assert [row[1] for row in comparison[1:]] == ["refused", "refused", "accepted", "accepted"]
    assert all("kernel block" in row[-1] for row in comparison[1:3])
    assert [row[0].startswith("★") for row in comparison[1:]] == [record["front"] for record in records]
    (held,) = [table for table in tables if table[0][-3:] == ["least", "mean", "most"] and table[1][-1] != "0"][:1]
    peak = {record["num_blocks"]: record["peak"] for record in records[2:]}
    assert max(float(row[-1]) for row in held[1:]) == pytest.approx(max(peak.values()), abs=1e-3)


def test_one_run_shows_its_blocks_and_says_what_a_point_stands_for() -> None:
    record = run_cell(Cell(block_size=16, max_model_len=4096), Source(limit=60))
    mark_front([record])
    html = page([record], "A <trace> & more")
    steps = record["curves"]["steps_per_point"]
    assert steps > 1
    assert f"each point of a curve stands for up to {steps:,} steps, the line is their mean" in html
    assert "One pool under A &lt;trace&gt; &amp; more" in html
    blocks = Tables(html).tables[1]
    assert blocks[0][:5] == ["step", "seconds", "held, least", "held, mean", "held, most"]
    assert max(int(row[4]) for row in blocks[1:]) == record["peak_blocks"]
    assert len(blocks) - 1 <= POINTS < record["steps"]
    assert max(len(trace["x"]) for figure in figures(html) for trace in figure["traces"]) <= POINTS


def test_a_study_in_which_nothing_could_run_is_a_page_all_the_same() -> None:
    record = run_cell(Cell(block_size=48, max_model_len=4096, backends=("FLASHINFER_MLA",)), Source(limit=5))
    mark_front([record])
    html = page([record])
    assert "No cell could run." in html
    assert "no kernel block divides 48" in html
    assert '<div class="figure"' not in html


def test_no_text_of_a_trace_ends_the_script(records: list[Record]) -> None:
    data = page(records, "</script><script>alert(1)</script>")
    assert "<script>alert" not in data
    assert figures(data)
