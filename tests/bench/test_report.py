"""Reports: their content equals the summary, and external text never becomes markup."""

import html
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.bench.figures.metrics import summarize
from draftwood.bench.figures.summary import ALL_TASKS, Cell, Interval
from draftwood.bench.records.run_folder import MANIFEST, REQUESTS, BenchRun, LosslessVerdict, RequestRecord, RunManifest
from draftwood.bench.report import format_results, html_report, list_problems, markdown_report, write_report
from draftwood.bench.report.facts import headline, warnings
from draftwood.bench.report.markdown import escape
from draftwood.errors import DraftwoodError
from draftwood.plots import Bar, Line, assign_marks, plot_bars, plot_lines, svg_file
from tests.tools.bench_report import EVIL, SVG, Tables, changed, drawings, make, rows_of

# --- Markdown ---------------------------------------------------------------------------------------------------------


def test_main_table_is_rendered_exactly():
    assert rows_of(markdown_report([make()]), "Speed and exactness") == [
        "| method | gsm8k | mbpp | mean speed-up | tau | tokens/s | nodes | outputs |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        "| plain | 1.00x | 1.00x | 1.00x (1.00-1.00) | 1.00 | 40.0 | 1.0 | 24 identical, 1 tie |",
        "| pld | 1.50x | 1.50x | 1.50x (1.40-1.60) | 2.00 | 60.0 | 11.0 | 24 identical, 1 tie |",
        "| goose | 2.00x | 2.00x | 2.00x (1.90-2.10) | 3.00 | 80.0 | 21.0 | 24 identical, 1 tie |",
    ]


def test_without_plain_there_are_speeds_instead_of_ratios():
    rows = rows_of(markdown_report([make(["goose"])]), "Speed and exactness")
    assert rows[0] == "| method | gsm8k | mbpp | mean tokens/s | tau | nodes | outputs |"
    assert rows[2] == "| goose | 40.0 | 40.0 | 40.0 (39.0-41.0) | 1.00 | 1.0 | 24 identical, 1 tie |"


@pytest.mark.parametrize(
    ("temperature", "why"), [(0.6, "they are sampled"), (0.0, "it did not run on the same prompts")]
)
def test_outputs_that_were_not_compared(temperature, why):
    summary = make(["goose"], manifest={"settings": {"temperature": temperature}})
    for task in (*summary.tasks, ALL_TASKS):
        summary = changed(summary, "goose", task, lossless={})
    report = markdown_report([summary])
    assert rows_of(report, "Speed")[0] == "| method | gsm8k | mbpp | mean tokens/s | tau | nodes |"
    assert rows_of(report, "Speed")[2] == "| goose | 40.0 | 40.0 | 40.0 (39.0-41.0) | 1.00 | 1.0 |"
    assert f"not compared with plain decoding: {why}" in report


def test_report_describes_the_run():
    report = markdown_report([make()])
    assert "```\ndraftwood bench --drafters plain,goose\n```" in report
    for line in (
        "- model: tiny, 135M parameters",
        "- dtype: float32",
        "- backend: native",
        "- device: cpu",
        "- machine: a processor, 2 cores, 24 GB memory",
        "- versions: draftwood 0.1.0",
        "- prompts: 10 (gsm8k 5, mbpp 5)",
        "- max_tokens: 128",
        "- temperature: 0",
        "- seed: 7",
        "- budget: auto",
    ):
        assert line in report.splitlines()
    assert "95% bootstrap over prompts (10 prompts in 2 tasks)" in report
    assert "ran together" not in report
    assert "Batches of 8 prompts" in markdown_report([make(manifest={"settings": {"batch": 8}})])
    stopped = changed(make(), "goose", "mbpp", prompts=3)  # an unfinished run: answered requests count
    assert "95% bootstrap over prompts (8 prompts in 2 tasks)" in markdown_report([stopped])


def test_other_tables_have_the_figures():
    report = markdown_report([make()])
    assert rows_of(report, "Acceptance length by task")[-1] == (
        "| goose | 3.00 (2.95-3.05) | 3.00 (2.95-3.05) | 3.00 (2.95-3.05) |"
    )
    assert rows_of(report, "Time per cycle")[-1] == "| goose | 1.00 | 20.00 | 0.50 | 0.25 | 21.75 |"
    assert "| goose | 0.60 | 0.20 | 0.60 | 0.20 | 3.00x |" in report
    assert "| goose | 25.0% | 75.0% |" in report
    depths = rows_of(report, "Acceptance by depth")
    assert depths[0] == "| method | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |"  # the first eight of ten
    assert depths[-1] == "| goose | 0.80 | 0.40 | 0.27 | 0.20 | 0.16 | 0.13 | 0.11 | 0.10 |"
    assert rows_of(report, "Latency and memory")[-1] == "| goose | 52.0 | 1.00 GiB |"


def test_empty_sections_are_omitted():
    bare = make(["plain"])
    cells = {key: Cell(method="plain", task=key[1], tokens_per_second=Interval(1, 1, 1)) for key in bare.cells}
    bare = replace(bare, cells=cells)
    headings = re.findall(r"^## (.*)$", markdown_report([bare]), re.M)
    assert headings == ["Setup", "Speed"]
    page = html_report([bare])
    for key in ("tau", "cycle", "sources", "depth", "latency", "trajectories", "budget", "paper", "missing"):
        assert f'id="s1-{key}"' not in page
        assert f'href="#s1-{key}"' not in page


def test_budgets_of_one_family_become_a_table_and_a_curve():
    budgets = {"goose @8": 8, "goose @60": 60, "goose @auto": "auto", "pld": 60}
    summary = make(["plain", *budgets], budgets=budgets)
    assert rows_of(markdown_report([summary]), "tau by budget") == [
        "| method | 8 | 60 | auto |",
        "| --- | ---: | ---: | ---: |",
        "| goose | 2.00 | 3.00 | 4.00 |",
    ]
    (plot,) = [one for one in drawings(html_report([summary])) if "budget" in one.get("aria-label", "")]
    assert plot.find(f"{SVG}desc").text == "goose: 8 2.00, 60 3.00"


def test_trajectories_become_a_table_and_a_curve():
    summary = changed(make(), "goose", by_trajectories={1: 2.0, 4: 2.5})
    assert rows_of(markdown_report([summary]), "tau by number of trajectories")[2] == "| goose | 2.00 | 2.50 |"
    assert any("first samples" in one.get("aria-label", "") for one in drawings(html_report([summary])))


def test_published_figures_are_shown_next_to_ours():
    published = [
        {"method": "goose", "task": "gsm8k", "metric": "tau", "value": 3.9, "label": "7B"},
        {"method": "goose", "task": ALL_TASKS, "metric": "speedup", "value": 2.41, "model": "8B"},
        {"method": "goose", "task": ALL_TASKS, "metric": "by_trajectories", "value": 2.8, "trajectories": 4},
        {"method": "eagle", "task": ALL_TASKS, "metric": "speedup", "value": 3.0},
    ]
    summary = changed(make(manifest={"paper": published}), "goose", by_trajectories={4: 2.5})
    assert rows_of(markdown_report([summary]), "Comparison with the paper")[2:] == [
        "| goose | gsm8k | tau (7B) | 3.90 | 3.00 (2.95-3.05) |",
        "| goose | mean | speedup (8B) | 2.41x | 2.00x (1.90-2.10) |",
        "| goose | mean | tau, 4 trajectories | 2.80 | 2.50 |",
        "| eagle | mean | speedup | 3.00x | not measured |",
    ]


def test_failures_are_reported_with_reasons():
    summary = make(manifest={"failed": {"pld": "no room"}, "absent": {"vllm": "not installed"}})
    summary = changed(summary, "goose", errors=2, lossless={"identical": 22, "error": 3})
    report = markdown_report([summary])
    assert rows_of(report, "What did not run")[2:] == [
        "| pld | **failed** | no room |",
        "| goose | **requests failed** | 2 requests failed; see the errors in requests.jsonl |",
        "| vllm | absent | not installed |",
    ]
    assert "**22 identical, 3 ERROR**" in report
    told = warnings(summary)
    assert told[0].startswith("goose: 3 of 25 outputs are not identical to plain decoding")
    assert told[1:] == ["pld failed: no room", "goose: 2 requests failed."]
    page = html_report([summary])
    assert all(html.escape(one) in page for one in told)
    assert page.index('class="warning"') < page.index("<section")
    assert 'class="warning"' not in html_report([make()])


def test_headline():
    plain = "goose decodes 2.00x as fast as plain decoding (1.90-2.10), 24 of 25 outputs identical, 1 tie."
    assert headline(make()) == plain
    wrong = changed(make(), "goose", lossless={"identical": 24, "error": 1})
    assert headline(wrong).startswith("pld decodes 1.50x")  # a method with wrong output is not the best
    peer = make(["plain", "pld", "other"], peers=["other"])
    assert headline(peer).startswith("pld decodes 1.50x")
    assert headline(make(["goose"])) == "goose decodes 40.0 (39.0-41.0) tokens/s, 24 of 25 outputs identical, 1 tie."
    assert headline(replace(make(), cells={})) == "No request has finished yet."


def test_report_has_notes_on_peers():
    summary = make(["plain", "goose", "vllm"], peers=["vllm"])
    assert "Notes on peers" not in markdown_report([summary])
    noted = [
        {**method, "note": "version 1; <eager>" if method["label"] == "vllm" else ""} for method in summary.methods
    ]
    summary = replace(summary, methods=noted)
    report = markdown_report([summary])
    assert rows_of(report, "Notes on peers") == [
        "| peer | note |",
        "| --- | --- |",
        "| vllm | version 1; &lt;eager&gt; |",
    ]
    page = html_report([summary])
    assert 'href="#s1-peers"' in page
    (rows,) = [table["rows"] for table in Tables(page).tables if table["rows"][0] == ["peer", "note"]]
    assert rows[1:] == [["vllm peer", "version 1; <eager>"]]
    assert "different: a peer" in report  # what that word in the main table means
    assert "different: a peer" not in markdown_report([make()])


def test_unfinished_run_is_reported():
    summary = make(manifest={"finished": None, "settings": {"raw": True, "ignore_eos": True}})
    assert warnings(summary) == ["The run is not finished: figures cover the requests so far."]
    assert list_problems(summary) == []
    lines = markdown_report([summary]).splitlines()
    assert {"- finished: not yet", "- raw: yes: no chat template", "- ignore_eos: yes"} <= set(lines)
    assert warnings(make()) == []


# --- for a terminal ---------------------------------------------------------------------------------------------------


def test_rows_for_a_terminal():
    summary = make(["plain", "pld", "vllm"], peers=["vllm"], manifest={"failed": {"pld": "no room"}})
    for label in ("plain", "vllm"):
        summary = changed(summary, label, prompts=5)
    assert format_results(summary) == [
        ("method", "speed-up", "95%", "tau", "tokens/s", "nodes", "output"),
        ("plain", "1.00x", "1.00-1.00", "1.00", "40.0", "1.0", "24 identical, 1 tie"),
        ("pld", "1.50x", "", "2.00", "60.0", "11.0", "24 identical, 1 tie, FAILED"),
        ("vllm", "2.00x", "1.90-2.10", "", "80.0", "", "24 identical, 1 tie"),
    ]
    alone = changed(make(["goose"]), "goose", prompts=5, lossless={}, tau=None)
    assert format_results(alone) == [("method", "tokens/s", "95%", "nodes"), ("goose", "40.0", "39.0-41.0", "1.0")]
    assert format_results(replace(make(["plain"]), cells={})) == [("method", "speed-up"), ("plain", "")]


# --- external text ----------------------------------------------------------------------------------------------------


def test_external_text_is_escaped():
    tasks = [EVIL, "mbpp"]
    manifest = {
        "failed": {EVIL: EVIL},
        "absent": {EVIL: EVIL},
        "command": EVIL + " ```",
        "software": {EVIL: EVIL},
        "paper": [{"method": EVIL, "task": EVIL, "metric": EVIL, "value": 1.0, "label": EVIL}],
    }
    summary = make(["plain", EVIL], tasks, title=EVIL, runs=[EVIL], manifest=manifest)
    page = html_report([summary])
    tags = Tables(page).tags
    assert [tag for tag, _ in tags].count("script") == 1  # our own
    assert not [a for _, attributes in tags for a in attributes if a.startswith("on")]
    assert "<script>alert" not in page
    assert drawings(page)
    report = markdown_report([summary])
    outside = re.sub(r"^(`{4,})\n.*?\n\1$", "", report, flags=re.S | re.M)  # the command is in a code block
    assert "<script>" not in outside
    assert not re.search(r"(?<!\\)\]\(http", outside)
    assert "*x*" not in outside.replace("\\*x\\*", "")
    cuts = [len(re.findall(r"(?<!\\)\|", line)) for line in rows_of(report, "Speed and exactness")]
    assert len(set(cuts)) == 1


@given(st.text(max_size=40))
def test_escaped_markdown_stays_in_its_cell(text):
    cell = escape(text)
    assert not re.search(r"(?<!\\)(?:\\\\)*\|", cell)
    assert "\n" not in cell
    assert "<" not in cell


@given(st.text(max_size=40))
def test_any_text_gives_well_formed_drawings(text):
    look = assign_marks(["plain", text + "x"], "plain")[text + "x"]
    drawn = plot_bars([Bar(look, 2, 1, 3)], title=text, unit="x", maximum=3, wide=True, reference=text)
    ElementTree.fromstring(drawn.inline())
    drawn = plot_lines([Line(look, {1.0: 0.5})], title=text, x_name=text, y_name=text, low=0.0, high=1.0)
    ElementTree.fromstring(drawn.inline())
    ElementTree.fromstring(svg_file(text, [drawn]))


# --- files ------------------------------------------------------------------------------------------------------------


def small_run():
    """Two prompts of 8 tokens: plain takes a second for each, goose half a second."""
    methods = [
        {"label": label, "kind": "drafter", "drafter": label, "options": {}, "budget": 1, "family": label}
        for label in ("plain", "goose")
    ]
    manifest = RunManifest(
        settings={"temperature": 0.0, "trajectories": [1], "batch": 1},
        methods=methods,
        tasks={"own": {"prompts": 2}},
        model={"name": "tiny"},
        machine={},
        software={},
        command="draftwood bench",
        started="2026-01-01T00:00:00Z",
    )
    records = [
        RequestRecord(
            method=label,
            task="own",
            prompt=prompt,
            output_tokens=8,
            decode_tokens=8,
            decode_seconds=seconds,
            total_seconds=seconds,
            lossless=LosslessVerdict(verdict="identical"),
        )
        for label, seconds in (("plain", 1.0), ("goose", 0.5))
        for prompt in ("1", "2")
    ]
    return BenchRun("run", manifest, records)


def test_report_of_a_run_is_written_completely(tmp_path):
    written = write_report(tmp_path, summarize([small_run()]))
    assert [path.name for path in written] == ["report.md", "report.html", "summary.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in written)
    assert "| goose | 2.00x | 2.00x (2.00-2.00) |" in (tmp_path / "report.md").read_text(encoding="utf-8")
    content = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    (summary,) = content["summaries"]
    assert summary["cells"]["goose"]["own"]["speedup"]["value"] == pytest.approx(2.0)
    assert summary["cells"]["goose"][ALL_TASKS]["lossless"] == {"identical": 2}
    assert summary["baseline"] == "plain"
    assert 'href="requests.jsonl"' not in (tmp_path / "report.html").read_text(encoding="utf-8")  # not next to it
    for name in (MANIFEST, REQUESTS):
        (tmp_path / name).touch()
    write_report(tmp_path, summarize([small_run()]))
    assert 'href="requests.jsonl"' in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_no_runs_are_an_error(tmp_path):
    with pytest.raises(DraftwoodError, match="nothing to report"):
        write_report(tmp_path, [])
