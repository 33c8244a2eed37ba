"""GOOSE: the route of a cycle, adaptation of the spine's share, the paper's ablations as options, exact output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.cli.options import drafter_options
from draftwood.drafters import DraftRequest, VerifiedTree, check_drafter
from draftwood.drafters.goose import BYPASSES, CONSENSUS, EXTENSIONS, SPINES, GooseDrafter, GooseOptions
from draftwood.errors import OptionError
from draftwood.growth.spine import BRANCH, SPINE
from draftwood.sources.context import ContextMatch, Match
from draftwood.sources.transitions import TransitionTable
from draftwood.tree import DraftTree
from tests.tools.engine import PROMPTS, make_llm

VOCAB_SIZE = 300

# Three tokens match at one position, followed by 5 or 12 tokens.
SHORT_COPY = [1, 2, 3, 4, 50, 1, 2, 3]
LONG_COPY = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 50, 1, 2, 3]
# Four tokens match: the last three match at the same position, at another one, or with another continuation.
ALL_AGREE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5]
SAME_PLACE = [9, 1, 2, 3, 4, 50, 9, 1, 2, 3]
TWO_PLACES = [9, 1, 2, 3, 4, 60, 1, 2, 3, 4, 50, 9, 1, 2, 3]
DISAGREEING = [9, 1, 2, 3, 4, 60, 1, 2, 3, 5, 50, 9, 1, 2, 3]


def full_table(num_tokens: int = VOCAB_SIZE) -> TransitionTable:
    """Every token has ten likely successors."""
    table = TransitionTable(VOCAB_SIZE, 10, num_pairs=1000)
    tokens = np.arange(num_tokens)
    ids = (tokens[:, None] * 7 + np.arange(10) * 31 + 11) % VOCAB_SIZE
    scores = np.tile(np.linspace(0.3, 0.02, 10), (num_tokens, 1))
    table.learn(tokens.tolist(), tokens.tolist(), ids.astype(np.int32), scores.astype(np.float32))
    return table


def begun(prompt_ids: Sequence[int], table: TransitionTable | None = None, **options: Any) -> GooseDrafter:
    memory = table or TransitionTable(VOCAB_SIZE, 10, num_pairs=1000)
    drafter = GooseDrafter(GooseOptions(**options), None, memory)
    drafter.begin(DraftRequest(prompt_ids, SamplingParams(), np.random.default_rng(0)))
    return drafter


def observe(drafter: GooseDrafter, tree: DraftTree, num_accepted: int, bonus: int = 77) -> None:
    """Observe that the first ``num_accepted`` spine tokens were right."""
    path = range(num_accepted + 1)
    assert tree.sources[1 : num_accepted + 1] == (SPINE,) * num_accepted
    logits = torch.zeros(len(tree), VOCAB_SIZE)
    drafter.observe(
        VerifiedTree(tree, logits, [0] * len(tree), path, [*tree.tokens[1 : num_accepted + 1], bonus], None)
    )


# -- the context match -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8))
def test_match_is_latest_occurrence_of_longest_ngram(text: list[int], max_tokens: int) -> None:
    context = ContextMatch([5, 4, 3])
    context.extend(text)
    found = {}
    for size in (5, 4, 3):
        places = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if places:
            found[size] = places[-1]
    match = context.match(max_tokens)
    if not found:
        assert match is None
        return
    length = max(found)
    start = found[length]
    agreeing = [place for place in found.values() if text[place] == text[start]]
    assert match == Match(text[start : start + max_tokens], length, len(agreeing), len(set(agreeing)))


def test_a_longer_match_is_trusted_more_and_trust_grows() -> None:
    short, long = Match([1, 2, 3], 3).trust(), Match([1, 2, 3], 5).trust()
    assert len(short) == 3
    assert all(0.0 < a < b < 1.0 for a, b in zip(short, long, strict=True))
    assert short == sorted(short)


# -- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "route"),
    [
        (LONG_COPY, {"bypass": "copied"}, "bypass"),  # 12 tokens copied
        (LONG_COPY, {"bypass": "copied", "bypass_length": 12}, "bypass"),
        (LONG_COPY, {"bypass": "copied", "bypass_length": 13}, "spine"),
        (LONG_COPY, {"bypass": "copied", "max_draft": 7}, "spine"),
        (SHORT_COPY, {"bypass": "copied"}, "spine"),
        (LONG_COPY, {"bypass": "matched"}, "spine"),  # 3 tokens matched
        (SHORT_COPY, {"bypass": "matched", "bypass_length": 3}, "bypass"),
        (SHORT_COPY, {"bypass": "matched", "bypass_length": 4}, "spine"),
        (SAME_PLACE, {"bypass": "copied"}, "bypass"),  # by consensus
        (SAME_PLACE, {"bypass": "matched"}, "bypass"),
        (SAME_PLACE, {"bypass": "copied", "consensus": "places"}, "spine"),
        (SAME_PLACE, {"bypass": "copied", "consensus": "off"}, "spine"),
        (TWO_PLACES, {"bypass": "copied", "bypass_length": 99}, "bypass"),
        (TWO_PLACES, {"bypass": "copied", "bypass_length": 99, "consensus": "places"}, "bypass"),
        (DISAGREEING, {"bypass": "copied", "bypass_length": 99}, "spine"),
        (ALL_AGREE, {"bypass": "agreed"}, "bypass"),  # three sizes, 9 tokens
        (ALL_AGREE, {"bypass": "agreed", "bypass_length": 10}, "spine"),  # Algorithm 2 would take it
        (ALL_AGREE, {"bypass": "agreed", "max_ngram": 6}, "spine"),  # no match of six tokens
        (LONG_COPY, {"bypass": "agreed"}, "spine"),  # long, one size of three
        (TWO_PLACES, {"bypass": "agreed", "bypass_length": 1, "min_ngram": 3, "max_ngram": 4}, "bypass"),
        (DISAGREEING, {"bypass": "agreed", "bypass_length": 1, "min_ngram": 3, "max_ngram": 4}, "spine"),
        (LONG_COPY, {"bypass": "agreed", "match": "suffix"}, "bypass"),  # no sizes to compare
        (LONG_COPY, {"bypass": "never"}, "spine"),
        (TWO_PLACES, {"bypass": "never", "consensus": "places"}, "spine"),
        ([1, 2, 3], {"bypass": "copied"}, "branch"),
        (LONG_COPY, {"spine": "off"}, "branch"),
    ],
)
def test_route_of_a_cycle(prompt: list[int], options: dict[str, Any], route: str) -> None:
    tree = begun(prompt, full_table(), **options).propose(60)
    assert tree.route == route
    assert (SPINE in tree.sources) == (route != "branch")
    assert (BRANCH in tree.sources) == (route != "bypass")


@pytest.mark.parametrize(("budget", "route"), [(2, "bypass"), (19, "bypass"), (20, "spine"), (60, "spine")])
def test_small_budgets_go_to_the_bare_chain(budget: int, route: str) -> None:
    assert begun(LONG_COPY, full_table()).propose(budget).route == route


def test_bypass_is_the_copied_chain_within_budget() -> None:
    drafter = begun(LONG_COPY, full_table(), bypass="copied")
    tree = drafter.propose(60)
    assert tree.tokens == (3, *LONG_COPY[3:])
    assert tree.parents == tuple(range(-1, 12))
    assert tree.probs[1:] == tuple(Match(LONG_COPY[3:], 3).trust())
    assert drafter.propose(6).tokens == (3, 4, 5, 6, 7, 8)
    assert len(drafter.propose(1)) == 1


def test_plain_step_without_sources() -> None:
    for options in ({}, {"spine": "off"}, {"spine": "transition"}):
        assert begun([1, 2, 3], **options).propose(60) == DraftTree.root_only(3)
    # Only the table makes the spine, and it is empty.
    for bypass in BYPASSES:
        assert begun(SAME_PLACE, spine="transition", bypass=bypass).propose(60) == DraftTree.root_only(3)


def test_only_the_chain_without_table() -> None:
    tree = begun(LONG_COPY, bypass="never").propose(60)
    assert (tree.tokens, tree.route) == ((3, *LONG_COPY[3:]), "spine")


# -- adaptation ------------------------------------------------------------------------------------------------------


def test_running_rate_is_share_of_accepted_spine_tokens() -> None:
    # A text that repeats after 60 tokens; each cycle continues along it.
    text = list(range(100, 160))
    prompt = [*text, *text[:6]]
    drafter = begun(prompt, full_table(), bypass="never")
    rate, place = 0.3, 6
    for num_accepted in (5, 0, 18, 2):
        tree = drafter.propose(60)
        drafted = tree.sources.count(SPINE)
        observe(drafter, tree, num_accepted, bonus=text[place + num_accepted])
        place += num_accepted + 1
        rate = 0.7 * rate + 0.3 * num_accepted / drafted
        assert drafter.spine_rate == pytest.approx(rate)


def test_bypass_cycles_count_and_cycles_without_a_spine_do_not() -> None:
    drafter = begun(LONG_COPY, full_table(), bypass="copied")
    tree = drafter.propose(60)
    assert tree.route == "bypass"
    observe(drafter, tree, 3)
    assert drafter.spine_rate == pytest.approx(0.7 * 0.3 + 0.3 * 3 / 12)
    rate = drafter.spine_rate
    tree = drafter.propose(60)
    assert tree.route == "branch"
    observe(drafter, tree, 0)
    assert drafter.spine_rate == rate


@pytest.mark.parametrize(
    ("rate", "length"), [(0.0, 9), (0.19, 9), (0.2, 18), (0.3, 18), (0.39, 18), (0.4, 30), (1.0, 30)]
)
def test_the_share_of_the_spine_has_three_tiers(rate: float, length: int) -> None:
    prompt = [*range(100, 150), 100, 101, 102]
    drafter = begun(prompt, full_table(), start_rate=rate, max_draft=40)
    assert drafter.propose(60).sources.count(SPINE) == length
    drafter.begin(DraftRequest(prompt, SamplingParams(), np.random.default_rng(0)))
    assert drafter.spine_rate == rate  # each request starts fresh


def test_the_share_falls_with_failures_and_rises_with_success() -> None:
    prompt = [*range(100, 200), 100, 101, 102]
    drafter = begun(prompt, full_table(), max_draft=40)
    assert drafter.propose(60).sources.count(SPINE) == 18
    for place in (103, 104):
        observe(drafter, drafter.propose(60), 0, bonus=place)  # right, but after a branch
    assert drafter.propose(60).sources.count(SPINE) == 9
    place = 105
    for _ in range(2):
        tree = drafter.propose(60)
        accepted = tree.sources.count(SPINE)
        observe(drafter, tree, accepted, bonus=place + accepted)
        place += accepted + 1
    assert drafter.propose(60).sources.count(SPINE) == 30


# -- the paper's ablations -------------------------------------------------------------------------------------------

# Table 2 of the paper in its own terms; bypass as in the paper unless it is the removed component.
ABLATIONS: dict[str, dict[str, Any]] = {
    "GOOSE": {"bypass": "copied"},
    "GOOSE, section 5.3": {"bypass": "agreed"},
    "w/o spine branches": {"bypass": "copied", "spine_branches": False},
    "w/o bigram adjacency": {"bypass": "copied", "bigrams": False},
    "w/o consensus bypass": {"bypass": "never"},
    "w/o context-match spine": {"bypass": "copied", "spine": "off"},
    "w/o PLD tokens (shape kept)": {"spine": "transition"},
}
WITHOUT_BYPASS = ("w/o consensus bypass", "w/o context-match spine", "w/o PLD tokens (shape kept)")


@pytest.mark.parametrize("budget", [12, 60])
@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_is_exact(name: str, budget: int) -> None:
    with make_llm(drafter="goose", drafter_options=ABLATIONS[name], budget=budget) as llm:
        params = SamplingParams(max_tokens=40)
        completions = llm.generate(PROMPTS, params)
        plain = llm.generate(PROMPTS, params, drafter="plain")
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert any(c.stats.accepted_by_source for c in completions)
    routes = {route for c in completions for route in c.stats.routes}
    assert ("bypass" in routes) == (name not in WITHOUT_BYPASS)


def test_ablation_removes_its_component() -> None:
    def tree(**options: Any) -> DraftTree:
        return begun(LONG_COPY, full_table(), bypass="never", **options).propose(60)

    whole = tree()
    num_spine = whole.sources.count(SPINE)
    assert num_spine == 12
    assert any(whole.sources[node] == BRANCH and 1 <= whole.parents[node] <= num_spine for node in range(len(whole)))

    bare = tree(spine_branches=False)
    assert bare.sources.count(SPINE) == num_spine
    assert not any(bare.sources[node] == BRANCH and 1 <= bare.parents[node] <= num_spine for node in range(len(bare)))

    assert SPINE not in tree(spine="off").sources


@pytest.mark.parametrize("prompt", [LONG_COPY, [1, 2, 3]])  # with a match, and without
@pytest.mark.parametrize("bypass", BYPASSES)
def test_control_replaces_the_copied_spine_in_every_cycle(prompt: list[int], bypass: str) -> None:
    """The shape of the spine tree, whatever the text has: own scores as trust, no votes of a match, no bypass."""
    tree = begun(prompt, full_table(), spine="transition", bypass=bypass, max_draft=20).propose(60)
    assert tree.route == "spine"
    assert tree.sources[1:19] == (SPINE,) * 18  # 60 * middle_ratio
    assert tree.sources[19:] == (BRANCH,) * (len(tree) - 19)
    table = full_table()
    previous, token = 2, 3
    for node in range(1, 19):
        tokens, scores = table.successors(previous, token)
        previous, token = token, tokens[0]
        assert (tree.tokens[node], tree.parents[node], tree.probs[node]) == (token, node - 1, scores[0])


def test_without_bigrams_no_pairs_are_kept() -> None:
    target = make_llm()._engine.target.info
    for bigrams in (True, False):
        memory = GooseDrafter.new_memory(GooseOptions(bigrams=bigrams), target, None)
        drafter = begun(LONG_COPY, memory)
        observe(drafter, drafter.propose(60), 0)
        assert (memory.num_pairs > 0) == bigrams


def test_the_ablations_can_be_typed() -> None:
    words = ["spine=off", "bigrams=false", "spine-branches=false", "bypass=never"]
    options = drafter_options(words)
    check_drafter("goose", options)
    assert GooseOptions(**options) == GooseOptions(spine="off", bigrams=False, spine_branches=False, bypass="never")


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"min_ngram": 6},
        {"min_ngram": 0},
        {"max_draft": 0},
        {"max_draft": 2.5},
        {"top_k": True},
        {"bypass": "literal"},
        {"spine": None},
        {"consensus": "yes"},
        {"extension": "bfs"},
        {"harvest": "some"},
        {"bigrams": 1},
        {"smoothing": 1.5},
        {"min_score": -0.1},
        {"high_ratio": float("nan")},
        {"low_rate": 0.5},
        {"branch_depth": 0},
        {"table_megabytes": 0},
        {"unknown": 1},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        check_drafter("goose", options)


# -- exactness and cost ----------------------------------------------------------------------------------------------


def shares() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.05, 0.15, 0.3, 0.5, 0.8, 1.0])


GOOSE_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "spine": st.sampled_from(SPINES),
        "min_ngram": st.integers(1, 3),
        "max_ngram": st.integers(3, 6),
        "max_draft": st.integers(1, 40),
        "bypass": st.sampled_from(BYPASSES),
        "bypass_length": st.integers(1, 10),
        "consensus": st.sampled_from(CONSENSUS),
        "top_k": st.integers(1, 12),
        "bigrams": st.booleans(),
        "harvest": st.sampled_from(["all", "accepted"]),
        "spine_share": shares(),
        "spine_branches": st.booleans(),
        "min_score": shares(),
        "branch_depth": st.integers(1, 8),
        "extension": st.sampled_from(EXTENSIONS),
        "smoothing": shares(),
        "start_rate": shares(),
        "low_ratio": shares(),
        "middle_ratio": shares(),
        "high_ratio": shares(),
    },
)


@pytest.fixture(scope="module")
def plain_llm() -> LLM:
    return make_llm()


@given(options=GOOSE_OPTIONS, budget=st.integers(1, 64))
@settings(deadline=None, max_examples=40)
def test_any_options_give_the_output_of_plain_decoding(plain_llm: LLM, options: dict[str, Any], budget: int) -> None:
    params = SamplingParams(max_tokens=25)
    with make_llm(drafter="goose", drafter_options=options, budget=budget) as llm:
        completions = llm.generate(PROMPTS[:4], params)
    plain = plain_llm.generate(PROMPTS[:4], params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]


@pytest.mark.parametrize("options", [{}, {"extension": "levels"}, {"spine": "off"}, {"spine": "transition"}])
def test_lookups_do_not_grow_with_the_context(options: dict[str, Any]) -> None:
    counts = []
    for length in (100, 1000, 10_000):
        table = full_table()
        lookup = table.successors
        asked: list[tuple[int, int]] = []

        def counted(
            previous: int, token: int, lookup: Any = lookup, asked: list[tuple[int, int]] = asked
        ) -> tuple[list[int], list[float]]:
            asked.append((previous, token))
            return lookup(previous, token)

        text = [(i * i) % 97 for i in range(length)]
        drafter = begun([*text, *range(200, 230), *text[50:60], *range(200, 203)], table, **options)
        drafter.memory.successors = counted  # type: ignore[method-assign]
        drafter._spines = None  # lookups in C cannot be counted
        assert len(drafter.propose(60)) == 60
        counts.append(len(asked))
    assert counts[0] == counts[1] == counts[2]
    assert 0 < counts[0] < 130
