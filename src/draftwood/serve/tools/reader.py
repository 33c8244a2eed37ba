"""Reads calls out of a growing answer. The result does not depend on how the text is cut into parts."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftwood.serve.tools.formats import ToolFormat
from draftwood.serve.tools.scan import NoCallError, ObjectEnd, UnfinishedError, read_head

BLANKS = " \t\r\n"
MAX_HEAD = 160  # characters of a name with its marks, at least
HEAD = re.compile(r"\s{0,4}([\w.-]{1,64})(?:\[CALL_ID\][\w-]{0,40})?(?:\[ARGS\])?\s{0,4}", re.ASCII)


class ToolCall(NamedTuple):
    """A part of a call; its first part has an id and a name."""

    place: int  # among the calls of the answer
    arguments: str
    call_id: str = ""
    name: str = ""

    def extend(self, arguments: str) -> "ToolCall":
        return self._replace(arguments=self.arguments + arguments)


@dataclass
class AnswerDelta:
    """What a part of the text added."""

    content: str = ""
    thoughts: str = ""  # of a model that thinks before its answer
    calls: list[ToolCall] = field(default_factory=list)


class ToolReader:
    """The content and the calls of one answer. Blanks beside a call are dropped.

    Calls are passed on as they are written, arguments in parts. Text that turns out not to be a call is content.
    """

    def __init__(self, form: ToolFormat, *, parallel: bool) -> None:
        self._form, self._max_calls = form, None if parallel else 1
        self._read = self._read_text if form.anywhere else self._read_start
        self._text = ""  # not read yet
        self._mark = form.opening.rstrip()
        self._opening = ""  # text before the current call, in case that it is none
        self._end = ObjectEnd()
        self._skips_blanks = False  # after a call
        self._is_kept = True  # whether the current call is passed on
        self._delta = AnswerDelta()
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool) -> AnswerDelta:
        """What the next part of the answer adds."""
        self._text += text
        self._delta = AnswerDelta()
        while self._text and self._read(is_last):
            pass
        return self._delta

    # Each state reads from the start of the text. It returns whether the next one can go on, else waits for more text.

    def _read_text(self, is_last: bool) -> bool:
        """Text with calls between marks."""
        if self._skips_blanks:
            self._text = self._text.lstrip(BLANKS)
            self._skips_blanks = not self._text
        before, mark, after = self._text.partition(self._mark)
        if mark:
            content = before.rstrip(BLANKS)
            self._add_content(content)
            self._opening = before[len(content) :] + mark
            self._text, self._read = after, self._read_call
            return True
        size = len(self._text) - _num_started(self._text, self._mark)
        if is_last:
            size = len(self._text) if not self.num_calls else len(self._text.rstrip(BLANKS))
        else:
            size = len(self._text[:size].rstrip(BLANKS))
        self._add_content(self._text[:size])
        self._text = self._text[size:] if not is_last else ""
        return False

    def _read_start(self, is_last: bool) -> bool:
        """The start of an answer that is either text or calls."""
        text = self._text.lstrip(BLANKS)
        if self._form.mark.startswith(text) and not is_last:
            return False
        text = text.removeprefix(self._form.mark).lstrip(BLANKS)
        start = self._form.start
        calls = text.removeprefix(start).lstrip(BLANKS) if text.startswith(start) else text
        if not calls and not is_last:
            return False
        is_call = text.startswith(start) and calls.startswith("{")
        self._opening = self._text[: len(self._text) - len(calls)]
        self._text, self._read = (calls, self._read_call) if is_call else (self._text, self._read_rest)
        return True

    def _read_call(self, is_last: bool) -> bool:
        """The start of a call, up to its arguments."""
        if self._form.middle:
            return self._read_name(is_last)
        try:
            name, start = read_head(self._text)
        except UnfinishedError:
            if is_last:
                self._read = self._read_no_call
            return is_last
        except NoCallError:
            self._read = self._read_unusual if self._form.anywhere else self._read_no_call
            return True
        self._start_call(name)
        self._text, self._end, self._read = self._text[start:], ObjectEnd(), self._read_arguments
        return True

    def _read_arguments(self, is_last: bool) -> bool:
        size = self._end.find(self._text)
        self._add_arguments(self._text[:size])
        self._text = self._text[size:]
        if self._end.is_reached and self._form.anywhere:
            self._read = self._read_closing if self._form.closing else self._read_text
        elif self._end.is_reached:
            self._read = self._read_next
        return True

    def _read_name(self, is_last: bool) -> bool:
        """A name before an object of arguments."""
        head, brace, _ = self._text.partition("{")
        if not brace and not is_last and len(head) <= MAX_HEAD:
            return False
        found = HEAD.fullmatch(head) if brace else None
        if found is None:
            self._add_content(self._opening)
            self._read = self._read_text
        else:
            self._start_call(found[1])
            self._text, self._end, self._read = self._text[len(head) :], ObjectEnd(), self._read_arguments
        return True

    def _read_closing(self, is_last: bool) -> bool:
        """What follows the arguments, up to the closing mark."""
        _, mark, after = self._text.partition(self._form.closing.lstrip())
        if mark:
            self._text, self._read = after, self._read_text
        elif is_last:
            self._text = ""
        return bool(mark)

    def _read_next(self, is_last: bool) -> bool:
        """What follows the arguments where calls have no marks: a further call, or the end of all calls."""
        rest = self._text.lstrip(BLANKS).removeprefix("}").lstrip(BLANKS)
        after = rest.lstrip(f";,{BLANKS}")
        if not after:
            self._text = "" if is_last else self._text
            return False
        self._opening = ""
        is_call = after != rest and after.startswith("{")
        self._read = self._read_call if is_call else self._read_rest
        self._text = after if is_call else rest.removeprefix(self._form.end)
        return True

    def _read_unusual(self, is_last: bool) -> bool:
        """A call in another order, or no call: known when the closing mark is there."""
        body, mark, after = self._text.partition(self._form.closing.lstrip())
        if not mark and not is_last:
            return False
        call = _parse_call(body)
        if call is None:
            self._add_content(self._opening + body + mark)
        else:
            self._start_call(call["name"])
            self._add_arguments(call["arguments"])
        self._text, self._read = after, self._read_text
        return True

    def _read_no_call(self, is_last: bool) -> bool:
        self._text, self._read = self._opening + self._text, self._read_rest
        return True

    def _read_rest(self, is_last: bool) -> bool:
        if self._skips_blanks:
            self._text = self._text.lstrip(BLANKS)
            self._skips_blanks = not self._text
        self._add_content(self._text)
        self._text = ""
        return False

    def _add_content(self, text: str) -> None:
        self._delta.content += text

    def _start_call(self, name: str) -> None:
        self._skips_blanks = True
        self._is_kept = self.num_calls != self._max_calls
        if self._is_kept:
            self._delta.calls.append(ToolCall(self.num_calls, "", self._form.new_id(), name))
            self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        calls = self._delta.calls
        if not self._is_kept or not text:
            return
        if calls and calls[-1].place == self.num_calls - 1:
            calls[-1] = calls[-1].extend(text)
        else:
            calls.append(ToolCall(self.num_calls - 1, text))


def _num_started(text: str, mark: str) -> int:
    """Characters at the end of the text that are the start of the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": call["name"], "arguments": text}
