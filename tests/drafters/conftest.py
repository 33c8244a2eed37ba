"""Fixtures of the drafter tests."""

from tests.tools.cli import _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.engine import llm  # noqa: F401 - a fixture
