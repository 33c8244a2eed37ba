"""Colours of tokens that several sources guessed."""

from io import StringIO

from draftwood.cli.console.report import explain_colours
from draftwood.cli.console.terminal import BONUS_SOURCE, Paint


def test_several_sources_have_the_colour_of_the_first() -> None:
    paint = Paint("always", StringIO())
    assert paint.source("x", "context+position") == paint.source("x", "context") != paint.source("x", "position")
    line = explain_colours(paint, ["context", "context+head", "head", BONUS_SOURCE])
    assert line.count("copied from the text") == 1
    assert "a draft head" in line
    assert "+" not in line
