"""Events that the engine emits while requests run."""

from typing import NamedTuple

from draftwood.engine.stats import RequestStats
from draftwood.tree import DraftTree

BONUS_SOURCE = "target"


class TokenLogprobs(NamedTuple):
    """The target's own view of one emitted token, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, best first


class CycleDetail(NamedTuple):
    """How a cycle came about, for requests with ``with_cycles``. Seconds are totals of the request so far."""

    target_probs: tuple[float, ...]  # of each node given its parent, before temperature and filters; of the root 1
    emitted_probs: tuple[float, ...]  # of each emitted token
    draft_seconds: float
    verify_seconds: float
    total_seconds: float


class TokenEvent(NamedTuple):
    """The tokens of one cycle of a request."""

    request_id: int
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]  # which source drafted each token; "target": the target itself
    texts: tuple[str, ...]  # the text each token made certain; may be empty for some
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None  # None while the request runs; "stop" or "length" in its last event
    stats: RequestStats
    tree: DraftTree  # the tree that was verified
    path: tuple[int, ...]  # its accepted nodes
    detail: CycleDetail | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)
