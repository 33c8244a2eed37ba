"""Formats of responses: OpenAI's completions and chats, OpenAI's responses, Anthropic's messages."""

from draftwood.serve.formats.base import AnswerReaders, Json, Order, ResponseFormat, SampleOutput, is_last
from draftwood.serve.formats.completions import DONE_EVENT, CompletionFormat
from draftwood.serve.formats.messages import MessageFormat
from draftwood.serve.formats.responses import ResponsesFormat
from draftwood.serve.formats.usage import summarize
