"""Looks into JSON that is still being written: the start of a call, and the end of an object."""

import re

KEYS = ("name", "type", "id")
ARGUMENTS = ("arguments", "parameters")
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)(")?')


class UnfinishedError(Exception):
    """The text ends before it is known whether it is a call."""


class NoCallError(Exception):
    """The text is not the start of a call in the usual order."""


def read_head(text: str) -> tuple[str, int]:
    """The name of a call, and where its arguments start: an object that follows the name."""
    place, name = _expect(text, 0, "{"), ""
    while True:
        key, place = _read_string(text, place)
        place = _expect(text, place, ":")
        if key in ARGUMENTS and name:
            return name, _expect(text, place, "{") - 1
        if key not in KEYS:
            raise NoCallError
        value, place = _read_string(text, place)
        name = value if key == "name" else name
        place = _expect(text, place, ",")


def _expect(text: str, place: int, character: str) -> int:
    """The place after the character, which may follow blanks."""
    while place < len(text) and text[place].isspace():
        place += 1
    if place == len(text):
        raise UnfinishedError
    if text[place] != character:
        raise NoCallError
    return place + 1


def _read_string(text: str, place: int) -> tuple[str, int]:
    start = _expect(text, place, '"') - 1
    found = STRING.match(text, start)
    if found is None or (found[2] is None and found.end() < len(text) - 1):
        raise NoCallError
    if found[2] is None:
        raise UnfinishedError
    return found[1], found.end()


class ObjectEnd:
    """Finds the end of a JSON object that comes in parts."""

    def __init__(self) -> None:
        self.is_reached = False
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def find(self, text: str) -> int:
        """Characters of the next part that belong to the object."""
        for index, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_reached = True
                    return index + 1
        return len(text)
