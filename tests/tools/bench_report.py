"""Hand-made summaries, and readers for the reports generated from them."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

from draftwood.bench.figures.summary import ALL_TASKS, Cell, Interval, Summary

SVG = "{http://www.w3.org/2000/svg}"
LONG = "goose:bypass=copied,extension=levels,static=false"
EVIL = '<script>alert("1")</script> | & *x* `y` [z](http://evil)'
TASKS = ["mt_bench", "humaneval", "mbpp", "classeval", "gsm8k", "alpaca", "cnn_dm", "aime24", "livecodebench", "spec"]
MANY = ["plain", LONG, *(f"method{i}" for i in range(12)), "transformers:lookup", "llamacpp:lookup"]


def make(labels=("plain", "pld", "goose"), tasks=("gsm8k", "mbpp"), *, peers=(), budgets=None, **changes):
    """A summary whose figures depend on the index of a method: speed-up 1 + index/2 on every task."""
    cells = {}
    for place, label in enumerate(labels):
        for task in (*tasks, ALL_TASKS):
            speed = 1.0 + place / 2
            told = label != "plain" and label not in peers
            cells[label, task] = Cell(
                method=label,
                task=task,
                requests=5,
                tokens_per_second=Interval(40 * speed, 39 * speed, 41 * speed),
                speedup=Interval(speed, speed - 0.1, speed + 0.1) if place else Interval(1.0, 1.0, 1.0),
                tau=None if label in peers else Interval(1 + place, 1 + place - 0.05, 1 + place + 0.05),
                nodes=None if label in peers else 1.0 + 10 * place,
                first_token_ms=50.0 + place,
                p_s=0.6 if told else None,
                p_t=0.2 if told else None,
                by_depth=[0.8 / (at + 1) for at in range(10)] if told else [],
                by_source={"context": 0.6, "transition": 0.2} if told else {},
                routes={"plain": 0.25, "spine": 0.75} if told else {},
                cycle_ms={} if label in peers else {"draft": 1.0, "verify": 20.0, "accept": 0.5, "other": 0.25},
                peak_bytes=2**30,
                lossless={"identical": 24, "tie": 1},
            )
    manifest = {
        "settings": {"model": "m", "max_tokens": 128, "temperature": 0.0, "seed": 7, "budget": ["auto"]},
        "model": {"name": "tiny", "dtype": "float32", "backend": "native", "device": "cpu", "parameters": 134515008},
        "machine": {"processor": "a processor", "cores": 2, "memory_gb": 24},
        "software": {"draftwood": "0.1.0"},
        "tasks": {task: {"prompts": 5} for task in tasks},
        "command": "draftwood bench --drafters plain,goose",
        "started": "2026-01-01T00:00:00Z",
        "finished": "2026-01-01T00:01:00Z",
        **changes.pop("manifest", {}),
    }
    methods = [
        {
            "label": label,
            "kind": "peer" if label in peers else "drafter",
            "drafter": label,
            "budget": (budgets or {}).get(label, 60),
            "family": label.split(" @")[0],
        }
        for label in labels
    ]
    values = {"title": "A run", "runs": ["one"], "baseline": "plain" if "plain" in labels else None} | changes
    return Summary(manifest=manifest, methods=methods, tasks=list(tasks), cells=cells, **values)


def changed(summary, label, task=ALL_TASKS, **values):
    return replace(summary, cells={**summary.cells, (label, task): replace(summary.cells[label, task], **values)})


def drawings(page):
    """The outermost drawings of a page, as trees; fails if one is not well-formed."""
    found, depth, start = [], 0, 0
    for tag in re.finditer(r"<svg\b[^>]*?(/?)>|</svg>", page):
        if tag.group(0) == "</svg>":
            depth -= 1
            if depth == 0:
                found.append(ElementTree.fromstring(page[start : tag.end()]))
        elif not tag.group(1):
            start = tag.start() if depth == 0 else start
            depth += 1
    assert depth == 0
    return found


class Tables(HTMLParser):
    """Captions, header scopes and texts of a page's tables, and every tag it has."""

    def __init__(self, page):
        super().__init__()
        self.tables, self.tags, self._cell = [], [], None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append({"rows": [], "scopes": []})
        elif tag == "tr":
            self.tables[-1]["rows"].append([])
        elif tag in ("td", "th"):
            self._cell = ""
            if tag == "th":
                self.tables[-1]["scopes"].append(dict(attributes).get("scope"))

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1]["rows"][-1].append(self._cell.strip())
            self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data


def share(text):
    assert text.endswith("%")
    return float(text[:-1]) / 100


def rows_of(report, heading):
    """The lines of the first table below a heading."""
    section = report.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [line for line in section.splitlines() if line.startswith("|")]
