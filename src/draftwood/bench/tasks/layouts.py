"""Converts rows of prompt files to prompts, for the layouts of known benchmarks.

A row is recognized by its fields, not by the file name, so original benchmark files need no conversion. If a data set
holds material rather than a question (a function to complete, an article to summarize), the instruction is added here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftwood.corpus import has_lone_surrogate
from draftwood.errors import PromptError

MBPP_SPLITS = (range(1, 11), range(11, 511), range(511, 601), range(601, 975))  # few-shot, test, validation, train
MBPP_TEST = MBPP_SPLITS[1]

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPrompt:
    """The user's turns of one conversation."""

    id: str  # unique within its task
    turns: tuple[str, ...]
    category: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLayout:
    """How one kind of file stores a prompt."""

    name: str
    fields: str  # for error messages
    fits: Callable[[Row], bool]
    turns: Callable[[Row], list[str]]


def _has(*names: str) -> Callable[[Row], bool]:
    """Return a test that all these fields are strings."""
    return lambda row: all(isinstance(row.get(name), str) for name in names)


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _humaneval(row: Row) -> list[str]:
    return [f"Write out this Python function in full, signature included, as one code block.\n\n{row['prompt']}"]


def _classeval(row: Row) -> list[str]:
    return [f"Write out the Python class {row['class_name']} with every method filled in.\n\n{row['skeleton']}"]


def _mbpp(row: Row) -> list[str]:
    # The sanitized file keeps the text under another name.
    task, tests = row.get("text") or row["prompt"], "\n".join(row["test_list"])
    return [f"{task}\n\nAnswer with Python code that these tests accept:\n\n{tests}"]


def _livecodebench(row: Row) -> list[str]:
    start = row.get("starter_code")
    how = (
        f"Begin with this code and keep its names:\n\n```python\n{start}\n```"
        if isinstance(start, str) and start.strip()
        else "The program reads standard input and writes its answer to standard output."
    )
    return [f"Solve this problem with a Python program, given as one code block.\n\n{row['question_content']}\n\n{how}"]


def _alpaca(row: Row) -> list[str]:
    extra = row.get("input") or row.get("context")  # as named in Dolly
    return ["\n\n".join(text for text in (row["instruction"], extra) if isinstance(text, str) and text.strip())]


def _read_messages(row: Row) -> list[tuple[str, str]] | None:
    """Return (role, text) pairs of either conversation format."""
    for field, speaker, text in (("messages", "role", "content"), ("conversations", "from", "value")):
        messages = row.get(field)
        if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
            pairs = [(m.get(speaker), m.get(text)) for m in messages]
            if all(isinstance(part, str) for pair in pairs for part in pair):
                return pairs
    return None


def _conversation(row: Row) -> list[str]:
    """Return the user's turns; a system message is put before the first."""
    messages = _read_messages(row) or []
    turns = [text for speaker, text in messages if speaker in ("user", "human")]
    rules = [text for speaker, text in messages if speaker == "system" and text.strip()]
    return ["\n\n".join([*rules, turns[0]]), *turns[1:]] if turns else []


# The first match is used, so layouts with more or rarer fields come first.
LAYOUTS = (
    PromptLayout(
        name="turns",  # bundled prompts, MT-Bench, Spec-Bench, EAGLE's folders
        fields="turns",
        fits=lambda row: _is_text_list(row.get("turns")),
        turns=lambda row: list(row["turns"]),
    ),
    PromptLayout(
        name="prompts",  # MT-Bench on the hub
        fields="prompt (a list)",
        fits=lambda row: _is_text_list(row.get("prompt")),
        turns=lambda row: list(row["prompt"]),
    ),
    PromptLayout(name="humaneval", fields="prompt + entry_point", fits=_has("prompt", "entry_point"), turns=_humaneval),
    PromptLayout(
        name="classeval", fields="skeleton + class_name", fits=_has("skeleton", "class_name"), turns=_classeval
    ),
    PromptLayout(
        name="mbpp",
        fields="text or prompt + test_list",
        fits=lambda row: _is_text_list(row.get("test_list")) and (_has("text")(row) or _has("prompt")(row)),
        turns=_mbpp,
    ),
    PromptLayout(name="livecodebench", fields="question_content", fits=_has("question_content"), turns=_livecodebench),
    PromptLayout(
        name="cnn_dm", fields="article", fits=_has("article"), turns=lambda row: [f"Summarize: {row['article']}"]
    ),
    PromptLayout(name="alpaca", fields="instruction", fits=_has("instruction"), turns=_alpaca),
    PromptLayout(
        name="conversation",
        fields="messages or conversations",
        fits=lambda row: _read_messages(row) is not None,
        turns=_conversation,
    ),
    PromptLayout(name="gsm8k", fields="question", fits=_has("question"), turns=lambda row: [row["question"]]),
    PromptLayout(name="aime", fields="problem", fits=_has("problem"), turns=lambda row: [row["problem"]]),
    PromptLayout(name="aime", fields="Problem", fits=_has("Problem"), turns=lambda row: [row["Problem"]]),
    PromptLayout(name="prompt", fields="prompt", fits=_has("prompt"), turns=lambda row: [row["prompt"]]),
)
_ID_FIELDS = ("id", "question_id", "task_id", "prompt_id", "ID")
_CATEGORY_FIELDS = ("category", "difficulty")


def find_layout(row: Row) -> PromptLayout | None:
    return next((layout for layout in LAYOUTS if layout.fits(row)), None)


def parse_prompts(rows: Iterable[tuple[str, Row]], task: str) -> list[TaskPrompt]:
    """Convert the rows of a task to prompts, in order.

    A row with a repeated id gets a suffix (``12#2``): results are stored by id, and published data sets contain such
    rows.
    """
    prompts: list[TaskPrompt] = []
    layouts, taken = set(), set[str]()
    for index, (place, row) in enumerate(rows):
        layout = find_layout(row)
        if layout is None:
            raise PromptError(
                f"{place} has no known layout",
                got=f"the fields {', '.join(map(str, row)) or '(none)'}",
                allowed=dict.fromkeys(layout.fields for layout in LAYOUTS),
                next_step='Write prompts as {"id": ..., "turns": ["..."]}, or exclude this task with --tasks.',
            )
        turns = tuple(layout.turns(row))
        if not turns or not all(turn.strip() for turn in turns):
            raise PromptError(
                f"{place} has an empty prompt", got=f"turns {list(turns)}"[:80], allowed="non-empty turns"
            )
        layouts.add(layout.name)
        name = _make_unique(_prompt_id(row, task, index), taken)
        taken.add(name)
        if any(map(has_lone_surrogate, (name, *turns))):
            raise PromptError(f"{place} is not valid Unicode", got=ascii(turns)[:80])
        prompts.append(TaskPrompt(id=name, turns=turns, category=_category(row)))
    return _select_mbpp_test(prompts) if layouts == {"mbpp"} else prompts


def _prompt_id(row: Row, task: str, index: int) -> str:
    """Return the row's id; numeric and missing ids are prefixed with the task."""
    own = next((row[name] for name in _ID_FIELDS if isinstance(row.get(name), (str, int)) and row[name] != ""), index)
    return f"{task}/{own}" if str(own).isdecimal() else str(own)


def _make_unique(name: str, taken: set[str]) -> str:
    count, free = 1, name
    while free in taken:
        count += 1
        free = f"{name}#{count}"
    return free


def _category(row: Row) -> str | None:
    return next((row[name] for name in _CATEGORY_FIELDS if isinstance(row.get(name), str) and row[name]), None)


def _select_mbpp_test(prompts: list[TaskPrompt]) -> list[TaskPrompt]:
    """Select the test split from a file with all four splits; leave any other file unchanged."""
    numbers = [int(tail) if (tail := prompt.id.rpartition("/")[2]).isdecimal() else -1 for prompt in prompts]
    if not all(any(number in split for number in numbers) for split in MBPP_SPLITS):
        return prompts
    return [prompt for prompt, number in zip(prompts, numbers, strict=True) if number in MBPP_TEST]
