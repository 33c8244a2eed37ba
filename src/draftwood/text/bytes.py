"""The byte-level tokenizer of the built-in model."""

from collections.abc import Sequence

from draftwood.text.chat import Message, Tool, check_messages

BOS, EOS = 256, 257
VOCAB_SIZE = 258


class ByteTokenizer:
    """Every byte is a token; two more tokens mark the start and the end of a text."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    special_token_ids = frozenset((BOS, EOS))
    has_chat = True
    tool_template = None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [BOS] * add_special + list(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        names = {} if skip_special else {BOS: b"<bos>", EOS: b"<eos>"}
        pieces = (bytes((i,)) if i < 256 else names.get(i, b"") for i in ids)
        return b"".join(pieces).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        text = self.decode([token_id], skip_special=False)
        return text if text.isprintable() else repr(bytes((token_id,)))[2:-1]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else self.token_text(token_id).encode()

    def apply_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> list[int]:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in check_messages(messages))
        return self.encode(text + "assistant: " * add_generation_prompt)
