"""The tokenizer interface, and the tokenizer of a model folder."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import tokenizers

from draftwood.disk import parse_json
from draftwood.errors import ModelError, PromptError
from draftwood.text.chat import Message, Tool, render_chat


def _byte_characters() -> dict[str, int]:
    """Maps the characters of a byte-level vocabulary to bytes: printable ones to themselves, those from 256 on in
    order to the others."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_characters()


class TextCodec(Protocol):
    """The tokenizer interface. Ids are those of the target's vocabulary."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are no text, such as the end of a turn; ``decode`` skips them."""

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""

    @property
    def tool_template(self) -> str | None:
        """The chat template for conversations with tools, which may ignore them; None: no template."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Encodes ``text``; ``add_special`` adds the tokens that the model expects around it (often none)."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decodes ``ids``. Bytes of incomplete characters become the replacement character."""

    def token_text(self, token_id: int) -> str:
        """Returns a token for display: never empty, on one line."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text; they may be part of a character."""

    def apply_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Encodes a conversation with the chat template. ``tools`` are for the ``tool_template``."""


class Tokenizer:
    """The tokenizer of a model folder: ``tokenizer.json``, with special tokens and chat template from other files."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        """``tool_template``: another chat template for conversations with tools."""
        self._backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Reads the folder; raises an error that names a missing or damaged file."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                "The model folder has no tokenizer.json",
                got=folder,
                next_step="Copy the tokenizer.json of the model into this folder.",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read", got=error, next_step="Fetch the model again.") from error
        # Some files contain batch settings that would silently truncate or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _read_special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        return cls(
            backend,
            eos_token_ids=_read_eos_ids(folder, backend, special_tokens),
            special_tokens=special_tokens,
            chat_template=_read_chat_template(folder, config),
            tool_template=_named_templates(config).get("tool_use"),
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id: ids in between may be unused."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def has_chat(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise PromptError("Only text can be encoded", got=repr(text)[:80], allowed="a string")
        try:
            # Unlike ``encode``, this lets other threads run meanwhile.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
        except TypeError as error:  # a lone surrogate, which UTF-8 cannot represent
            raise PromptError("The text is not valid Unicode", got=ascii(text)[:80]) from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_text(self, token_id: int) -> str:
        text = self._backend.decode([token_id], skip_special_tokens=False)
        if not text or "\ufffd" in text:  # part of a character: show its spelling in the vocabulary
            text = self._backend.id_to_token(token_id) or f"<{token_id}>"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

    def token_bytes(self, token_id: int) -> bytes:
        spelled = self._backend.id_to_token(token_id) or ""
        if token_id in self._added_ids:
            return spelled.encode()
        if self._is_byte_level and all(character in BYTES for character in spelled):
            return bytes(BYTES[character] for character in spelled)
        if one_byte := re.fullmatch("<0x([0-9A-F]{2})>", spelled):
            return bytes.fromhex(one_byte[1])
        return spelled.replace("\u2581", " ").encode()  # SentencePiece's space

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether characters of the vocabulary stand for bytes."""
        decoder = self._backend.decoder
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def apply_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> list[int]:
        template = self.tool_template if tools else self.chat_template
        if template is None:
            raise PromptError(
                "This model has no chat template, so messages cannot be turned into a prompt",
                next_step="Generate from plain text, or put a chat_template.jinja into the model folder.",
            )
        text = render_chat(template, messages, self._special_tokens, add_generation_prompt, tools)
        return self.encode(text, add_special=False)  # the template adds the special tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON", got=error, next_step="Fetch the model again.") from error
    return content if isinstance(content, dict) else {}


def _read_special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Reads ``bos_token`` and similar fields, given as text or as an object with the text in ``content``."""
    found: dict[str, str] = {}
    for source in sources:
        for key, value in source.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if key.endswith("_token") and isinstance(text, str):
                found.setdefault(key, text)
    return found


def _read_eos_ids(folder: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> list[int]:
    """Collects the end-of-sequence ids from all files of the folder."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        found += [index for index in (value if isinstance(value, list) else [value]) if isinstance(index, int)]
    named = backend.token_to_id(special_tokens.get("eos_token", ""))
    if named is not None:
        found.append(named)
    return list(dict.fromkeys(found))


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Reads ``chat_template.jinja`` if it exists, else the (default) template of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is not UTF-8 text", got=error, next_step="Fetch the model again.") from error
    template = config.get("chat_template")
    return template if isinstance(template, str) else _named_templates(config).get("default")


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, where tokenizer_config.json has several: ``default``, ``tool_use`` and so on."""
    templates = config.get("chat_template")
    entries = [entry for entry in templates if isinstance(entry, Mapping)] if isinstance(templates, list) else []
    named = {str(entry.get("name")): entry.get("template") for entry in entries}
    return {name: template for name, template in named.items() if isinstance(template, str)}
