"""How models write calls. The chat template shows which format a model was trained on."""

import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass

from draftwood.text import TextCodec

LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls are JSON objects with a name and arguments, or a name and an object of arguments, between marks."""

    name: str
    arguments: str  # key of the arguments
    start: str = ""  # before all calls
    opening: str = ""  # before each call
    middle: str = ""  # between the name of a call and its arguments; empty: they are one object
    closing: str = ""  # after each call
    separator: str = ""  # between calls
    end: str = ""  # after all calls
    anywhere: bool = False  # whether calls may follow other text
    mark: str = ""  # what models write before ``start``: text, or a special token, which no text shows
    several: bool = True  # whether templates accept several calls in one answer

    def new_id(self) -> str:
        """An id for a call. Mistral's templates accept nine letters and digits only."""
        if self in (MISTRAL, MISTRAL_ARGS):
            return "".join(secrets.choice(LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


HERMES = ToolFormat(
    "hermes", "arguments", opening="<tool_call>\n", closing="\n</tool_call>", separator="\n", anywhere=True
)
LLAMA = ToolFormat("llama", "parameters", separator="; ", mark="<|python_tag|>", several=False)
MISTRAL = ToolFormat("mistral", "arguments", start="[", separator=", ", end="]", mark="[TOOL_CALLS]")
MISTRAL_ARGS = ToolFormat("mistral-args", "", opening="[TOOL_CALLS]", middle="[ARGS]", anywhere=True)  # since 2025


def format_of(template: str | None) -> ToolFormat:
    """The format of a chat template; without a known one the most usual, which we then explain to the model."""
    if template is None or not mentions_tools(template) or "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    return LLAMA if "<|python_tag|>" in template or '"parameters": ' in template else HERMES


def marks_of(form: ToolFormat, codec: TextCodec) -> dict[str, int]:
    """The marks of a format that are special tokens, which decoded texts lack. Llama's marks other calls than those of
    functions."""
    return {} if form is LLAMA else special_marks((form.mark, form.opening, form.middle), codec)


def special_marks(texts: Iterable[str], codec: TextCodec) -> dict[str, int]:
    """Those of the texts that are one special token each."""
    ids = {text: codec.encode(text, add_special=False) for text in texts if text}
    return {text: found[0] for text, found in ids.items() if len(found) == 1 and found[0] in codec.special_token_ids}


def mentions_tools(template: str | None) -> bool:
    return template is not None and re.search(r"\btools\b", template) is not None
