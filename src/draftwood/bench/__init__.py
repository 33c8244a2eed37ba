"""Benchmarks that anyone can repeat: every method on the same prompts in one run, and what came of it."""

from draftwood.bench.settings import DEFAULT_METHODS, BenchSettings, split_methods
