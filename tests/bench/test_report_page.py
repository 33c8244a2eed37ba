"""The page of a report: self-contained, drawn to scale, with the figures of the summary."""

import html
import json
import math
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.bench.figures.summary import ALL_TASKS, Interval
from draftwood.bench.report import html_report, markdown_report
from draftwood.bench.report.files import format_summary_json
from draftwood.bench.report.sections import sections
from draftwood.display import ticks
from draftwood.plots import Bar, Line, Stack, assign_marks, plot_bars, plot_lines, plot_stacks, svg
from tests.tools.bench_report import MANY, SVG, TASKS, Tables, changed, drawings, make, rows_of, share

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "tasks"),
    [(["goose"], TASKS[:1]), (["plain", "pld", "goose"], TASKS[:3]), (MANY, TASKS[:1]), (MANY, TASKS)],
)
def test_page_is_self_contained_and_well_formed(labels, tasks):
    page = html_report([make(labels, tasks, peers=[label for label in labels if ":lookup" in label])])
    parsed = Tables(page)
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        for name in ("src", "href", "xlink:href", "action"):
            assert not re.match(r"(?:[a-z]+:)?//|[a-z]+:", attributes.get(name) or "")
    assert "@import" not in page
    assert set(re.findall(r"url\(([^)]*)\)", page)) == {"#hatch", "#dots"}
    assert set(re.findall(r"https?://[^\s\"'<]*", page)) == {"http://www.w3.org/2000/svg"}
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    anchors = [a["href"][1:] for tag, a in parsed.tags if tag == "a" and a["href"].startswith("#")]
    assert set(anchors) <= set(ids)
    found = [one for one in drawings(page) if one.get("class") == "plot"]
    assert found
    for drawing in found:
        assert drawing.get("role") == "img"
        assert drawing.find(f"{SVG}title").text
        assert drawing.find(f"{SVG}desc").text
        assert not re.search(r"nan|inf\b|None", ElementTree.tostring(drawing, encoding="unicode"), re.I)


def test_tables_of_the_page_are_those_of_the_summary():
    summary = make(MANY, TASKS[:4], peers=MANY[-2:])
    parsed = Tables(html_report([summary])).tables
    tables = [table for section in sections(summary) for table in section.tables]
    assert len(parsed) == len(tables)
    numbers = {label: str(place + 1) for place, label in enumerate(MANY)}
    for seen, table in zip(parsed, tables, strict=True):
        assert seen["rows"][0] == [column.name for column in table.columns]
        assert seen["scopes"] == ["col"] * len(table.columns) + ["row"] * len(table.rows)
        for row, wanted in zip(seen["rows"][1:], table.rows, strict=True):
            label = wanted[0].text
            tag = " peer" if label in MANY[-2:] else ""
            assert row[0] == f"{numbers[label]} {label}{tag}"
            assert row[1:] == [entry.text for entry in wanted[1:]]
    main = parsed[0]["rows"]
    for label, row in zip(MANY, main[1:], strict=True):
        for task, text in zip(TASKS[:4], row[1:5], strict=True):
            assert text == f"{summary.cells[label, task].speedup.value:.2f}x"


def test_several_summaries_on_one_page():
    page = html_report([make(title="first"), make(["goose"], title="second")])
    ids = [attributes["id"] for _, attributes in Tables(page).tags if "id" in attributes]
    assert {"s1", "s2", "s1-results", "s2-results"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert 'href="requests.jsonl"' not in page  # which of the two?
    assert 'href="requests.jsonl"' in html_report([make()])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_missing_numbers_are_dashes(bad):
    summary = make()
    for task in (*summary.tasks, ALL_TASKS):
        summary = changed(
            summary,
            "goose",
            task,
            speedup=Interval(bad, bad, bad),
            tau=Interval(2.0, bad, bad),
            nodes=bad,
            tokens_per_second=None,
            p_s=bad,
            by_depth=[0.5, bad, 0.25],
            cycle_ms={"draft": bad, "verify": 2.0},
            by_trajectories={1: bad, 4: 2.0, 8: 3.0},
        )
    row = rows_of(markdown_report([summary]), "Speed and exactness")[-1]
    assert row == "| goose | – | – | – | 2.00 | – | – | 24 identical, 1 tie |"  # noqa: RUF001
    page = html_report([summary])
    for drawing in drawings(page):
        assert not re.search(r'"(nan|-?inf)', ElementTree.tostring(drawing, encoding="unicode"))
    assert not re.search(r'data-value="(nan|inf)"', page)
    kept = json.loads(format_summary_json([summary]))["summaries"][0]["cells"]["goose"][ALL_TASKS]
    assert kept["speedup"] == {"value": None, "low": None, "high": None}
    assert kept["by_depth"] == [0.5, None, 0.25]


# --- drawings to scale ------------------------------------------------------------------------------------------------


def test_bars_and_whiskers_are_to_scale():
    looks = assign_marks(["plain", "a", "b", "c", "d"], "plain")
    values = {"a": Interval(1.0, 0.5, 1.5), "b": Interval(2.5, 2.0, 4.0), "c": Interval(3.0, 3.0, 3.0), "d": None}
    items = [Bar(looks[label], *(value or ())) for label, value in values.items()]
    drawn = ElementTree.fromstring(plot_bars(items, title="t", unit="x", maximum=4.0, reference="plain").inline())
    groups = {
        group.get("data-m"): group for group in drawn.iter(f"{SVG}g") if group.find(f"{SVG}text[@class='name']") is None
    }
    for label, value in values.items():
        rects = groups[label].findall(f"{SVG}rect")
        whiskers = groups[label].findall(f"{SVG}line")
        if value is None:
            assert rects == whiskers == []
            assert groups[label].find(f"{SVG}text").text == "not measured"
            continue
        assert share(rects[0].get("x")) == 0
        assert share(rects[0].get("width")) == pytest.approx(value.value / 4)
        assert groups[label].find(f"{SVG}text").text == f"{value.value:.2f}x"
        if value.low == value.high:
            assert whiskers == []
        else:
            assert share(whiskers[0].get("x1")) == pytest.approx(value.low / 4)
            assert share(whiskers[0].get("x2")) == pytest.approx(value.high / 4)
    (one,) = drawn.findall(f"{SVG}line[@class='one']")
    assert share(one.get("x1")) == share(one.get("x2")) == pytest.approx(0.25)
    grid = drawn.findall(f"{SVG}line[@class='grid']")
    assert [share(line.get("x1")) for line in grid] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


def test_stacked_bars_are_contiguous():
    looks = assign_marks(["a", "b"], None)
    items = [Stack(looks["a"], {"draft": 1.0, "verify": 6.0, "accept": 1.0}), Stack(looks["b"], {"verify": 4.0})]
    drawn = ElementTree.fromstring(plot_stacks(items, ["draft", "verify", "accept"], title="t").inline())
    places = [(share(r.get("x")), share(r.get("width"))) for r in drawn.iter(f"{SVG}rect")]
    assert places == [(0, 0.125), (0.125, 0.75), (0.875, 0.125), (0, 0), (0, 0.5), (0.5, 0)]
    assert [t.text for t in drawn.iter(f"{SVG}text") if t.get("class") == "value"] == ["8.00 ms", "4.00 ms"]


def test_lines_are_to_scale():
    look = assign_marks(["a"], None)["a"]
    points = {1.0: 0.0, 4.0: 0.5, 16.0: 1.0}
    for logarithmic, wanted in ((False, [0, 0.2, 1]), (True, [0, 0.5, 1])):
        drawn = ElementTree.fromstring(
            plot_lines(
                [Line(look, points)], title="t", x_name="x", y_name="y", low=0.0, high=1.0, logarithmic=logarithmic
            ).inline()
        )
        markers = [one for one in drawn.iter(f"{SVG}svg") if one.find(f"{SVG}path") is not None]
        assert [share(one.get("x")) for one in markers] == pytest.approx(wanted)
        low, middle, high = (float(one.get("y")) for one in markers)
        assert low - middle == pytest.approx(middle - high)
        assert low > high  # upwards


def test_marks_are_stable_and_distinct():
    looks = assign_marks(MANY, "plain")
    assert looks["plain"].colour == "c-base"
    others = [looks[label] for label in MANY[1:]]
    assert len({(look.colour, look.dashes) for look in others}) == len(others)
    assert [look.key for look in looks.values()] == [str(place + 1) for place in range(len(MANY))]  # one label is long
    assert assign_marks(["plain", "goose"], "plain")["goose"].key == "goose"


@given(st.lists(st.floats(0, 300), max_size=20), st.floats(1, 13))
def test_spread_keeps_order_gaps_and_bounds(places, gap):
    moved = svg.spread(places, gap, 0.0, 300.0)
    order = sorted(range(len(places)), key=lambda index: places[index])
    at = [moved[index] for index in order]
    assert all(b - a >= gap - 1e-6 for a, b in pairwise(at))
    assert all(-1e-6 <= place <= 300 + 1e-6 for place in at)


@given(st.floats(0, 100), st.floats(0.01, 1000))
def test_ticks_are_few_even_and_inside(low, span):
    found = ticks(low, low + span)
    assert len(found) <= 6
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in found)
    gaps = [b - a for a, b in pairwise(found)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


@given(st.text(alphabet="ab,:=+ /@", max_size=60), st.integers(3, 30))
def test_wrapped_labels_lose_nothing(label, width):
    rows = svg.wrap_label(label, width)
    assert all(len(row) <= width for row in rows)
    assert "".join(rows).replace(" ", "") == label.replace(" ", "")


# --- in a browser -----------------------------------------------------------------------------------------------------

PROBE = """<script>
const ready = [...document.querySelectorAll("iframe")].map((frame) => new Promise((done) => { frame.onload = done; }));
Promise.all(ready).then(() => {
  const out = ["looked"];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, width = page.documentElement.clientWidth;
    if (page.documentElement.scrollWidth > width) out.push(`${width}: too wide`);
    for (const plot of page.querySelectorAll(".plot")) {
      const texts = [...plot.querySelectorAll("text")].map((one) => [one.getBoundingClientRect(), one.textContent]);
      texts.forEach(([a, text], at) => {
        if (a.left < 0 || a.right > width) out.push(`${width}: ${text} is cut`);
        for (const [b, other] of texts.slice(at + 1)) {
          const across = a.left < b.right - 1 && b.left < a.right - 1;
          if (across && a.top < b.bottom - 3 && b.top < a.bottom - 3) out.push(`${width}: ${text} over ${other}`);
        }
      });
    }
  }
  document.body.innerHTML = "<pre></pre>";
  document.querySelector("pre").textContent = out.join("\\n");
});
</script>"""


def shown(path, folder):
    """The page in a real browser after its scripts ran; empty if the browser does not run or finish."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += [f"--user-data-dir={folder}/profile", "--window-size=1400,900", "--virtual-time-budget=5000"]
    command = [CHROMIUM, *options, "--dump-dom", path.as_uri()]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def find_layout_problems(page, folder, widths=(360, 800, 1280)):
    """Elements that are too wide, cut off or overlapping in a real browser."""
    frames = "".join(
        f'<iframe style="width:{width}px;height:600px;border:0" srcdoc="{html.escape(page)}"></iframe>'
        for width in widths
    )
    path = Path(folder) / "probe.html"
    path.write_text(f"<!DOCTYPE html><body>{frames}{PROBE}</body>", encoding="utf-8")
    found = re.search(r"<pre>looked\n?(.*?)</pre>", shown(path, folder), re.S)
    if found is None:
        # A Chromium that is installed but cannot show one word is broken on this machine (no shared memory, a package
        # half installed): not a fault of reports. One that shows a word but no report is a fault of the report.
        path.write_text("<!DOCTYPE html><body><p>word</p></body>", encoding="utf-8")
        if "<p>word</p>" not in shown(path, folder):
            pytest.skip("the Chromium of this machine does not run")
        pytest.fail("the browser runs, and gave nothing of the report")
    return found.group(1).split("\n") if found.group(1) else []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_nothing_overflows_or_overlaps_in_a_browser(tmp_path):
    summary = make(MANY, TASKS, peers=MANY[-2:], manifest={"failed": {"method1": "x" * 300}})
    summary = changed(summary, "method1", by_trajectories={1: 2.0, 4: 2.5, 16: 3.0})
    assert find_layout_problems(html_report([summary]), tmp_path) == []
    wide = html_report([make()]).replace("<main", '<p style="width:2000px">x</p><main')
    assert "too wide" in find_layout_problems(wide, tmp_path)[0]  # the probe can fail
