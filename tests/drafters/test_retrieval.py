"""Drafting from a datastore: the prefix tree of continuations, and the drafter on top of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.drafters import DraftRequest, VerifiedTree
from draftwood.drafters.rest import RetrievalDrafter, RetrievalOptions
from draftwood.errors import OptionError
from draftwood.growth.prefix_tree import PADDING, grow_frequency_tree
from draftwood.sources.datastore import build_datastore, tokenizer_fingerprint
from draftwood.sources.datastore_file import DatastoreError
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree
from tests.tools.datastore import store_of
from tests.tools.engine import PROMPTS, make_llm

# -- the prefix tree -------------------------------------------------------------------------------------------------


def brute_force_tree(rows: Sequence[Sequence[int]], budget: int) -> dict[tuple[int, ...], float]:
    """Path to probability of the most frequent nodes, by counting all prefixes."""
    counts: Counter[tuple[int, ...]] = Counter(tuple(row[:n]) for row in rows for n in range(1, len(row) + 1))
    best = sorted(counts, key=lambda path: (-counts[path], len(path), path[-1], path))[: budget - 1]
    return {path: counts[path] / (counts[path[:-1]] if len(path) > 1 else len(rows)) for path in best}


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([[*row, *[PADDING] * (length - len(row))] for row in rows], np.int32).reshape(len(rows), length)


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.path_tokens(node)): tree.probs[node] for node in range(1, len(tree))}


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=20), st.integers(1, 30))
@settings(max_examples=300)
def test_frequency_tree_is_a_pruned_trie(rows: list[list[int]], budget: int) -> None:
    tree = grow_frequency_tree(9, padded(rows, 5), "corpus", budget)
    assert paths(tree) == pytest.approx(brute_force_tree(rows, budget))
    assert (tree.tokens[0], tree.probs[0], len(tree) <= budget) == (9, 1.0, True)
    assert set(tree.sources[1:]) <= {"corpus"}
    for children in tree.children():
        ranked = [(-tree.probs[child], tree.tokens[child]) for child in children]
        assert ranked == sorted(ranked)


def test_frequency_tree_takes_large_ids_in_any_order() -> None:
    rows = [[70_000, 255], [256, 1], [70_000, 65_536], [0, 0], [256, 1], [70_000, 255]]
    tree = grow_frequency_tree(5, padded(rows, 3), "corpus", 5)
    assert paths(tree) == {(70_000,): 0.5, (256,): 1 / 3, (256, 1): 1.0, (70_000, 255): 2 / 3}


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
def test_no_continuations_give_root_only(shape: tuple[int, int]) -> None:
    assert grow_frequency_tree(5, np.empty(shape, np.int32), "corpus", 8) == DraftTree.root_only(5)


# -- the drafter -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny_model_datastore(plain: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datastore of the tiny model's output for some of the prompts, and of other texts."""
    codec = ByteTokenizer()
    answers = plain.generate(PROMPTS[:3], SamplingParams(max_tokens=60))
    corpus = [codec.encode(prompt) + answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=False)]
    corpus += [codec.encode(text, add_special=False) for text in ("one two three four", "the cat sat on the dog" * 9)]
    path = tmp_path_factory.mktemp("datastore") / "own.draftwood-datastore"
    build_datastore(corpus, vocab_size=codec.vocab_size, tokenizer=tokenizer_fingerprint(codec)).save(path)
    return path


@pytest.mark.parametrize("options", [{}, {"min_match": 3, "max_draft": 2}, {"max_matches": 1, "max_match": 1}])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_plain_decoding(
    plain: LLM, tiny_model_datastore: Path, options: dict[str, int], temperature: float
) -> None:
    params = SamplingParams(max_tokens=50, temperature=temperature, seed=3)
    with make_llm(drafter=RetrievalDrafter, drafter_options={"datastore": str(tiny_model_datastore), **options}) as llm:
        drafted = llm.generate(PROMPTS, params)
    expected = plain.generate(PROMPTS, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in expected]


def test_datastore_content_is_drafted(tiny_model_datastore: Path) -> None:
    params = SamplingParams(max_tokens=50)
    with make_llm(drafter=RetrievalDrafter, drafter_options={"datastore": str(tiny_model_datastore)}, budget=20) as llm:
        known, unknown = llm.generate([PROMPTS[0], "ZZZZ"], params)
    assert known.stats.acceptance_length > 5
    assert known.stats.acceptance_length > unknown.stats.acceptance_length
    assert set(known.sources) == {"datastore", "target"}


def test_match_spans_cycles_up_to_max_length() -> None:
    store = store_of([[1, 2, 3], [0, 2, 0], [1, 1, 2, 1]])

    def guesses(max_match: int) -> set[int]:
        drafter = RetrievalDrafter(RetrievalOptions(datastore="x", max_match=max_match, max_draft=1), store)
        drafter.begin(DraftRequest([3, 1], SamplingParams(), np.random.default_rng(0)))
        for emitted in ([1], [2]):
            drafter.observe(VerifiedTree(drafter.propose(8), torch.empty(0), [0], [0], emitted, None))
        tree = drafter.propose(8)
        assert tree.tokens[0] == 2
        return set(tree.tokens[1:])

    assert [guesses(max_match) for max_match in (1, 2, 3)] == [{0, 1, 3}, {1, 3}, {1}]


def test_budgets_are_respected(tiny_model_datastore: Path) -> None:
    for budget in (1, 2, 5):
        options = {"datastore": tiny_model_datastore}
        with make_llm(drafter=RetrievalDrafter, drafter_options=options, budget=budget) as llm:
            got = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20))[0]
        assert got.stats.mean_tree_size <= budget


def test_missing_datastore_error_names_build_command() -> None:
    with pytest.raises(OptionError, match=r"needs a datastore(.|\n)*draftwood datastore build"):
        make_llm(drafter=RetrievalDrafter)


@pytest.mark.parametrize(
    "options",
    [
        {"datastore": 3},
        {"datastore": ""},
        {"datastore": "x", "max_match": 0},
        {"datastore": "x", "min_match": 17},
        {"datastore": "x", "max_draft": 1.5},
        {"datastore": "x", "max_matches": True},
    ],
)
def test_invalid_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        make_llm(drafter=RetrievalDrafter, drafter_options=options)


def test_the_datastore_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store_of([[1, 2]], vocab_size=300).save(path)
    with pytest.raises(DatastoreError, match=r"another model(.|\n)*258"):
        LLM.from_target(
            tiny_target(cache_tokens=64),
            ByteTokenizer(),
            drafter=RetrievalDrafter,
            drafter_options={"datastore": str(path)},
        )
