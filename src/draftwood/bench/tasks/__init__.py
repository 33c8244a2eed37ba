"""Benchmark prompts: bundled, from files, or from the hub."""

from draftwood.bench.tasks.load import Task, TaskPrompt, load_tasks

__all__ = ["Task", "TaskPrompt", "load_tasks"]
