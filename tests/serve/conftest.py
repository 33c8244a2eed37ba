"""Skips the tests of the server if the extra ``serve`` is not installed."""

from importlib.util import find_spec

if not all(map(find_spec, ("uvicorn", "starlette", "prometheus_client"))):
    collect_ignore_glob = ["test_*.py"]
