"""Tools: what a request offers, how the model is told, and the calls in its answers."""

from draftwood.serve.tools.formats import ToolFormat, format_of, marks_of, special_marks
from draftwood.serve.tools.grammars import bind_answer, json_rule
from draftwood.serve.tools.messages import encode_chat, parse_call, parse_result, parse_tool_message
from draftwood.serve.tools.reader import AnswerDelta, ToolCall, ToolReader
from draftwood.serve.tools.requests import Tools, parse_tools
