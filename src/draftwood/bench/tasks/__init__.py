"""Benchmark prompts: bundled, from files, or from the hub."""

from draftwood.bench.tasks.load import Task, TaskPrompt, load_tasks
