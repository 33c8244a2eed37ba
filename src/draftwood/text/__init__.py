"""Tokenizers, chat templates and incremental decoding."""

from draftwood.text.bytes import ByteTokenizer
from draftwood.text.chat import Message, Tool
from draftwood.text.incremental import IncrementalDecoder
from draftwood.text.tokenizer import TextCodec, Tokenizer
