"""Registered drafters describe themselves; documents and commands read their tables from the registry."""

from __future__ import annotations

import pytest

from draftwood.drafters import drafter_class, drafter_classes

MAX_CELL = 100  # characters of a table cell


@pytest.mark.parametrize("name", drafter_classes())
def test_every_drafter_describes_itself(name: str) -> None:
    cls = drafter_class(name)
    assert cls.name == name
    for text in (cls.summary, cls.guesses_from, cls.tree_shape):
        assert text
        assert len(text) <= MAX_CELL
        assert "\n" not in text
        assert not text.endswith(".")
