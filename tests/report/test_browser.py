"""The page in a real browser: every plot has its marks, nothing errors, nothing is asked of a network."""

import json
import re

import pytest

from gva.cli import main
from gva.report.style import label
from report.chromium import BROWSER, Page
from report.test_page import DECODE, full, panels, read
from study.folders import write_run

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
DRAWN = "document.documentElement?.dataset.drawn > 0"
# For each plot: its traces, and the size of what they were drawn into.
MARKS = """Object.fromEntries([...document.querySelectorAll("[data-plot]")].map((card) => {
  const box = card.querySelector(".plot .plot-container .main-svg").getBoundingClientRect();
  const shown = [...card.querySelectorAll(".scatterlayer .trace")].filter((trace) => {
    const parts = [...trace.querySelectorAll(".js-line, .point")];
    return parts.some((part) => { const b = part.getBoundingClientRect(); return b.width + b.height > 0; });
  });
  return [card.dataset.plot, { traces: shown.length, width: box.width, height: box.height }];
}))"""

__all__ = ["full"]


@pytest.fixture
def opened(full, tmp_path_factory):
    assert main(["report", str(full), "--decode-csv", str(DECODE)]) == 0
    html = read(full / "report")
    with Page(full / "report" / "index.html", tmp_path_factory.mktemp("profile")) as page:
        page.wait(DRAWN)
        yield page, html


def expected(html):
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, flags=re.S)[1])
    return {name: len(plot["figure"]["data"]) for name, plot in data["plots"].items()}


def test_every_plot_is_drawn_in_both_themes_and_nothing_errs(opened):
    page, html = opened
    wanted = expected(html)
    assert sorted(wanted) == sorted(panels(html))

    def check():
        for name, found in page.value(MARKS).items():
            assert found["traces"] == wanted[name], name
            assert found["width"] > 200, name
            assert found["height"] > 150, name

    check()
    ink = page.value("getComputedStyle(document.body).color")
    tick = page.value("getComputedStyle(document.querySelector('.xtick text')).fill")
    page.value("document.getElementById('theme').click()")
    page.wait(f"getComputedStyle(document.querySelector('.xtick text')).fill !== {json.dumps(tick)}")
    assert page.value("getComputedStyle(document.body).color") != ink
    check()
    assert page.errors == []
    assert [address.split(":")[0] for address in page.requests] == ["file"], "the page itself, and nothing else"


def test_a_row_is_hidden_everywhere_and_the_whole_run_can_be_seen(opened):
    page, _ = opened
    before = page.value(MARKS)
    page.value("document.querySelector('.entry[data-row=shared-kv] .shown').click()")
    page.wait("document.querySelectorAll('[data-plot=pareto] .scatterlayer .trace').length === 4")
    page.wait("document.querySelectorAll('[data-plot=positions] .scatterlayer .trace').length === 4")
    parts = "[...document.querySelectorAll('tr[data-row=shared-kv], .bar[data-row=shared-kv]')]"
    assert page.value(f"{parts}.length > 3 && {parts}.every((part) => part.getBoundingClientRect().height === 0)")
    page.value("document.querySelector('.entry[data-row=shared-kv] .shown').click()")
    page.wait("document.querySelectorAll('[data-plot=positions] .scatterlayer .trace').length === 8")
    assert page.value(MARKS) == before
    ticks = "[...document.querySelectorAll('[data-plot=training-loss] .ytick text')]"
    top = f"Math.max(...{ticks}.map((tick) => +tick.textContent))"
    zoomed = page.value(top)
    page.value("document.querySelector('[data-plot=training-loss] [data-view=\"2\"]').click()")
    page.wait(f"{top} > {zoomed}")
    assert page.errors == []


def test_it_fits_a_narrow_window(opened):
    page, _ = opened
    page.size(390, 800)
    page.wait("document.documentElement.scrollWidth <= 390")
    page.value("document.querySelector('.legend').open = true")
    assert page.value("document.documentElement.scrollWidth") <= 390
    widths = page.value("[...document.querySelectorAll('.plot .main-svg')].map((s) => s.getBoundingClientRect().width)")
    assert 200 < min(widths) <= max(widths) < 390
    tables = "[...document.querySelectorAll('.scroll')].map((part) => part.scrollWidth - part.clientWidth)"
    assert set(page.value(tables)) == {0}, "no column has to be looked for sideways"
    assert page.errors == []


def test_plots_outlive_a_moment_in_which_the_page_is_narrow(opened):
    """As it is while a picture of it is taken, or it is printed: the window says so, with the width it always had."""
    page, _ = opened
    before = page.value(MARKS)
    page.value("document.body.style.width = '40px', dispatchEvent(new Event('resize')), true")
    page.value("new Promise((done) => setTimeout(done, 600)).then(() => { document.body.style.width = '' })")
    assert page.value(MARKS) == before


# For each plot the names that are drawn, whether one leaves the picture or stands on another, and the list below it.
NAMES = """Object.fromEntries([...document.querySelectorAll("[data-plot]")].map((card) => {
  const box = card.querySelector(".main-svg").getBoundingClientRect();
  const place = (text) => [text.textContent, text.getBoundingClientRect()];
  const drawn = [...card.querySelectorAll(".annotation-text")].map(place);
  const within = (b) => b.left >= box.left && b.right <= box.right + 1 && b.top >= box.top && b.bottom <= box.bottom;
  const out = drawn.filter(([, b]) => !within(b));
  const on = (a, b) => a.left < b.right && b.left < a.right && a.top + 4 < b.bottom && b.top + 4 < a.bottom;
  const two = drawn.filter(([, a], i) => drawn.some(([, b], j) => j < i && on(a, b)));
  const listed = [...card.querySelectorAll(".key span")].map((entry) => entry.textContent);
  return [card.dataset.plot, { names: drawn.map(([text]) => text), out, two, listed }];
}))"""
MANY = ["gqa", *(f"gva-drope-16-number-{i}-of-a-long-list" for i in range(19))]


@pytest.fixture
def twenty(tmp_path):
    for i, name in enumerate(MANY):
        fields = {"map_lr": 2.0**i} if i else {}
        write_run(tmp_path, name, 0, 4 + i / 500, variant="gva-drope-16" if i else "gqa", fields=fields)
    assert main(["report", str(tmp_path)]) == 0
    return tmp_path / "report" / "index.html"


def test_no_name_of_twenty_rows_is_cut_or_lost_on_a_desk_or_a_phone(twenty, tmp_path_factory):
    labels = {label(name) for name in MANY}
    with Page(twenty, tmp_path_factory.mktemp("profile")) as page:
        page.wait(DRAWN)
        wide = page.value(NAMES)
        assert labels <= set(wide["valid-loss"]["names"])
        assert labels <= set(wide["pareto"]["names"])
        assert not any(found["out"] or found["two"] for found in wide.values())
        seen = (
            "[...document.querySelectorAll('[data-plot=valid-loss] .trace')].map((t) => +getComputedStyle(t).opacity)"
        )
        strong = f"{seen}.filter((opacity) => opacity === 1).length"
        assert page.value(strong) == 2, "the baseline and the row that the headline is about"
        page.value("document.querySelectorAll('.pick')[7].click()")
        page.wait(f"Math.min(...{seen}) < 0.4")
        assert page.value(strong) == 2, "the baseline and the row that was picked"
        page.size(390, 800)
        page.wait("document.querySelectorAll('[data-plot=positions] .key span').length === 19")
        narrow = page.value(NAMES)
        for name in ("valid-loss", "training-loss", "pareto"):
            assert {entry.partition(" ")[2] for entry in narrow[name]["listed"]} == labels
            assert {entry.partition(" ")[0] for entry in narrow[name]["listed"]} <= set(narrow[name]["names"])
        assert not any(found["out"] or found["two"] for found in narrow.values())
        assert page.errors == []
    with Page(twenty, tmp_path_factory.mktemp("profile"), width=390) as page:
        page.wait(DRAWN)
        assert page.value("document.querySelector('.legend').open") is False
        assert page.value("[...document.querySelectorAll('.entry')].length") == 20
