"""``budget="auto"`` through the engine, with artificial costs: the output is unchanged, sizes follow costs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafters import Drafter, DraftRequest, PromptRows
from draftwood.drafters.stand import StandDrafter
from draftwood.sizing.costs import CostProfile
from draftwood.sizing.live import LiveCosts
from draftwood.sizing.sizer import Sizer
from draftwood.text.bytes import VOCAB_SIZE
from tests.conftest import logits_after
from tests.tools.engine import CHOOSING, PROMPTS, OracleDrafter, WildDrafter, make_llm
from tests.tools.sizing import PROFILES


@pytest.fixture
def costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CostProfile:
    """Artificial costs of a machine."""
    profile = PROFILES[request.param]
    monkeypatch.setattr("draftwood.engine.engine.known_costs", lambda *_: LiveCosts(profile))
    return profile


def auto_llm(**options: object) -> LLM:
    return make_llm(budget="auto", **options)


@pytest.mark.parametrize("costs", ["free", "steep", "knee"], indirect=True)
@pytest.mark.parametrize("drafter", [*CHOOSING, WildDrafter])
def test_output_is_plain_decoding_with_any_costs(costs: CostProfile, drafter: str | type[Drafter]) -> None:
    llm = auto_llm()
    greedy = SamplingParams(max_tokens=40)
    sampled = SamplingParams(max_tokens=30, temperature=0.8, seed=3)
    for params in [greedy] if drafter is WildDrafter else [greedy, sampled]:
        plain = llm.generate(PROMPTS, params, drafter="plain")
        together = llm.generate(PROMPTS, params, drafter=drafter)
        alone = [llm.generate(prompt, params, drafter=drafter)[0] for prompt in PROMPTS]
        assert [c.token_ids for c in together] == [c.token_ids for c in plain]
        assert [c.token_ids for c in alone] == [c.token_ids for c in plain]


class WrongDrafter(OracleDrafter):
    """Confident and never right."""

    name = "wrong"

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._ahead = [(token + 7) % VOCAB_SIZE for token in self._ahead]


def oracle_run(
    drafter: type[OracleDrafter], max_tokens: int = 120, prompts: Sequence[str] = PROMPTS[:1]
) -> list[float]:
    """Mean tree sizes."""
    llm = auto_llm()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    plain = drafter.learn(llm, prompts, params)
    results = llm.generate(prompts, params, drafter=drafter)
    assert [c.token_ids for c in results] == [c.token_ids for c in plain]
    return [c.stats.mean_tree_size for c in results]


@pytest.mark.parametrize("costs", ["steep"], indirect=True)
def test_wrong_guesses_lead_to_plain_decoding(costs: CostProfile) -> None:
    assert oracle_run(WrongDrafter)[0] < 1.3


@pytest.mark.parametrize("costs", ["free"], indirect=True)
def test_free_positions_make_large_trees(costs: CostProfile) -> None:
    assert oracle_run(OracleDrafter, max_tokens=200)[0] > 10


@pytest.mark.parametrize("costs", ["steep"], indirect=True)
def test_good_guesses_are_verified_without_decoys(costs: CostProfile) -> None:
    llm = auto_llm(drafter=OracleDrafter)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    OracleDrafter.learn(llm, PROMPTS[:1], params)
    stats = llm.generate(PROMPTS[0], params)[0].stats
    assert stats.drafted_by_source["oracle"] > 5 * stats.drafted_by_source["decoy"]
    assert stats.acceptance_length > 3


def test_requests_of_a_batch_leave_room_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen positions are nearly free and the next sixteen are expensive: six requests share them."""
    knee = CostProfile((1, 16, 17, 64), (16,), ((1.0, 1.1, 4.0, 40.0),))
    monkeypatch.setattr("draftwood.engine.engine.known_costs", lambda *_: LiveCosts(knee))
    alone = oracle_run(OracleDrafter, max_tokens=150)[0]
    together = oracle_run(OracleDrafter, max_tokens=150, prompts=PROMPTS)
    assert alone > 8
    assert max(together) < alone / 2


@pytest.mark.parametrize("costs", ["mild", "knee"], indirect=True)
def test_sampled_tokens_have_the_target_distribution(costs: CostProfile) -> None:
    """Drawn trees that are cut: chi-square test of three tokens over many samples that share the drafter's memory."""
    llm = auto_llm(drafter=StandDrafter, max_batch=2, memory="process", drafter_options={"max_ngram": 2})
    prompt = llm.tokenizer.encode("to")
    target = llm._engine.target
    warm, keep = 1.5, 4

    def probabilities(tokens: Sequence[int]) -> list[tuple[int, float]]:
        scores = logits_after(target, tokens)[-1] / warm
        kept = scores >= scores.topk(keep).values[-1]
        probs = torch.where(kept, scores, -torch.inf).softmax(-1).double()
        return [(token, float(probs[token])) for token in probs.nonzero().flatten().tolist()]

    expected = {
        (a, b, c): p * q * r
        for a, p in probabilities(prompt)
        for b, q in probabilities([*prompt, a])
        for c, r in probabilities([*prompt, a, b])
    }
    runs = 1000
    params = SamplingParams(max_tokens=3, temperature=warm, top_k=keep, seed=1, n=runs, ignore_eos=True)
    results = llm.generate([prompt], params)
    sizes = [c.stats.mean_tree_size for c in results]
    assert runs * 1.2 < sum(sizes) < runs * 30
    seen = Counter(tuple(c.token_ids) for c in results)
    assert set(seen) <= set(expected)
    common = {tokens: p for tokens, p in expected.items() if p * runs >= 5}
    cells = [(seen[tokens], p * runs) for tokens, p in common.items()]
    cells.append((runs - sum(n for n, _ in cells), (1.0 - sum(common.values())) * runs))
    statistic = sum((n - e) ** 2 / e for n, e in cells if e > 1)
    freedom = len(cells) - 1
    # Wilson-Hilferty: the cube root of a chi-square is nearly normal. The seed is fixed; 4 sigma are 1 in 30,000.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert freedom > 10
    assert z < 4


class ReadingDrafter(OracleDrafter):
    """Reads the prompt's logits and counts them."""

    name = "reading"
    wants_prompt_logits = True
    rows = 0

    def read_prompt(self, rows: PromptRows) -> None:
        ReadingDrafter.rows += len(rows.logits)


@pytest.mark.parametrize(("costs", "read"), [("free", True), ("steep", False)], indirect=["costs"])
def test_prompt_logits_are_read_if_profitable(costs: CostProfile, read: bool) -> None:
    llm, params = auto_llm(), SamplingParams(max_tokens=4)
    ReadingDrafter.learn(llm, PROMPTS[:1], params)
    ReadingDrafter.rows = 0
    llm.generate(PROMPTS[:1], params, drafter=ReadingDrafter)
    assert (ReadingDrafter.rows > 0) == read
    ReadingDrafter.rows = 0
    make_llm(budget=8).generate(PROMPTS[:1], params, drafter=ReadingDrafter)
    assert ReadingDrafter.rows > 0  # an explicit budget enables the whole method


@pytest.mark.parametrize("costs", ["free"], indirect=True)
@pytest.mark.parametrize("first", [True, False])
def test_whether_prompt_logits_are_read_is_decided_once(
    costs: CostProfile, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all chunks of a prompt: other requests come and go meanwhile."""
    answers = itertools.chain([first], itertools.repeat(not first))
    monkeypatch.setattr(Sizer, "reads_prompt", lambda *_: next(answers))
    llm, params = auto_llm(prefill_chunk=4), SamplingParams(max_tokens=4)
    prompt = PROMPTS[0]
    ReadingDrafter.learn(llm, [prompt], params)
    ReadingDrafter.rows = 0
    answers = itertools.chain([first], itertools.repeat(not first))
    num_tokens = llm.generate([prompt], params, drafter=ReadingDrafter)[0].stats.prompt_tokens
    assert ReadingDrafter.rows == (num_tokens - 1 if first else 0)
    assert num_tokens > 8
