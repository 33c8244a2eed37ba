"""Base class of drafters with a transition table, which learn from the logits of every verified node."""

from collections.abc import Sequence
from typing import Any

from draftwood.drafters.base import Drafter, DraftRequest, PromptRows, VerifiedTree
from draftwood.drafters.checks import check_top_k
from draftwood.growth import Anchor
from draftwood.sources import IdRows, RowTable, ScoreRows, SuccessorArrays, TransitionTable, load_successors
from draftwood.targets import TargetInfo, TopRows

HARVESTS = ("all", "accepted")  # every verified node, or only the accepted path
LESSON = 0.03  # tokens that later trees gain from the successors of a verified node


class TransitionDrafter(Drafter):
    """Maintains the table and the last two tokens; subclasses implement ``propose``.

    Their options include ``top_k``, ``harvest``, ``bigrams``, ``table_megabytes`` and ``static``.
    """

    wants_prompt_logits = True
    can_rest = True
    memory: TransitionTable

    @classmethod
    def share(cls, options: Any, target: TargetInfo) -> SuccessorArrays | None:
        check_top_k(options.top_k, target.vocab_size)
        return load_successors(target, options.top_k) if options.static else None

    @classmethod
    def new_memory(cls, options: Any, target: TargetInfo, shared: Any) -> TransitionTable:
        num_pairs = RowTable.capacity_within(options.table_megabytes << 20, options.top_k) if options.bigrams else 0
        return TransitionTable(target.vocab_size, options.top_k, num_pairs=num_pairs, initial=shared)

    def __init__(self, options: Any, shared: Any, memory: Any = None) -> None:
        super().__init__(options, shared, memory)
        self.wants_top = options.top_k
        self.lesson = LESSON if options.harvest == "all" else 0.0

    def begin(self, request: DraftRequest) -> None:
        self._prompt_ids = request.prompt_ids
        self._tail = list(request.prompt_ids[-2:])

    @property
    def anchor(self) -> Anchor:
        return Anchor(self._tail[0], self._tail[-1])

    def read_prompt(self, rows: PromptRows) -> None:
        if not len(rows.logits):
            return
        start, prompt_ids = rows.start, self._prompt_ids
        tokens = prompt_ids[start : start + len(rows.logits)]
        first = prompt_ids[max(start - 1, 0)]
        self.memory.learn([first, *tokens[:-1]], tokens, *_with_probs(rows.best(self.options.top_k)))

    def observe(self, verified: VerifiedTree) -> None:
        self._harvest(verified)

    def skip(self, token_ids: Sequence[int]) -> None:
        self._advance(token_ids)

    def _harvest(self, verified: VerifiedTree) -> tuple[IdRows, ScoreRows] | None:
        """Fill the table, and return the rows of all nodes if all are read."""
        tree, path = verified.tree, verified.path
        harvests_all = self.options.harvest == "all"
        rows = _with_probs(verified.best(self.options.top_k, None if harvests_all else path))
        if harvests_all:
            # The accepted path is written last: if two nodes have the same context, its row wins.
            self.memory.learn_tree(self.anchor.previous, tree.tokens, tree.parents, path, *rows)
        else:
            tokens = [tree.tokens[node] for node in path]
            self.memory.learn([self.anchor.previous, *tokens[:-1]], tokens, *rows)
        self._advance(verified.emitted)
        return rows if harvests_all else None

    def _advance(self, emitted: Sequence[int]) -> None:
        self._tail = list(emitted[-2:]) if len(emitted) > 1 else [self._tail[-1], *emitted]


def _with_probs(top: TopRows) -> tuple[IdRows, ScoreRows]:
    """Ids and probabilities of the top K tokens of the rows: [n, K] each."""
    return top.ids, top.probs()
