"""Benchmarks that anyone can repeat: every method on the same prompts in one run, and what came of it."""
