"""Turns and commands of a chat."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from draftwood.cli.console import SEPARATOR, Answer, Screen, explain_colours, legend, pluralize, speed_line, stats_line
from draftwood.config import SamplingParams, parse_value
from draftwood.disk import new_file
from draftwood.engine import RequestStats, TokenEvent
from draftwood.errors import DraftwoodError, OptionError, PromptError
from draftwood.llm import LLM
from draftwood.prompts import read_text

HELP = '''\
/continue        go on with an answer that was cut
/drafter NAME    change the drafter
/load FILE       continue a saved conversation
/save FILE       save the conversation
/set NAME VALUE  change sampling, as in /set temperature 0.7; /set lists the values
/stats           statistics of all answers
/system TEXT     change the system message
/reset, /quit    start a new conversation, leave
Ctrl-C stops an answer. For several lines, type """ before and after them, or end a line with \\.'''
HINT = "/help lists commands, /quit leaves. Ctrl-C stops an answer."
_CHANGEABLE = [
    f.name for f in fields(SamplingParams) if f.name not in ("n", "logprobs", "stop_token_ids", "ignore_eos")
]


class Conversation:
    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        screen: Screen,
        system: str | None,
        budget: str,
        *,
        interactive: bool,
        all_stats: bool = False,
    ) -> None:
        """``interactive``: if a message cannot be answered, print the error and continue."""
        self._llm, self._params, self._screen = llm, params, screen
        self._system, self._budget = system, budget
        self._interactive, self._all_stats = interactive, all_stats
        self._drafter: str | None = None  # the one that was loaded
        self._turns: list[dict[str, str]] = []
        self._answers: list[Answer] = []
        self._last_ids: list[int] | None = None  # of the last answer; None: known as text only
        self._unfinished = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/continue": lambda _: self._continue(),
            "/drafter": self._change_drafter,
            "/help": lambda _: self._screen.note(HELP),
            "/load": self._load,
            "/reset": lambda _: self._reset(),
            "/save": self._save,
            "/set": self._change_sampling,
            "/stats": lambda _: self._screen.note(self._format_stats()),
            "/system": self._change_system,
        }

    def handle(self, line: str) -> bool:
        """Answer a message or run a command. Return False to end the chat."""
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        try:
            if command in self._commands:
                self._commands[command](rest.strip())
            elif line.startswith("/"):
                self._screen.note(f"Unknown command {command}. {HINT}")
            elif line:
                self._answer(line)
        except DraftwoodError as error:
            if not self._interactive:
                raise
            self._screen.note(f"{error}{'' if line.startswith('/') else _RESET_HINT}")
        return True

    def _answer(self, text: str) -> None:
        turns = [*self._turns, {"role": "user", "content": text}]
        answer = self._show(self._llm.stream_chat(self._messages(turns), self._params, drafter=self._drafter))
        self._turns = [*turns, {"role": "assistant", "content": answer.text}]
        self._last_ids = answer.token_ids

    def _continue(self) -> None:
        if not self._turns or not self._unfinished:
            self._screen.note("There is no answer that was cut.")
            return
        last = self._turns[-1]
        tokenizer = self._llm.tokenizer
        written = self._last_ids if self._last_ids is not None else tokenizer.encode(last["content"], add_special=False)
        prompt_ids = [*tokenizer.apply_chat(self._messages(self._turns[:-1])), *written]
        answer = self._show(self._llm.stream(prompt_ids, self._params, drafter=self._drafter, reuse=True))
        self._turns[-1] = {**last, "content": last["content"] + answer.text}
        self._last_ids = [*written, *answer.token_ids]

    def _messages(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}, *turns] if self._system else turns

    def _show(self, events: Iterator[TokenEvent]) -> Answer:
        """Print an answer while it is generated, and its statistics. Ctrl-C ends it."""
        answer = Answer()
        try:
            answer.collect(events, self._screen)
        except KeyboardInterrupt:
            answer.finish_reason = "cancelled"
        finally:
            del events  # cancels the request
        self._screen.out.write("\n")
        self._answers.append(answer)
        self._unfinished = answer.finish_reason != "stop"
        more = ["/continue goes on"] if self._interactive and self._unfinished else []
        if self._all_stats:
            reused = f"{answer.stats.reused_tokens} of {answer.stats.prompt_tokens} prompt tokens reused"
            self._screen.note(stats_line(answer.stats, answer.finish_reason, reused, *more))
        else:
            self._screen.note(speed_line(answer.stats, answer.finish_reason, *more))
            if len(self._answers) == 1:
                self._screen.note_painted(explain_colours(self._screen.out, answer.sources))
        return answer

    def _reset(self) -> None:
        self._turns, self._last_ids, self._unfinished = [], None, False
        self._screen.note("Started a new conversation.")

    def _change_system(self, text: str) -> None:
        self._system = text or None
        self._screen.note("Set the system message." if self._system else "Removed the system message.")

    def _change_drafter(self, name: str) -> None:
        if name:
            self._llm.factory(name)  # raises for unknown names
            self._drafter = name
        self._screen.note(f"drafter {self._drafter or self._llm.drafter}")

    def _change_sampling(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if not name:
            values = [f"{name} {getattr(self._params, name)}" for name in _CHANGEABLE if name != "stop"]
            self._screen.note(SEPARATOR.join(values))
            return
        if name not in _CHANGEABLE or not value:
            raise OptionError("Cannot set this", got=text, allowed=_CHANGEABLE, next_step="As in: /set temperature 0.7")
        changed: dict[str, Any] = {name: value if name == "stop" else parse_value(value.strip())}
        self._params = replace(self._params, **changed)
        self._screen.note(f"{name} {getattr(self._params, name)}")

    def _save(self, name: str) -> None:
        if not name:
            raise OptionError("The name of the file is missing", next_step="As in: /save talk.json")
        content = {"system": self._system, "messages": self._turns, "unfinished": self._unfinished}
        with new_file(Path(name).expanduser()) as temporary:
            temporary.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        self._screen.note(f"Saved {pluralize(len(self._turns), 'message')} to {name}.")

    def _load(self, name: str) -> None:
        content = _read_conversation(name)
        self._system, self._turns = content.get("system"), content["messages"]
        self._last_ids, self._unfinished = None, bool(content.get("unfinished"))
        self._screen.note(f"Loaded {pluralize(len(self._turns), 'message')} from {name}.")

    def _format_stats(self) -> str:
        if not self._answers:
            return "There are no answers yet."

        names = ("output_tokens", "cycles", "drafted_nodes", "prefill_seconds", "total_seconds")
        sums: dict[str, Any] = {name: sum(getattr(answer.stats, name) for answer in self._answers) for name in names}
        figures = stats_line(RequestStats(**sums), None, self._budget, self._drafter or self._llm.drafter)
        sources = [source for answer in self._answers for source in answer.sources]
        colours = legend(self._screen.out, sources)
        return pluralize(len(self._answers), "answer") + SEPARATOR + figures + (f"\n{colours}" if colours else "")


_RESET_HINT = "\n  Type /reset to start a new conversation."


def _read_conversation(name: str) -> dict[str, Any]:
    if not name:
        raise OptionError("The name of the file is missing", next_step="As in: /load talk.json")
    try:
        content: Any = json.loads(read_text(Path(name).expanduser()))
    except ValueError as error:
        raise PromptError(f"{name} is not valid JSON", got=error) from error
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise PromptError(f"{name} is not a saved conversation", allowed="a file written by /save")
    return {**content, "messages": [{key: message[key] for key in ("role", "content")} for message in messages]}


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
