"""Figures computed from the records of a run: means, intervals, differences."""

from draftwood.bench.figures.diff import ALL_METHODS, METRICS, OTHER, SAME, UNKNOWN, WORSE, Change, diff_runs
from draftwood.bench.figures.metrics import summarise
from draftwood.bench.figures.summary import ALL_TASKS, Cell, Interval, Summary
from draftwood.bench.figures.versus import find_pairs

__all__ = [
    "ALL_METHODS",
    "ALL_TASKS",
    "METRICS",
    "OTHER",
    "SAME",
    "UNKNOWN",
    "WORSE",
    "Cell",
    "Change",
    "Interval",
    "Summary",
    "diff_runs",
    "find_pairs",
    "summarise",
]
