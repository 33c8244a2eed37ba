"""Compares greedy outputs with plain decoding of the same prompt, as soon as both are available."""

from collections.abc import Sequence
from dataclasses import replace

from draftwood.bench.records import (
    DIFFERENT,
    DRAFTER,
    ERROR,
    IDENTICAL,
    TIE,
    BenchMethod,
    LosslessVerdict,
    RequestRecord,
)
from draftwood.check import explain
from draftwood.compare import first_difference
from draftwood.llm import LLM
from draftwood.targets import Loaded


class LosslessJudge:
    """Stores the outputs of plain decoding and compares the others with them."""

    def __init__(self, loaded: Loaded, methods: Sequence[BenchMethod], *, is_greedy: bool) -> None:
        self._loaded = loaded
        self._methods = {method.label: method for method in methods}
        self._is_greedy = is_greedy
        self._plain: dict[tuple[str, str, int], list[int]] = {}  # by task, prompt, turn
        self._llm: LLM | None = None  # created at the first difference

    def learn(self, record: RequestRecord) -> None:
        method = self._methods.get(record.method)
        if method is not None and method.is_plain:
            self._plain.setdefault((record.task, record.prompt, record.turn), record.token_ids)

    def can_judge(self, record: RequestRecord) -> bool:
        """Whether the record is greedy, successful, not judge yet, and its method and plain output are available."""
        method = self._methods.get(record.method)
        is_open = self._is_greedy and record.error is None and record.lossless is None
        answered = (record.task, record.prompt, record.turn) in self._plain
        return is_open and answered and method is not None and not method.is_plain

    def judge(self, record: RequestRecord, sent: list[int]) -> RequestRecord:
        """Return the record with a verdict; ``sent`` is the prompt."""
        plain = self._plain[record.task, record.prompt, record.turn]
        position = first_difference(record.token_ids, plain)
        if position is None:
            return replace(record, lossless=LosslessVerdict(verdict=IDENTICAL))
        gap, is_tie = self._measure_gap(record, plain, sent)
        wrong = ERROR if self._methods[record.method].kind == DRAFTER else DIFFERENT
        return replace(record, lossless=LosslessVerdict(verdict=TIE if is_tie else wrong, position=position, gap=gap))

    def _measure_gap(self, record: RequestRecord, plain: list[int], sent: list[int]) -> tuple[float | None, bool]:
        """Return the logit gap between the two tokens (None if unknown), and whether it is a tie."""
        if self._llm is None:
            self._llm = LLM.from_target(self._loaded.target, self._loaded.codec, drafter="plain", budget=1)
        try:
            difference = explain(self._llm, sent, record.token_ids, plain)
        except Exception:  # noqa: BLE001 - a peer's token ids may be invalid here, and a check must not lose a result
            return None, False
        assert difference is not None
        return difference.gap, difference.is_tie
