"""Does a tree pay here? Plain decoding, chains, trees and trees with a head, on one machine, model and set of prompts.

All ways answer the same prompts in turn, so that a disturbance hits all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftwood.config import SamplingParams
from draftwood.engine import RequestStats
from draftwood.llm import LLM, Prompt
from draftwood.progress import Progress, report

BUDGETS = (4, 8, 16, 32, 60)
WARM_UP_TOKENS = 8


class Way(NamedTuple):
    """One way to decode."""

    label: str
    drafter: str
    options: Mapping[str, Any]
    budget: int | str


@dataclass(kw_only=True, slots=True)
class Account:
    """What a way took and gave on all prompts."""

    way: Way
    tokens: int = 0
    cycles: int = 0
    nodes: int = 0
    plain_cycles: int = 0  # without any guess
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "verify", "total"), 0.0))

    def add(self, stats: RequestStats) -> None:
        self.tokens += stats.output_tokens
        self.cycles += stats.cycles
        self.nodes += stats.drafted_nodes
        self.plain_cycles += stats.routes["plain"]
        self.seconds["draft"] += stats.draft_seconds
        self.seconds["verify"] += stats.verify_seconds
        self.seconds["total"] += stats.total_seconds - stats.prefill_seconds

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(self.cycles, 1)

    @property
    def positions(self) -> float:
        """Mean positions of a pass, the root included."""
        return 1.0 + self.nodes / max(self.cycles, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds["total"] if self.seconds["total"] > 0 else 0.0

    def milliseconds(self, part: str) -> float:
        """Of a cycle."""
        return 1e3 * self.seconds[part] / max(self.cycles, 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "way": self.way.label,
            "drafter": self.way.drafter,
            "options": dict(self.way.options),
            "budget": self.way.budget,
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "positions": round(self.positions, 2),
            "plain_share": round(self.plain_cycles / max(self.cycles, 1), 4),
            **{f"{part}_ms": round(self.milliseconds(part), 4) for part in ("draft", "verify", "total")},
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


def list_ways(head: str | None, budgets: Sequence[int] = BUDGETS) -> list[Way]:
    """Plain decoding, and the others at equal budgets and at those that ``auto`` chooses. ``head``: a draft head;
    None: there is none."""
    drafting: list[tuple[str, str, dict[str, Any]]] = [("chain", "sam", {}), ("tree", "blend", {})]
    if head is not None:
        drafting.append(("tree and head", "blend", {"sources": "context+transition+position+head", "head": head}))
    sizes: list[int | str] = [*budgets, "auto"]
    return [
        Way("plain", "plain", {}, 1),
        *(Way(label, drafter, options, size) for label, drafter, options in drafting for size in sizes),
    ]


def explain(
    new_llm: Callable[..., LLM],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    ways: Sequence[Way],
    progress: Progress | None = None,
) -> list[Account]:
    """``new_llm`` creates an LLM on a loaded model: ``functools.partial(LLM.from_target, target, codec)``."""
    accounts = [Account(way=way) for way in ways]
    with ExitStack() as stack:
        llms = [
            stack.enter_context(new_llm(drafter=way.drafter, drafter_options=way.options, budget=way.budget))
            for way in ways
        ]
        for number, llm in enumerate(llms):
            report(progress, "warming up", number, len(llms))
            llm.generate(prompts[:1], SamplingParams(max_tokens=WARM_UP_TOKENS))
        total = len(prompts) * len(llms)
        for number, prompt in enumerate(prompts):
            for place, (llm, account) in enumerate(zip(llms, accounts, strict=True)):
                report(progress, "measuring", number * len(llms) + place, total)
                account.add(llm.generate([prompt], params)[0].stats)
        report(progress, "measuring", total, total)
    return accounts


def best_of(accounts: Sequence[Account]) -> Account:
    return max(accounts, key=lambda account: account.tokens_per_second)
