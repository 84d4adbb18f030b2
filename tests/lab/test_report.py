"""The report: what a page says, and what becomes of it in a real browser."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparsync_lab.report import (
    Bar,
    BarChart,
    Curve,
    Figure,
    LineChart,
    Page,
    Row,
    Table,
    Text,
    mean_and_std_text,
    png,
    render,
    times,
    write,
    write_csv,
)
from sparsync_lab.report.plots import _figure, svg

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",  # as on a phone, where they take no room
]
WIDTHS = (1200, 360)
NAMES = ["dense", "a <b>&amp; name", "random+shared 1 %", "$x$", "topk+gtopk 0.1 %"]
STEPS = list(range(0, 101, 10))


def curves() -> list[Curve]:
    made = []
    for i, name in enumerate(NAMES):
        y = [90 - i - 80 * 0.95**step for step in STEPS]
        made.append(Curve(name, STEPS, y, [v - 1 for v in y], [v + 1 for v in y]))
    return made


def page() -> Page:
    cells = ["97.3 ± 0.2 %", "1,234,567", "21.6 ×", "1.61 %", "31.9 ms"]
    rows = [Row([name, *cells], "misses dense by 2.0 points" if i == 1 else "") for i, name in enumerate(NAMES)]
    headings = ["method", "test accuracy", "bytes sent per step", "less than dense", "density", "step time"]
    return Page(
        "Sent & learned",
        ["An introduction.", "It has a word that is " + "very" * 40 + "long."],
        [
            Table("What each method sends", headings, rows, ["± is a standard deviation."]),
            Figure(LineChart("Accuracy", "steps", curves(), y_unit="%"), "Over steps."),
            Figure(LineChart("Accuracy", "bytes", curves(), y_unit="%", log_x=True, x_unit="B"), "Over bytes."),
            Figure(BarChart("Bytes", "bytes", [Bar(name, 10.0**i, f"{i}") for i, name in enumerate(NAMES)]), "Bars."),
            Text("Closing", ["The last words."]),
        ],
        {"device": "a machine", "commit": "", "date": "2026-11-15"},
    )


def chromium(folder: Path, *arguments: str) -> str:
    """What a fresh browser prints."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


MEASURE = """
window.onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const boxes = (what) => [...page.querySelectorAll(what)].map(element => {
      const box = element.getBoundingClientRect();
      return {text: element.innerText || element.textContent, width: box.width, height: box.height, left: box.left,
              right: box.right, top: box.top, size: parseFloat(frame.contentWindow.getComputedStyle(element).fontSize)};
    });
    return {
      width: root.clientWidth, scroll_width: root.scrollWidth, loaded: frame.contentWindow.performance
        .getEntriesByType("resource").map(entry => entry.name),
      charts: boxes("svg.chart"), words: boxes("svg.chart text"), rows: boxes("tbody tr"),
      cells: boxes("tbody th, tbody td"),
      warnings: boxes(".warning"), texts: boxes("h1, h2, p, dd, caption"),
      scroller: ["scrollWidth", "clientWidth"].map(width => page.querySelector(".scroll")[width])
    };
  });
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
};
"""


@pytest.fixture(scope="module")
def rendered() -> str:
    return render(page())


@pytest.fixture(scope="module")
def opened(rendered: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The page as laid out by a browser in windows of two widths."""
    folder = tmp_path_factory.mktemp("opened")
    # The page forbids itself to load anything; without that, what it would load is seen.
    text = re.sub(r"<meta http-equiv=[^>]*>", "", rendered)
    frames = [
        f'<iframe style="width:{w}px;height:900px;border:0" srcdoc="{html.escape(text)}"></iframe>' for w in WIDTHS
    ]
    (folder / "frames.html").write_text(f"<!doctype html><script>{MEASURE}</script>{''.join(frames)}", encoding="utf-8")
    dumped = chromium(folder, "--dump-dom", (folder / "frames.html").as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', dumped, re.DOTALL)
    assert found, dumped[-2000:]
    return dict(zip(WIDTHS, json.loads(html.unescape(found.group(1))), strict=True))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_everything(opened: dict[int, dict[str, Any]], width: int) -> None:
    seen = opened[width]
    assert seen["width"] == width
    assert len(seen["charts"]) == 3
    for chart in seen["charts"]:
        assert chart["width"] > 0.4 * min(width, 700)
        assert chart["height"] > 200
        assert chart["left"] >= 0
        assert chart["right"] <= width
    assert [row["text"].split("\n")[0].split("\t")[0] for row in seen["rows"]] == NAMES
    assert all(row["height"] > 15 for row in seen["rows"])
    assert [warning["text"] for warning in seen["warnings"]] == ["misses dense by 2.0 points"]
    texts = [text["text"] for text in seen["texts"]]
    for said in (
        "Sent & learned",
        "An introduction.",
        "± is a standard deviation.",
        "Closing",
        "The last words.",
        "a machine",
    ):
        assert said in texts
    assert "What each method sends" in texts
    for word in seen["words"]:
        assert any(box["left"] <= word["left"] < word["right"] <= box["right"] for box in seen["charts"]), word
    words = [word["text"] for word in seen["words"]]
    for name in NAMES:
        assert words.count(name) == 3, name  # two legends and a bar


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_does_not_scroll_sideways_and_loads_nothing(opened: dict[int, dict[str, Any]], width: int) -> None:
    seen = opened[width]
    assert seen["scroll_width"] <= seen["width"]
    assert seen["loaded"] == []


def test_on_a_phone_all_of_the_table_is_seen_and_charts_stay_readable(opened: dict[int, dict[str, Any]]) -> None:
    wide, visible = opened[360]["scroller"]
    assert wide == visible > 300
    lines = opened[360]["rows"][0]["text"].splitlines()
    assert [line.strip() for line in lines if line.strip()] == [NAMES[0], *page().sections[0].rows[0].cells[1:]]  # type: ignore[union-attr]
    assert all(0 <= cell["left"] < cell["right"] <= 360 for cell in opened[360]["cells"])
    chart = opened[360]["charts"][0]
    assert chart["width"] > 320
    # A chart is 324 points wide; its text is scaled with it.
    assert min(word["size"] for word in opened[360]["words"]) * chart["width"] / 324 >= 10
    assert opened[1200]["scroller"][0] == opened[1200]["scroller"][1]


def test_charts_stand_side_by_side_where_there_is_room(opened: dict[int, dict[str, Any]]) -> None:
    first, second, _ = opened[1200]["charts"]
    assert first["top"] == second["top"]
    assert first["right"] <= second["left"]
    first, second, _ = opened[360]["charts"]
    assert first["left"] == second["left"]


def test_a_page_prints(tmp_path: Path) -> None:
    write(page(), tmp_path / "report.html")
    chromium(tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}", (tmp_path / "report.html").as_uri())
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= 2
    assert len(printed) > 20_000


def test_a_page_names_no_other_place_and_escapes_what_it_is_given(rendered: str) -> None:
    assert not re.search(r"https?:|<script|@import", rendered)
    places = re.findall(r"""(?:\bsrc|\bhref)=["']([^"']*)|url\(([^)]*)\)""", rendered)
    assert places
    assert all(place.startswith(("#", "data:")) for pair in places for place in pair if place)
    assert "default-src 'none'" in rendered
    assert "<b>" not in rendered
    assert "a &lt;b&gt;&amp;amp; name" in rendered
    assert "<title>Sent &amp; learned</title>" in rendered


def test_ids_are_not_used_twice_and_all_that_are_named_exist(rendered: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', rendered)
    assert len(ids) == len(set(ids))
    named = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', rendered)
    assert {a or b for a, b in named} <= set(ids)


def test_a_chart_is_told_in_words_for_those_who_do_not_see_it() -> None:
    chart = LineChart('Accuracy "now"', "steps", [Curve("dense", [1, 2], [3.0, 97.25])], y_unit="%")
    assert 'role="img" aria-label="Line chart: Accuracy &quot;now&quot;, over steps. dense ends at 97.2 %."' in svg(
        chart, "f"
    )
    assert "Bar chart: Bytes. topk: 12 kB." in svg(BarChart("Bytes", "bytes", [Bar("topk", 12e3, "12 kB")]), "f")


def test_curves_differ_without_colour() -> None:
    drawn = svg(LineChart("Accuracy", "steps", [Curve(c.label, c.x, c.y) for c in curves()]), "f")
    lines = re.findall(
        r'<path d="[^"]*" clip-path="[^"]*" style="fill: none; (stroke-dasharray: [^;]*;)?[^"]*stroke-width: 1.7', drawn
    )
    assert len(lines) == len(set(lines)) == len(NAMES)


def test_a_curve_may_look_as_in_another_chart() -> None:
    both = [Curve("a", [1, 2], [1, 2]), Curve("b", [1, 2], [2, 3])]
    (first, second), (alone,) = (
        _figure([LineChart("t", "x", curves)]).axes[0].lines for curves in (both, [replace(both[1], look=1)])
    )
    look = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in (first, second, alone)]
    assert look[0] != look[1] == look[2]


def test_the_same_page_is_the_same_text(rendered: str) -> None:
    assert render(page()) == rendered


def test_points_at_zero_do_not_disturb_a_logarithmic_axis() -> None:
    with_zero = LineChart("t", "x", [Curve("a", [0, 10, 100], [5, 1, 2])], log_x=True)
    without = LineChart("t", "x", [Curve("a", [10, 100], [1, 2])], log_x=True)
    assert svg(with_zero, "f") == svg(without, "f")


def test_a_logarithmic_axis_within_a_decade_has_plain_numbers() -> None:
    drawn = svg(LineChart("t", "x", [Curve("a", [1.0, 2.5, 6.7], [1, 2, 3])], log_x=True), "f")
    assert "mathdefault" not in drawn
    assert all(f">{number}<" in drawn for number in (1, 2, 5))


def test_a_picture_of_two_charts_is_wide(tmp_path: Path) -> None:
    charts = [LineChart("t", "x", curves()), LineChart("t", "x", curves(), log_x=True)]
    png(charts, tmp_path / "two.png")
    head = (tmp_path / "two.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:]) == (1440, 576)


def test_a_picture_of_four_charts_has_two_rows_and_a_legend_for_each_that_needs_its_own(tmp_path: Path) -> None:
    charts = [LineChart("t", "x", curves()[: i + 1], log_y=True) for i in range(4)]
    png(charts, tmp_path / "four.png")
    width, height = struct.unpack(">II", (tmp_path / "four.png").read_bytes()[16:24])
    assert width == 1440  # two beside one another, so that no row has one alone
    assert 1152 < height < 1400
    drawn = _figure(charts)
    assert [len(axes.figure.legends[0].get_texts()) for axes in drawn.axes] == [1, 2, 3, 4]
    assert not drawn.legends
    same = _figure([charts[1], charts[1]])
    assert len(same.legends) == 1
    assert same.axes[0].get_yscale() == "log"


def test_an_axis_of_a_few_whole_numbers_has_no_halves() -> None:
    axes = _figure([LineChart("t", "workers", [Curve("a", [1, 2, 4, 8], [1, 2, 3, 4])])]).axes[0]
    assert {2.0, 4.0, 6.0, 8.0} <= {*axes.get_xticks()}
    assert all(tick.is_integer() for tick in axes.get_xticks())


def test_a_legend_that_is_higher_than_its_chart_does_not_collapse_it(recwarn: pytest.WarningsRecorder) -> None:
    labels = [f"method {i} of many words that say what it does" for i in range(30)]
    svg(LineChart("t", "x", [Curve(label, [1, 2], [1, 2]) for label in labels]), "f")
    assert not [str(one.message) for one in recwarn if "constrained_layout" in str(one.message)]


@pytest.mark.parametrize("alike", [True, False])
def test_many_curves_with_long_labels_leave_the_axes_their_room(alike: bool) -> None:
    labels = [
        f"method {i} with many words, which say what it does, one by one, until the line is full" for i in range(10)
    ]
    charts = [LineChart("t", "x", [Curve(label, [1, 2], [1, 2]) for label in labels[i:]]) for i in range(3)]
    drawn = _figure([charts[0]] * 3 if alike else charts)
    drawn.draw_without_rendering()
    legends = drawn.legends if alike else [axes.figure.legends[0] for axes in drawn.axes]
    assert len(legends) == (1 if alike else 3)
    boxes = [legend.get_window_extent() for legend in legends]
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= drawn.bbox.width for box in boxes)
    for axes in drawn.axes:
        box = axes.get_window_extent()
        assert box.width > 250
        assert box.height > 200
        assert not any(box.overlaps(legend) for legend in boxes)


def test_a_narrow_logarithmic_axis_has_numbers() -> None:
    axes = _figure([LineChart("t", "x", [Curve("a", [1, 2], [130, 900])], log_y=True)]).axes[0]
    assert {200, 500} <= {round(float(tick)) for tick in axes.get_yticks()}


def test_a_row_must_fit_its_headings() -> None:
    with pytest.raises(ValueError, match="rows must have 2 cells"):
        Table("t", ["a", "b"], [Row(["1"])])


def test_numbers_as_text() -> None:
    assert mean_and_std_text(97.34, 0.16, "%") == "97.3 ± 0.2 %"
    assert mean_and_std_text(97.34, None) == "97.3"
    assert [times(x) for x in (1.0, 21.58, 99.96, 498.4, 1234.5)] == ["1.0 ×", "21.6 ×", "100 ×", "498 ×", "1,234 ×"]


def test_a_csv_file_reads_back(tmp_path: Path) -> None:
    lines = [{"method": 'a "b", c', "bytes": "1"}, {"method": "±", "bytes": "2"}]
    write_csv(tmp_path / "t.csv", lines)
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == lines


def test_long_tables_below_the_contents_are_folded() -> None:
    def rows(number: int) -> list[Row]:
        return [Row([f"row {i}", "1.0"]) for i in range(number)]

    above, below, short = (Table(name, ["row", "score"], rows(n)) for name, n in (("A", 25), ("B", 25), ("C", 24)))
    parts = [Text(f"Part {i}", ["Words."]) for i in range(4)]
    shown = render(Page("Report", [], [parts[0], above, *parts[1:], below, short], before_contents=1))
    assert shown.index("<caption>A</caption>") < shown.index("Contents</h2>") < shown.index("<summary>B (25 rows)")
    assert "<caption>C</caption>" in shown
    assert shown.count("<details>") == shown.count("</details>") == 1
    assert "<details>" not in render(Page("Report", [], [parts[0], above]))


def test_columns_of_words_stand_left() -> None:
    rows = [Row(["topk", "partly", "a cell of words that is longer than a column of numbers", "1.0"])]
    shown = render(Page("Report", [], [Table("Verdicts", ["claim", "verdict", "here", "score"], rows)]))
    assert '<td class="words" data-column="verdict">partly' in shown
    assert '<td class="long" data-column="here">' in shown
    assert '<td data-column="score">1.0' in shown
