"""Conversations with the target, many at a time: whenever one has its answer, its next turn joins the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftwood.config import EngineOptions
from draftwood.drafters import make_factory
from draftwood.engine import Engine, GenerationRequest
from draftwood.progress import Progress
from draftwood.targets import Loaded
from draftwood.train.data.dialogue import Dialogue

Heard = Callable[[int], None]  # tokens that were just written


@dataclass(slots=True)
class _Answer:
    """What has arrived of an answer."""

    dialogue: Dialogue
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Answerer:
    """``drafter`` changes how quickly answers come, and which only at numeric ties; with ``plain`` no time is spent on
    measuring costs."""

    def __init__(self, loaded: Loaded, drafter: str, batch: int, progress: Progress | None = None) -> None:
        options = EngineOptions(budget=1 if drafter == "plain" else "auto", max_batch=batch)
        self._engine = Engine(loaded.target, loaded.codec, options, progress)
        self._factory = make_factory(drafter, None, loaded.target, codec=loaded.codec)

    def run(self, dialogues: Sequence[Dialogue], heard: Heard, ended: Callable[[], None]) -> None:
        """Has all these conversations; ``ended`` is called after each. The engine is empty before and after, so that
        they run together in the same way whatever ran before."""
        under_way: dict[int, _Answer] = {}

        def go_on(dialogue: Dialogue) -> None:
            ask = dialogue.ask()
            if ask is None:
                ended()
                return
            request = GenerationRequest(
                prompt_ids=tuple(ask.prompt_ids),
                params=ask.params,
                drafter=self._factory,
                with_text=dialogue.reads_text,
            )
            (request_id,) = self._engine.submit(request)
            under_way[request_id] = _Answer(dialogue)

        try:
            for dialogue in dialogues:
                go_on(dialogue)
            while under_way:
                # Turns that are submitted inside the loop run along at once; their events wait for the next round.
                for event in self._engine.events(list(under_way)):
                    answer = under_way[event.request_id]
                    answer.token_ids += event.token_ids
                    answer.texts += event.texts
                    heard(len(event.token_ids))
                    if event.finish_reason is not None:
                        del under_way[event.request_id]
                        answer.dialogue.take(answer.token_ids, "".join(answer.texts))
                        go_on(answer.dialogue)
        finally:
            self._engine.clear()
