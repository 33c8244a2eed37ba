"""Fixtures of the neural drafter tests."""

from tests.tools.neural import _one_thread  # noqa: F401 - a fixture
