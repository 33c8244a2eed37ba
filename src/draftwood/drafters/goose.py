"""GOOSE: a spine of copied text with branches from the transition table, sized by how often copies are accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from draftwood.compiled import BYPASSES as COMPILED_BYPASSES
from draftwood.compiled import MAX_SPINE, VOTES, CompiledSpines, SpineRules, observe_spines, propose_spines
from draftwood.drafters.base import DraftRequest, VerifiedBatch, VerifiedTree
from draftwood.drafters.checks import check_choice, check_flag, check_fraction, check_int, check_ngrams, check_order
from draftwood.drafters.transition import HARVESTS, TransitionDrafter
from draftwood.growth import BRANCH, SPINE, Anchor, SpineBudget, grow_spine_tree
from draftwood.sources import CompiledContextMatch, ContextMatch, Match, SuffixAutomaton, new_context
from draftwood.tree import BYPASS, SOURCE_NUMBERS, DraftTree

BYPASSES = ("auto", "copied", "matched", "agreed", "never")
MATCHES = ("ngrams", "suffix")
CONSENSUS = ("sizes", "places", "off")
SPINES = ("context", "transition", "off")
EXTENSIONS = ("best", "levels")
TINY = 1e-9  # entries with score 0 are padding
BYPASS_BUDGET = 20  # from this budget on, a tree yields more than the bare chain


@dataclass(frozen=True, kw_only=True, slots=True)
class GooseOptions:
    # where the spine comes from
    spine: str = "context"  # "off": branches only; "transition": best successors of the table, always, without bypass
    match: str = "ngrams"  # min_ngram to max_ngram tokens; "suffix": min_ngram or more, repeating, without consensus
    min_ngram: int = 3  # shortest n-gram to look up
    max_ngram: int = 5  # longest n-gram to look up
    max_draft: int = 40  # maximum number of copied tokens; 20 in the paper
    repeat: bool = False  # whether a copy that reaches the end of the text starts over
    # when to verify the bare chain instead of a tree
    bypass: str = "auto"  # "copied", "matched": by that length; "agreed": long copy, all n-gram sizes agree; "never"
    bypass_length: int = 8  # minimum number of copied or matched tokens
    consensus: str = "sizes"  # or if two n-gram sizes agree; "places": from two different places; "off"
    # the transition table
    top_k: int = 10  # successors kept per context
    bigrams: bool = True  # whether successors of token pairs are kept, besides those of single tokens
    harvest: str = "all"  # learn from every verified node, or only from "accepted" ones
    static: bool = True  # start from the successor table of the model, if `draftwood tune` has built one
    table_megabytes: int = 128  # memory for token pairs
    # how to divide the budget
    spine_share: float = 0.5  # share of the remaining budget for branches along the spine
    spine_branches: bool = True  # whether branches may leave the spine below the root
    min_score: float = 0.01  # successors with a lower score are skipped
    branch_depth: int = 6  # maximum number of tokens in a branch
    extension: str = "best"  # leftover budget extends the likeliest branch; "levels": all branches, level by level
    # how to adapt to the acceptance rate
    smoothing: float = 0.3  # weight of the last cycle in the running acceptance rate of the spine
    start_rate: float = 0.3  # assumed acceptance rate of spine tokens at the start
    low_rate: float = 0.2  # acceptance rate of the spine below which it gets the low_ratio
    high_rate: float = 0.4  # acceptance rate of the spine above which it gets the high_ratio
    low_ratio: float = 0.15  # share of the budget for the spine below low_rate
    middle_ratio: float = 0.30  # share of the budget for the spine between low_rate and high_rate
    high_ratio: float = 0.50  # share of the budget for the spine above high_rate

    def __post_init__(self) -> None:
        check_ngrams(self)
        check_int(self, 1, "max_draft", "bypass_length", "top_k", "branch_depth")
        check_int(self, 1, "table_megabytes", high=1 << 20)
        check_fraction(self, "spine_share", "min_score", "smoothing", "start_rate", "low_rate", "high_rate")
        check_fraction(self, "low_ratio", "middle_ratio", "high_ratio")
        check_flag(self, "repeat", "bigrams", "static", "spine_branches")
        check_choice(self, "spine", SPINES)
        check_choice(self, "match", MATCHES)
        check_choice(self, "bypass", BYPASSES)
        check_choice(self, "consensus", CONSENSUS)
        check_choice(self, "harvest", HARVESTS)
        check_choice(self, "extension", EXTENSIONS)
        check_order(self, "low_rate", "high_rate")


class GooseDrafter(TransitionDrafter):
    """With the usual options the trees of all requests are grown in one call (compiled/spines.h)."""

    name = "goose"
    summary = "A spine of copied text with branches from recycled logits, sized by the running acceptance rate"
    guesses_from = "the text so far, and logits of earlier passes"
    tree_shape = "spine of copied tokens with branches"
    copies_text = True
    Options = GooseOptions
    drafts_in_batch = True
    can_rest = True

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._context = self._new_context()
        self._context.extend(request.known_text)
        self._own_rate = self.options.start_rate
        self._spines = self._compile()
        self.learns_in_batch = self._spines is not None and self.options.harvest == "all"
        if self._spines is not None:
            self._spines.start(*super().anchor)

    @classmethod
    def propose_batch(cls, drafters: Sequence["GooseDrafter"], budgets: Sequence[int]) -> list[DraftTree]:
        spines = [drafter._spines for drafter in drafters]
        compiled = [each for each in spines if each is not None]
        if len(compiled) < len(spines):
            return [drafter._propose(budget) for drafter, budget in zip(drafters, budgets, strict=True)]
        return propose_spines(compiled, budgets)

    @classmethod
    def observe_batch(cls, drafters: Sequence["GooseDrafter"], verified: VerifiedBatch) -> None:
        outcomes, first_rows, top = verified
        assert top is not None
        best = top.first(drafters[0].options.top_k)
        spines = [drafter._spines for drafter in drafters if drafter._spines is not None]
        observe_spines(spines, outcomes, first_rows, best.ids, best.probs())

    def propose(self, budget: int) -> DraftTree:
        return self.propose_batch([self], [budget])[0]

    def _propose(self, budget: int) -> DraftTree:
        options = self.options
        match = self._match()
        if options.spine == "transition":
            tokens, trust = self._best_chain()
        else:
            tokens, trust = (match.tokens, match.trust()) if match else ([], [])
        if match and budget > 1 and self._should_bypass(match, budget):
            size = budget - 1
            return DraftTree.chain([self.anchor.root, *tokens[:size]], SPINE, [1.0, *trust[:size]], BYPASS)
        plan = SpineBudget(
            spine_ratio=self._spine_ratio(),
            spine_share=options.spine_share,
            min_score=max(options.min_score, TINY),
            branch_depth=options.branch_depth,
            best_first=options.extension == "best",
            spine_branches=options.spine_branches,
        )
        tree = grow_spine_tree(self.anchor, tokens, trust, self.memory.successors, budget, plan)
        return tree if len(tree) > 1 else DraftTree.root_only(self.anchor.root)

    def observe(self, verified: VerifiedTree) -> None:
        self._context.extend(verified.emitted)
        super().observe(verified)
        if self._spines is not None:
            self._spines.follow(verified.tree, verified.path, verified.emitted)
            return
        sources = verified.tree.sources
        drafted = sources.count(SPINE)
        if drafted:
            accepted = sum(sources[node] == SPINE for node in verified.path)
            self._own_rate += self.options.smoothing * (accepted / drafted - self._own_rate)

    def skip(self, token_ids: Sequence[int]) -> None:
        self._context.extend(token_ids)
        super().skip(token_ids)
        if self._spines is not None:
            self._spines.start(*[*self.anchor, *token_ids][-2:])

    @property
    def anchor(self) -> Anchor:
        return super().anchor if self._spines is None else Anchor(*self._spines.end)

    def _advance(self, emitted: Sequence[int]) -> None:
        if self._spines is None:  # else C follows the text
            super()._advance(emitted)

    @property
    def spine_rate(self) -> float:
        """Running acceptance rate of copied tokens."""
        return self._own_rate if self._spines is None else self._spines.spine_rate

    def _compile(self) -> CompiledSpines | None:
        """The request in C; None where these options, or this machine, need Python."""
        options, table, context = self.options, self.memory.compiled, self._context
        usual = options.spine != "transition" and options.extension == "best" and options.max_draft <= MAX_SPINE
        if table is None or not usual or not isinstance(context, CompiledContextMatch):
            return None
        index = None if options.spine == "off" else context.index
        return CompiledSpines(_compile_rules(options), table, index, options.start_rate)

    def _new_context(self) -> ContextMatch | CompiledContextMatch | SuffixAutomaton:
        options = self.options
        if options.match == "suffix":
            return SuffixAutomaton()
        return new_context(range(options.min_ngram, options.max_ngram + 1), repeat=options.repeat)

    def _match(self) -> Match | None:
        options = self.options
        match = self._context.match(options.max_draft) if options.spine == "context" else None
        return match if match and match.length >= options.min_ngram else None

    def _best_chain(self) -> tuple[list[int], list[float]]:
        """A chain that follows the best successor of each token, and their scores."""
        previous, token = self.anchor
        tokens: list[int] = []
        trust: list[float] = []
        while len(tokens) < self.options.max_draft:
            best, scores = self.memory.successors(previous, token)
            if not best or scores[0] < TINY:
                break
            previous, token = token, best[0]
            tokens.append(token)
            trust.append(scores[0])
        return tokens, trust

    def _should_bypass(self, match: Match, budget: int) -> bool:
        options = self.options
        kind = options.bypass
        if kind == "auto":
            kind = "copied" if budget < BYPASS_BUDGET else "never"
        if kind == "never":
            return False
        if kind == "agreed":
            num_sizes = options.max_ngram - options.min_ngram + 1 if options.match == "ngrams" else 1
            return len(match.tokens) >= options.bypass_length and match.num_agreeing == num_sizes
        length = match.length if kind == "matched" else len(match.tokens)
        votes = {"sizes": match.num_agreeing, "places": match.num_places, "off": 0}[options.consensus]
        return length >= options.bypass_length or votes >= 2

    def _spine_ratio(self) -> float:
        options, rate = self.options, self.spine_rate
        if rate < options.low_rate:
            return float(options.low_ratio)
        return float(options.middle_ratio if rate < options.high_rate else options.high_ratio)


@lru_cache(maxsize=64)
def _compile_rules(options: GooseOptions) -> SpineRules:
    return SpineRules(
        max_draft=options.max_draft,
        repeat=options.repeat,
        bypass=COMPILED_BYPASSES.index(options.bypass),
        bypass_length=options.bypass_length,
        bypass_budget=BYPASS_BUDGET,
        votes=VOTES.index(options.consensus),
        branch_depth=options.branch_depth,
        spine_branches=options.spine_branches,
        spine_source=SOURCE_NUMBERS[SPINE],
        branch_source=SOURCE_NUMBERS[BRANCH],
        spine_share=options.spine_share,
        min_score=max(options.min_score, TINY),
        smoothing=options.smoothing,
        low_rate=options.low_rate,
        high_rate=options.high_rate,
        low_ratio=options.low_ratio,
        middle_ratio=options.middle_ratio,
        high_ratio=options.high_ratio,
    )
