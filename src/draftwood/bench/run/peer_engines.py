"""Peers in a benchmark: which of those asked for are there, started, and asked like our own methods."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from draftwood.bench.peers import Peer, PeerModel, PeerSpec, find_gguf, find_peer
from draftwood.bench.records import PEER, BenchMethod, BenchSettings
from draftwood.bench.run.engines import SampleResult
from draftwood.bench.tasks import Task
from draftwood.config import SamplingParams
from draftwood.errors import DraftwoodError, OptionError
from draftwood.models import BUILT_IN, resolve
from draftwood.progress import Progress, report
from draftwood.prompts import prompt_ids
from draftwood.targets import Loaded
from draftwood.text import TextCodec

TURN_TOKENS = 16  # at most, that a chat template puts around an answer


class PeerEngine:
    """One peer; it answers one prompt at a time."""

    def __init__(self, peer: Peer, codec: TextCodec) -> None:
        self._peer, self._codec = peer, codec

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[SampleResult]]:
        return [[self._sample(prompt, params, index) for index in range(params.n)] for prompt in prompts]

    def warm_up(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self.answer(prompts, params)

    def _sample(self, prompt: list[int], params: SamplingParams, index: int) -> SampleResult:
        seed = None if params.seed is None else params.seed + index
        given = self._peer.generate(prompt, replace(params, n=1, seed=seed))
        return SampleResult(
            token_ids=given.token_ids,
            text=self._codec.decode(given.token_ids),
            finish_reason=given.finish_reason,
            prompt_tokens=len(prompt),
            decode_tokens=given.decode_tokens,
            decode_seconds=given.decode_seconds,
            total_seconds=given.total_seconds,
            first_token_seconds=given.first_token_seconds,
            peak_bytes=given.peak_bytes,
            stats=given.stats,
        )


Started = list[tuple[BenchMethod, PeerEngine]]


def check_peers(settings: BenchSettings) -> list[PeerSpec]:
    """The peers that were asked for; refuses what cannot be asked of them. Needs no model."""
    specs = [find_peer(name) for name in settings.peers]
    if len(set(settings.peers)) < len(specs):
        raise OptionError("A peer is named twice", got=sorted(settings.peers))
    if specs and settings.batch > 1:
        raise OptionError("Peers answer one prompt at a time", got=f"batch {settings.batch}", allowed=1)
    if specs and settings.model == BUILT_IN:
        raise OptionError("Peers do not know the built-in random model", got=settings.model)
    return specs


def longest_request(tasks: Sequence[Task], loaded: Loaded, settings: BenchSettings) -> int:
    """Positions of the longest request, all turns and answers of it together: peers must know before they start."""
    longest = 0
    for prompt in (prompt for task in tasks for prompt in task.prompts):
        messages = [{"role": "user", "content": turn} for turn in prompt.turns]
        sent = len(prompt_ids(loaded.codec, messages, raw=settings.raw))
        longest = max(longest, sent + len(prompt.turns) * (settings.max_tokens + TURN_TOKENS))
    return longest


def start_peers(
    settings: BenchSettings, loaded: Loaded, max_context: int, closing: ExitStack, progress: Progress | None = None
) -> tuple[Started, dict[str, str]]:
    """The peers that answer, and why the others do not. What ``closing`` closes ends them, whatever happens.

    ``max_context``: positions that the longest request takes.
    """
    info = loaded.target.info
    specs = check_peers(settings)
    if not specs:
        return [], {}
    model = PeerModel(
        folder=resolve(settings.model, progress).path,
        gguf=find_gguf(settings.model, progress) if any(spec.needs_gguf for spec in specs) else None,
        dtype=str(info.dtype).removeprefix("torch."),
        device=info.device.type,
        max_context=min(max_context, info.context_length),
    )
    started: Started = []
    missing: dict[str, str] = {}
    for number, (name, spec) in enumerate(zip(settings.peers, specs, strict=True)):
        report(progress, f"starting {name}", number, len(specs))
        try:
            peer = Peer(spec, model, progress)
        except DraftwoodError as error:
            missing[name] = str(error)
            continue
        closing.callback(peer.close)
        facts = ", ".join(f"{fact} {value}" for fact, value in peer.facts.items())
        note = "; ".join(filter(None, [facts, spec.note]))
        method = BenchMethod(label=name, kind=PEER, drafter=spec.name, options=dict(spec.options), note=note)
        started.append((method, PeerEngine(peer, loaded.codec)))
    report(progress, "starting peers", 1, 1)
    return started, missing
