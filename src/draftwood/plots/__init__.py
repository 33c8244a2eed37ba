"""Bar and line plots as SVG, for web pages and as files of their own. No dependencies."""

from draftwood.plots.bars import Bar, Stack, plot_bars, plot_stacks
from draftwood.plots.drawing import Drawing, read_style, svg_file
from draftwood.plots.lines import Line, plot_lines
from draftwood.plots.marks import SHORT, Mark, assign_marks
from draftwood.plots.svg import split_label, wrap_label
