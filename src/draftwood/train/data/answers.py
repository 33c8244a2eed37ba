"""Run many conversations with the target at once: after an answer, the next turn joins the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftwood.config import EngineOptions
from draftwood.drafters import make_factory
from draftwood.engine import Engine, GenerationRequest
from draftwood.progress import Progress
from draftwood.targets import Loaded
from draftwood.train.data.dialogue import Dialogue

OnTokens = Callable[[int], None]  # called with the number of new tokens


@dataclass(slots=True)
class _Answer:
    """The received part of an answer."""

    dialogue: Dialogue
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Answerer:
    """Answers conversations. ``drafter`` changes the speed, and the answers only at numeric ties."""

    def __init__(self, loaded: Loaded, drafter: str, batch: int, progress: Progress | None = None) -> None:
        options = EngineOptions(budget=1 if drafter == "plain" else "auto", max_batch=batch)
        self._engine = Engine(loaded.target, loaded.codec, options, progress)
        self._factory = make_factory(drafter, None, loaded.target, codec=loaded.codec)

    def run(self, dialogues: Sequence[Dialogue], on_tokens: OnTokens, on_end: Callable[[], None]) -> None:
        """Run all conversations and call ``on_end`` after each.

        The engine is empty before and after, so that results do not depend on earlier calls."""
        running: dict[int, _Answer] = {}

        def submit_next(dialogue: Dialogue) -> None:
            ask = dialogue.ask()
            if ask is None:
                on_end()
                return
            request = GenerationRequest(
                prompt_ids=tuple(ask.prompt_ids),
                params=ask.params,
                drafter=self._factory,
                with_text=dialogue.reads_text,
            )
            (request_id,) = self._engine.submit(request)
            running[request_id] = _Answer(dialogue)

        try:
            for dialogue in dialogues:
                submit_next(dialogue)
            while running:
                # Turns submitted inside the loop start at once; their events come in the next round.
                for event in self._engine.events(list(running)):
                    answer = running[event.request_id]
                    answer.token_ids += event.token_ids
                    answer.texts += event.texts
                    on_tokens(len(event.token_ids))
                    if event.finish_reason is not None:
                        del running[event.request_id]
                        answer.dialogue.take(answer.token_ids, "".join(answer.texts))
                        submit_next(answer.dialogue)
        finally:
            self._engine.clear()
