"""Turns and commands of a chat."""

from typing import Any

from draftwood.cli.console import SEPARATOR, Answer, Screen, legend, pluralize, stats_line
from draftwood.config import SamplingParams
from draftwood.engine import RequestStats
from draftwood.errors import DraftwoodError
from draftwood.llm import LLM

HELP = "/help, /reset, /stats, /system TEXT, /quit. Ctrl-C stops an answer."


class Conversation:
    def __init__(
        self, llm: LLM, params: SamplingParams, screen: Screen, system: str | None, budget: str, *, interactive: bool
    ) -> None:
        """``interactive``: if a message cannot be answered, print the error and continue."""
        self._llm, self._params, self._screen = llm, params, screen
        self._system, self._budget, self._interactive = system, budget, interactive
        self._turns: list[dict[str, str]] = []
        self._answers: list[Answer] = []

    def handle(self, line: str) -> bool:
        """Answer a message or run a command. Return False to end the chat."""
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self._turns.clear()
            self._screen.note("Started a new conversation.")
        elif command == "/system":
            self._system = rest.strip() or None
            self._screen.note("Set the system message." if self._system else "Removed the system message.")
        elif command == "/stats":
            self._screen.note(self._format_stats())
        elif line.startswith("/"):
            self._screen.note(HELP if command == "/help" else f"Unknown command {command}. {HELP}")
        elif line:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        turns = [*self._turns, {"role": "user", "content": text}]
        answer = Answer()
        try:
            events = self._llm.stream_chat([*system, *turns], self._params)
        except DraftwoodError as error:  # usually the conversation exceeds the context
            if not self._interactive:
                raise
            self._screen.note(f"{error}\n  Type /reset to start a new conversation.")
            return
        try:
            answer.collect(events, self._screen)
        except KeyboardInterrupt:
            answer.finish_reason = "cancelled"
        finally:
            del events  # cancels the request
        self._screen.out.write("\n")
        self._turns = [*turns, {"role": "assistant", "content": answer.text}]
        self._answers.append(answer)
        reused = f"{answer.stats.reused_tokens} of {answer.stats.prompt_tokens} prompt tokens reused"
        self._screen.note(stats_line(answer.stats, answer.finish_reason, reused))

    def _format_stats(self) -> str:
        if not self._answers:
            return "There are no answers yet."

        names = ("output_tokens", "cycles", "drafted_nodes", "prefill_seconds", "total_seconds")
        sums: dict[str, Any] = {name: sum(getattr(answer.stats, name) for answer in self._answers) for name in names}
        figures = stats_line(RequestStats(**sums), None, self._budget, self._llm.drafter)
        sources = [source for answer in self._answers for source in answer.sources]
        colours = legend(self._screen.out, sources)
        return pluralize(len(self._answers), "answer") + SEPARATOR + figures + (f"\n{colours}" if colours else "")
