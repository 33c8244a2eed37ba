"""Peers within a run: started, crashed, absent or given twice."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from draftwood import SamplingParams
from draftwood.bench.records.methods import PEER, BenchMethod
from draftwood.bench.records.run_folder import write_records
from draftwood.bench.run import peer_engines, runner
from draftwood.bench.run.engines import SampleResult
from draftwood.bench.settings import BenchSettings
from draftwood.config import ModelOptions
from draftwood.errors import DraftwoodError, OptionError
from draftwood.targets.load import load_target
from tests.tools.bench import bench


class Stranger:
    """A peer without a process."""

    def warm_up(self, prompts: Any, params: SamplingParams) -> None: ...

    def generate(self, prompts: Any, params: SamplingParams) -> list[list[SampleResult]]:
        return [[SampleResult([1, 2], "hm", "length", len(prompt), 2, 0.5, 1.0, 0.5, None, None)] for prompt in prompts]


def test_records_of_absent_peer_are_kept_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = BenchMethod(label="vllm", kind=PEER, drafter="vllm", note="version 1")
    monkeypatch.setattr(runner, "start_peers", lambda *_: ([(method, Stranger())], {}))
    first = bench(tmp_path / "a", drafters=("plain",), tasks=("code",))
    assert [m["label"] for m in first.manifest.methods] == ["plain", "vllm"]
    assert {r.lossless and r.lossless.verdict for r in first.records} == {None, "different"}
    unjudged = [replace(record, lossless=None) for record in first.records]
    write_records(tmp_path / "a", unjudged)
    monkeypatch.setattr(runner, "start_peers", lambda *_: ([], {"vllm": "vllm is not installed"}))
    second = bench(tmp_path / "a", drafters=("plain",), tasks=("code",))
    assert second.records == unjudged
    assert second.manifest.methods == first.manifest.methods
    assert second.manifest.absent == {"vllm": "vllm is not installed"}


def test_run_without_methods_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "check_peers", lambda _: [])
    monkeypatch.setattr(runner, "start_peers", lambda *_: ([], {"vllm": "vllm is not installed"}))
    with pytest.raises(DraftwoodError, match="vllm is not installed"):
        bench(tmp_path / "a", drafters=(), peers=("vllm",))


def test_interrupt_during_peer_start_stops_running_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Started:
        facts: ClassVar[dict[str, str]] = {}

        def __init__(self, spec: Any, *_: Any) -> None:
            if spec.name == "llamacpp":
                raise KeyboardInterrupt
            self.name = spec.name

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr(peer_engines, "Peer", Started)
    monkeypatch.setattr(peer_engines, "find_gguf", lambda *_: None)
    monkeypatch.setattr(peer_engines, "resolve", lambda *_: SimpleNamespace(path=Path("model")))
    settings = BenchSettings(peers=("transformers", "llamacpp"))
    with pytest.raises(KeyboardInterrupt), ExitStack() as closing:
        peer_engines.start_peers(settings, load_target(ModelOptions(model="tiny")), 100, closing)
    assert closed == ["transformers"]


def test_a_peer_named_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="twice"):
        peer_engines.check_peers(BenchSettings(peers=("transformers", "transformers")))
