"""An answer, collected and displayed while it is generated."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from draftwood.cli.console.terminal import Screen
from draftwood.config import SamplingParams
from draftwood.engine import RequestStats, TokenEvent, TokenLogprobs
from draftwood.llm import LLM


@dataclass(kw_only=True)
class Answer:
    """Tokens received so far. Incomplete if the request was cancelled, which ``finish_reason`` says."""

    texts: list[str] = field(default_factory=list)  # one per token
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = "cancelled"
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def collect(self, events: Iterator[TokenEvent], screen: Screen | None = None) -> None:
        """Append events as they arrive. Display them if there is a screen."""
        for event in events:
            self.add(event, screen)

    def add(self, event: TokenEvent, screen: Screen | None = None) -> None:
        if screen is not None:
            screen.answer(event.texts, event.sources)
        self.texts += event.texts
        self.token_ids += event.token_ids
        self.sources += event.sources
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason or self.finish_reason
        self.stats = event.stats

    def show(self, screen: Screen) -> None:
        screen.answer(self.texts, self.sources)

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "sources": self.sources,
            "logprobs": [{"token_id": i, "logprob": p, "top": [*map(list, top)]} for i, p, top in self.logprobs]
            or None,
            "stats": self.stats.as_dict(),
        }


def generate_answers(
    llm: LLM, ids: list[int], params: SamplingParams, screen: Screen | None, prediction: str | None = None
) -> list[Answer]:
    """Generate ``n`` answers. A single answer is streamed to the screen, if there is one.

    Ctrl-C ends the requests: answers that were not finished then are incomplete. Before the first token it is raised.
    """
    request = llm.request(ids, params, prediction=prediction)
    answers = {request_id: Answer() for request_id in llm.engine.submit(request)}
    try:
        for event in llm.engine.events(list(answers)):
            answers[event.request_id].add(event, screen)
    except KeyboardInterrupt:
        if not any(answer.token_ids for answer in answers.values()):
            raise
    finally:
        for request_id in answers:
            llm.engine.cancel(request_id)
        llm.keep_memory(request.drafter)
    return list(answers.values())
