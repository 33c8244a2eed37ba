"""Peers as benchmark engines: starts the available ones and gives them the interface of a drafter."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from draftwood.bench.peers import Peer, PeerModel, PeerSpec, find_gguf, find_peer
from draftwood.bench.records import PEER, BenchMethod
from draftwood.bench.run.engines import SampleResult
from draftwood.bench.settings import BenchSettings
from draftwood.bench.tasks import Task
from draftwood.config import SamplingParams
from draftwood.errors import DraftwoodError, OptionError
from draftwood.models import BUILT_IN, resolve
from draftwood.progress import Progress, report
from draftwood.prompts import prompt_ids
from draftwood.targets import Loaded
from draftwood.text import TextCodec

TURN_TOKENS = 16  # upper bound for the chat template's tokens around an answer


class PeerEngine:
    """One peer. It runs one prompt at a time."""

    def __init__(self, peer: Peer, codec: TextCodec) -> None:
        self._peer, self._codec = peer, codec

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[SampleResult]]:
        return [[self._sample(prompt, params, index) for index in range(params.n)] for prompt in prompts]

    def warm_up(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self.generate(prompts, params)

    def _sample(self, prompt: list[int], params: SamplingParams, index: int) -> SampleResult:
        seed = None if params.seed is None else params.seed + index
        result = self._peer.generate(prompt, replace(params, n=1, seed=seed))
        return SampleResult(
            token_ids=result.token_ids,
            text=self._codec.decode(result.token_ids),
            finish_reason=result.finish_reason,
            prompt_tokens=len(prompt),
            decode_tokens=result.decode_tokens,
            decode_seconds=result.decode_seconds,
            total_seconds=result.total_seconds,
            first_token_seconds=result.first_token_seconds,
            peak_bytes=result.peak_bytes,
            stats=result.stats,
        )


Started = list[tuple[BenchMethod, PeerEngine]]


def check_peers(settings: BenchSettings) -> list[PeerSpec]:
    """Find the requested peers and reject unsupported settings. Needs no model."""
    specs = [find_peer(name) for name in settings.peers]
    if len(set(settings.peers)) < len(specs):
        raise OptionError("A peer is listed twice", got=sorted(settings.peers))
    if specs and settings.batch > 1:
        raise OptionError("Peers run one prompt at a time", got=f"batch {settings.batch}", allowed=1)
    if specs and settings.model == BUILT_IN:
        raise OptionError("Peers cannot load the built-in random model", got=settings.model)
    return specs


def longest_request(tasks: Sequence[Task], loaded: Loaded, settings: BenchSettings) -> int:
    """Upper bound for the positions of a request, all turns and outputs included. Peers need it when they start."""
    longest = 0
    for prompt in (prompt for task in tasks for prompt in task.prompts):
        messages = [{"role": "user", "content": turn} for turn in prompt.turns]
        sent = len(prompt_ids(loaded.codec, messages, raw=settings.raw))
        longest = max(longest, sent + len(prompt.turns) * (settings.max_tokens + TURN_TOKENS))
    return longest


def start_peers(
    settings: BenchSettings, loaded: Loaded, max_context: int, closing: ExitStack, progress: Progress | None = None
) -> tuple[Started, dict[str, str]]:
    """Start the peers; return those that run, and the reason for each that does not. ``closing`` stops them.

    ``max_context``: positions of the longest request.
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
