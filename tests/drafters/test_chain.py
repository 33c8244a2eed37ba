"""The drafters that verify one chain, `sam` and `anpd`: exact through the engine, with checked options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood import LLM, SamplingParams
from draftwood.drafters import Drafter, DraftRequest, check_drafter
from draftwood.drafters.anpd import AdaptiveNgramDrafter
from draftwood.drafters.sam import SuffixDrafter
from draftwood.errors import OptionError
from draftwood.sources.datastore import build_datastore
from tests.tools.engine import PROMPTS, llm, make_llm, reference  # noqa: F401 - llm is a fixture

DRAFTERS: list[type[Drafter]] = [SuffixDrafter, AdaptiveNgramDrafter]


def begun(cls: type[Drafter], prompt_ids: list[int], **options: Any) -> Drafter:
    drafter = cls(cls.Options(**options), None)
    drafter.begin(DraftRequest(prompt_ids, SamplingParams(), np.random.default_rng(0)))
    return drafter


# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_plain_decoding(llm: LLM, drafter: type[Drafter]) -> None:
    params = SamplingParams(max_tokens=40)
    completions = llm.generate(PROMPTS, params, drafter=drafter)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.token_ids == reference(llm, prompt, 40)
    assert any(completion.stats.accepted_by_source for completion in completions)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_batch_equals_one_by_one(llm: LLM, drafter: type[Drafter]) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=5)
    together = llm.generate(PROMPTS, params, drafter=drafter)
    alone = [llm.generate(prompt, params, drafter=drafter)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seed_gives_the_output_of_plain_decoding(llm: LLM, drafter: type[Drafter]) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95, seed=11)
    plain = llm.generate(PROMPTS, params, drafter="plain")
    drafted = llm.generate(PROMPTS, params, drafter=drafter)
    assert [c.token_ids for c in plain] == [c.token_ids for c in drafted]


@pytest.mark.parametrize("kind", ["corpus.npy", "corpus.datastore"])
def test_a_corpus_with_the_answer_is_drafted_from(tmp_path: Path, kind: str) -> None:
    params = SamplingParams(max_tokens=36, ignore_eos=True, repetition_penalty=1.3)
    plain_llm = make_llm()
    prompt = plain_llm.tokenizer.encode(PROMPTS[2])
    plain = plain_llm.generate(PROMPTS[2], params)[0].token_ids
    np.save(tmp_path / "corpus.npy", np.array([5, 6, 7, -1, *prompt, *plain], dtype=np.int32))
    documents = [[5, 6, 7], [*prompt, *plain]]
    build_datastore(documents, vocab_size=plain_llm.info.vocab_size, tokenizer="bytes").save(
        tmp_path / "corpus.datastore"
    )
    options = {"corpus": str(tmp_path / kind)}
    with make_llm(drafter=SuffixDrafter, drafter_options=options) as llm:
        drafted = llm.generate([PROMPTS[2], PROMPTS[0]], params)
    assert drafted[0].token_ids == plain
    assert drafted[0].stats.accepted_by_source["corpus"] >= 30
    assert drafted[0].stats.cycles == 3  # eleven guesses and the bonus token per cycle
    assert drafted[1].token_ids == plain_llm.generate(PROMPTS[0], params)[0].token_ids


# -- trees -----------------------------------------------------------------------------------------------------------


def test_sam_copies_the_longest_match_and_trusts_long_ones_more() -> None:
    short = begun(SuffixDrafter, [1, 2, 3, 4, 9, 1]).propose(60)
    long = begun(SuffixDrafter, [1, 2, 3, 4, 9, 1, 2, 3]).propose(60)
    assert short.tokens == (1, 2, 3, 4, 9, 1)
    assert long.tokens == (3, 4, 9, 1, 2, 3)
    assert set(long.sources[1:]) == {"suffix"}
    assert 0 < short.probs[1] < long.probs[1] < 1


def test_anpd_gives_the_share_of_a_follower() -> None:
    tree = begun(AdaptiveNgramDrafter, [1, 2, 1, 2, 1, 3, 1], max_order=2, max_draft=2).propose(60)
    assert tree.tokens == (1, 2, 1)
    assert tree.probs == (1.0, 2 / 4, 2 / 3)
    assert set(tree.sources[1:]) == {"ngram"}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chains_respect_budget_and_max_draft(drafter: type[Drafter]) -> None:
    repeating = [1, 2, 3] * 30
    for budget in (1, 2, 5):
        assert len(begun(drafter, repeating).propose(budget)) == budget
    assert len(begun(drafter, repeating, max_draft=7).propose(60)) == 8
    assert begun(drafter, [4, 5]).propose(60).tokens == (5,)


def test_min_match_ignores_short_matches() -> None:
    assert len(begun(SuffixDrafter, [1, 2, 9, 1, 2], min_match=3).propose(60)) == 1
    assert len(begun(SuffixDrafter, [1, 2, 9, 1, 2], min_match=2).propose(60)) == 4


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        (SuffixDrafter, {"max_draft": 0}),
        (SuffixDrafter, {"max_draft": 4.5}),
        (SuffixDrafter, {"max_draft": True}),
        (SuffixDrafter, {"min_match": 0}),
        (SuffixDrafter, {"static_bias": -1}),
        (SuffixDrafter, {"corpus": 7}),
        (SuffixDrafter, {"unknown": 1}),
        (AdaptiveNgramDrafter, {"max_order": 1}),
        (AdaptiveNgramDrafter, {"max_order": "5"}),
        (AdaptiveNgramDrafter, {"max_draft": 0}),
    ],
)
def test_bad_options_are_refused(drafter: type[Drafter], options: Mapping[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))}"):
        check_drafter(drafter, options)


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "corpus.npy", np.array([1, 2, 40_000]))
    with pytest.raises(OptionError, match="tokenizer of this model"):
        make_llm(drafter=SuffixDrafter, drafter_options={"corpus": str(tmp_path / "corpus.npy")})
    with pytest.raises(OptionError, match="no such file"):
        make_llm(drafter=SuffixDrafter, drafter_options={"corpus": str(tmp_path / "missing.npy")})
