"""Figures computed from the records of runs: means, intervals, differences."""

from draftwood.bench.figures.diff import ALL_METHODS, METRICS, OTHER, SAME, UNKNOWN, WORSE, Change, diff_runs
from draftwood.bench.figures.metrics import summarize
from draftwood.bench.figures.pairs import find_pairs
from draftwood.bench.figures.summary import ALL_TASKS, MAX_OTHER_LOAD, Cell, Interval, Summary, is_above_tau
