"""From a schema, a regular expression or a grammar to a matcher over the tokens of a model.

llguidance does the matching. Its limits bound the work of compiling and of every later step, so a hostile grammar ends
in an error and not in a long wait. Compiling takes milliseconds and lets other threads run.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from draftwood.config import Structured
from draftwood.errors import MissingExtraError, OptionError
from draftwood.structured.matcher import MAX_MESSAGE, Structure
from draftwood.text import TextCodec

MAX_COMPILED = 64  # structures that are kept
MAX_STATES = 50_000  # of the automaton of one structure, one or two kilobytes each
# As json.dumps writes it: one line, one blank after a comma and a colon. So there is no place for endless blanks, and
# nearly everything between two values is forced.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class StructureCompiler:
    """Compiles structures for one model; keeps those that were used last. Safe to use from several threads."""

    def __init__(self, codec: TextCodec, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``vocab_size``: of the logits, which may have more entries than the tokenizer has tokens."""
        self._codec, self._vocab_size, self._eos_token_ids = codec, vocab_size, tuple(eos_token_ids)
        self._tokens: Any = None
        self._compiled: OrderedDict[Structured, Structure] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, structured: Structured) -> Structure:
        """Raises OptionError for a structure that cannot be matched, MissingExtraError without llguidance."""
        with self._lock:
            if structured in self._compiled:
                self._compiled.move_to_end(structured)
                return self._compiled[structured]
            library = _import()
            if self._tokens is None:
                self._tokens = self._read_tokens(library)
        structure = Structure(self._match(library, structured), self._vocab_size, self._tokens.tokenize_bytes)
        structure.check()
        with self._lock:
            self._compiled[structured] = structure
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return structure

    def _match(self, library: ModuleType, structured: Structured) -> Any:
        make = library.LLMatcher
        if structured.kind == "regex":
            grammar = make.grammar_from_regex(structured.text)
        elif structured.kind == "grammar":
            grammar = make.grammar_from_lark(structured.text)
        else:
            grammar = _schema_grammar(library, structured)
        limits = library.LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        matcher = make(self._tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise refusal(structured.kind, matcher.get_error())
        return matcher

    def _read_tokens(self, library: ModuleType) -> Any:
        """The bytes of every token. A model without an end token gets one that it cannot generate: a structure then
        ends where nothing can follow."""
        size = self._vocab_size if self._eos_token_ids else self._vocab_size + 1
        ends = self._eos_token_ids or (self._vocab_size,)
        return library.LLTokenizer(_Tokens(self._codec, size, ends), n_vocab=size, eos_token=list(ends))


class _Tokens:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, codec: TextCodec, size: int, ends: Sequence[int]) -> None:
        self._codec = codec
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted({*codec.special_token_ids, *ends})
        self.tokens = [codec.token_bytes(token) if token < codec.vocab_size else b"" for token in range(size)]

    def __call__(self, text: str) -> list[int]:
        return self._codec.encode(text, add_special=False)


def refusal(kind: str, message: str) -> OptionError:
    """The error for a structure that the library refuses."""
    name = {"json_schema": "JSON schema", "regex": "regular expression"}.get(kind, kind)
    shown = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."
    hint = "Set strict to false to ignore unsupported keywords." if "nimplemented" in message else None
    return OptionError(f"The {name} cannot be used", got=shown, next_step=hint, param="structured")


def _schema_grammar(library: ModuleType, structured: Structured) -> str:
    try:
        schema = json.loads(structured.text)
    except (ValueError, RecursionError) as error:
        raise refusal("json_schema", f"not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise OptionError("A JSON schema must be an object", got=structured.text[:80], param="structured")
    options = {**JSON_LAYOUT, "lenient": not structured.strict}
    try:
        grammar: str = library.LLMatcher.grammar_from_json_schema(structured.text, overrides=options)
    except ValueError as error:
        raise refusal("json_schema", str(error)) from error
    return grammar


def _import() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError("Structured output", "llguidance", "structured") from None
    return llguidance
