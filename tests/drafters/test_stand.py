"""STAND through the engine: exactness, content of the tables, options. Drawing is tested in test_drawn.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafters import VerifiedTree, make_factory
from draftwood.drafters.shapes import static_tree
from draftwood.drafters.stand import StandDrafter, warp_top
from draftwood.errors import OptionError
from draftwood.sampling import Warper
from draftwood.sources.ngrams import NgramTables
from draftwood.targets.find_top import top_rows
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree
from draftwood.tree.shapes import chain_tree, recycling_tree
from tests.conftest import logits_after
from tests.tools.engine import PROMPTS, law_of_pairs, make_llm
from tests.tools.enumeration import assert_fits

# -- through the engine ----------------------------------------------------------------------------------------------


def stand_llm(budget: int = 12, max_batch: int = 8, memory: str = "prompt", **options: Any) -> LLM:
    return make_llm(drafter=StandDrafter, drafter_options=options, budget=budget, max_batch=max_batch, memory=memory)


@pytest.mark.parametrize(
    "options",
    [{}, {"harvest": "emitted", "harvest_prompt": False}, {"tree": "heuristic", "top_k": 3}, {"renormalise": False}],
)
@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_greedy_output_is_plain_decoding(backend: str, options: dict[str, Any]) -> None:
    llm = make_llm(backend, drafter=StandDrafter, drafter_options=options, memory="process")
    params = SamplingParams(max_tokens=40)
    for _ in range(2):  # the second time from full tables
        results = llm.generate(PROMPTS, params)
        plain = llm.generate(PROMPTS, params, drafter="plain")
        assert [c.token_ids for c in results] == [c.token_ids for c in plain]
    assert sum(c.stats.output_tokens for c in results) / sum(c.stats.cycles for c in results) > 2


def test_batch_equals_one_by_one() -> None:
    llm = stand_llm()
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=5)
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


class FrozenStand(StandDrafter):
    """Knows only the prompt, so its proposal distribution never equals the target's."""

    name = "frozen"

    def _learn(self, verified: VerifiedTree) -> None:
        pass


@pytest.mark.parametrize("draw", ["gumbel", "multinomial", "chosen"])
@pytest.mark.parametrize("harvest", ["emitted", "all", "frozen", "not renormalised"])
def test_sampled_tokens_have_the_target_distribution(draw: str, harvest: str) -> None:
    """Chi-square test of the first two tokens over many samples that share one memory."""
    options: dict[str, Any] = {"draw": draw, "harvest": harvest, "tree": "heuristic"}
    if harvest == "not renormalised":  # three of six tokens are stored
        options |= {"harvest": "emitted", "renormalise": False, "top_k": 3}
    if harvest == "frozen":
        options |= {"harvest": "emitted", "max_ngram": 1}
    drafter = FrozenStand if harvest == "frozen" else StandDrafter
    llm = make_llm(drafter=drafter, drafter_options=options, budget=24, max_batch=40)
    prompt = llm.tokenizer.encode("tot otott tootot to")
    warm, keep, runs = 1.5, 6, 1500
    expected = law_of_pairs(llm, prompt, warm, keep)
    params = SamplingParams(max_tokens=2, temperature=warm, top_k=keep, seed=1, n=runs, ignore_eos=True)
    samples = llm.generate([prompt], params)
    assert_fits(Counter(tuple(c.token_ids) for c in samples), expected)
    assert sum(c.stats.output_tokens for c in samples) / sum(c.stats.cycles for c in samples) > 1.05


def test_longer_samples_stay_exact_in_their_last_token() -> None:
    """Deep drawn trees from mixed contexts: the distribution of the fourth token, by simulation of the model."""
    llm = stand_llm(budget=24, max_batch=40, max_ngram=1)
    prompt = llm.tokenizer.encode("ab")
    runs = 1200
    params = SamplingParams(max_tokens=4, temperature=1.2, top_k=2, seed=3, n=runs, ignore_eos=True)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        longer = {}
        for output, weight in law.items():
            probs = Warper(params, prompt).probs(logits_after(llm._engine.target, [*prompt, *output])[-1])
            longer |= {(*output, int(t)): weight * float(probs[t]) for t in probs.nonzero().flatten()}
        law = longer
    samples = llm.generate([prompt], params)
    assert_fits(Counter(tuple(c.token_ids) for c in samples), law)
    assert sum(c.stats.output_tokens for c in samples) / sum(c.stats.cycles for c in samples) > 1.5


def test_samples_of_one_prompt_learn_from_each_other() -> None:
    llm = stand_llm(budget=24, max_batch=1, harvest="emitted")
    params = SamplingParams(max_tokens=40, temperature=0.2, seed=1, n=8, ignore_eos=True)
    samples = llm.generate("once upon", params)
    taus = [c.stats.acceptance_length for c in samples]
    assert sum(taus[4:]) / 4 > taus[0] + 0.3


# -- learning --------------------------------------------------------------------------------------------------------


def warm_tables(params: SamplingParams, prompt: Sequence[int], **options: Any) -> tuple[NgramTables, list[int], LLM]:
    """The tables after one request, and its output."""
    llm = stand_llm(memory="process", **options)
    output = llm.generate([list(prompt)], params)[0].token_ids
    memory = llm._default.memory.get(0)
    assert isinstance(memory, NgramTables)
    return memory, output, llm


PARAMS = SamplingParams(max_tokens=12, temperature=0.7, top_k=5, top_p=0.9, seed=2, ignore_eos=True)


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(max_tokens=12, ignore_eos=True)])
def test_distributions_of_emitted_tokens_are_stored(params: SamplingParams) -> None:
    prompt = list(b"distribution")
    memory, output, llm = warm_tables(params, prompt, max_ngram=6)
    for end in range(12):
        text = [*prompt, *output[:end]]
        logits = logits_after(llm._engine.target, text)[-1]
        ids, probs = memory.lookup(text) or ([], [])
        if params.is_greedy:
            top = logits.softmax(-1).topk(10)
            assert (ids, probs) == (top.indices.tolist(), pytest.approx(top.values.tolist(), rel=1e-3))
            continue
        own = Warper(params, prompt).probs(logits)
        assert ids[0] == int(own.argmax())
        assert sum(probs) == pytest.approx(1.0, abs=1e-5)
        assert output[end] in ids
        # Ten tokens have nearly all of the mass here; a nucleus within them may end one token earlier.
        assert sum(abs(float(own[i]) - p) for i, p in zip(ids, probs, strict=True)) < 0.25


@pytest.mark.parametrize("harvest", ["emitted", "all"])
@pytest.mark.parametrize("bias", [{}, {100: 2.0}])
def test_probabilities_are_stored_as_they_are_on_request(harvest: str, bias: dict[int, float]) -> None:
    """Without renormalisation three tokens have their shares of the whole distribution, without penalties."""
    params = SamplingParams(max_tokens=6, temperature=2.0, top_p=0.9, seed=2, ignore_eos=True, logit_bias=bias)
    prompt = list(b"distribution")
    memory, output, llm = warm_tables(params, prompt, max_ngram=6, top_k=3, harvest=harvest, renormalise=False)
    for end in range(-4, 6):  # the last contexts of the prompt too
        text = [*prompt, *output][: len(prompt) + end]
        ids, probs = memory.lookup(text) or ([], [])
        own = Warper(replace(params, logit_bias=()), prompt).probs(logits_after(llm._engine.target, text)[-1])
        assert probs == pytest.approx([float(own[token]) for token in ids], abs=1e-4)
        assert 0.0 < sum(probs) < 0.9


def test_every_node_is_learnt_from_by_default() -> None:
    prompt = list(b"abcabcabcabcabc")
    every, _, _ = warm_tables(PARAMS, prompt)
    emitted, _, _ = warm_tables(PARAMS, prompt, harvest="emitted")
    none, output, _ = warm_tables(PARAMS, prompt, harvest="emitted", harvest_prompt=False)
    assert every.num_contexts > emitted.num_contexts > none.num_contexts
    # Without the prompt: the last prompt token's n-grams and those of all emitted tokens but the last.
    texts = [[*prompt, *output[:end]] for end in range(12)]
    assert none.num_contexts == len({tuple(text[-size:]) for text in texts for size in range(1, 5)})


def test_a_rejected_node_is_learnt_under_its_own_path() -> None:
    memory = NgramTables(258, 4, 2)
    drafter = StandDrafter(StandDrafter.Options(harvest="all", top_k=2), chain_tree(3), memory)
    drafter._params, drafter._context = SamplingParams(temperature=1.0), memory.context([1, 2])
    tree = DraftTree((2, 7, 8), (-1, 0, 0), (0, 1, 1), ("root", "ngram", "ngram"), (1.0, 1.0, 1.0))
    logits = torch.full((3, 258), -30.0)
    logits[0, 9] = logits[1, 10] = logits[2, 11] = 5.0
    drafter.observe(VerifiedTree(tree=tree, logits=logits, choices=[9, 10, 11], path=(0,), emitted=[9], taps=None))
    assert memory.lookup([1, 2])[0][0] == 9  # type: ignore[index]
    assert memory.lookup([1, 2, 7])[0][0] == 10  # type: ignore[index]
    assert memory.lookup([1, 2, 8])[0][0] == 11  # type: ignore[index]
    assert drafter._root == 9
    assert drafter._context == memory.context([1, 2, 9])


def test_a_prompt_is_averaged_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = stand_llm(memory="process")
    params = SamplingParams(max_tokens=1, n=3)
    learnt: list[int] = []
    learn = NgramTables.learn
    monkeypatch.setattr(NgramTables, "learn", lambda self, *rows: (learnt.append(len(rows[0])), learn(self, *rows)))
    for _ in range(3):
        llm.generate("a prompt of many tokens", params)
    assert [count for count in learnt if count > 1] == [len("a prompt of many tokens")]
    assert learnt.count(1) == 9


def test_prefill_gives_logits_only_where_they_are_read() -> None:
    shape, options = chain_tree(2), StandDrafter.Options
    assert StandDrafter(options(), shape, NgramTables(10)).wants_prompt_logits
    assert not StandDrafter(options(harvest_prompt=False), shape, NgramTables(10)).wants_prompt_logits
    assert StandDrafter.wants_prompt_logits


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=2.0, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.8, min_p=0.1),
        SamplingParams(temperature=1e-6),
    ],
)
def test_warping_top_tokens_equals_full_warping(params: SamplingParams) -> None:
    """If the best tokens are the whole vocabulary, the result equals the target's warping."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((20, 10), generator=generator) * 2
    top = top_rows(logits, 10)
    got = np.zeros((20, 10), dtype=np.float32)
    np.put_along_axis(got, top.ids.astype(np.int64), warp_top(top, params), axis=1)
    expected = torch.stack([Warper(params, []).probs(row) for row in logits]).numpy()
    assert got == pytest.approx(expected, abs=1e-5)


def test_rows_of_nan_and_infinity_give_finite_probs() -> None:
    logits = torch.tensor([[math.nan] * 4, [-math.inf] * 4, [math.inf, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, -math.inf]])
    for params in (SamplingParams(temperature=0.5, top_p=0.9), SamplingParams()):
        probs = warp_top(top_rows(logits, 3), params)
        assert np.isfinite(probs).all()
        assert not probs[:2].any()
        assert probs[3, 0] > 0.3


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_ngram": 0},
        {"max_ngram": 7},
        {"top_k": 0},
        {"tree": "optimized"},
        {"tree": "nowhere/tree.json"},
        {"tree": 3},
        {"draw": "greedy"},
        {"harvest": "accepted"},
        {"harvest_prompt": 1},
        {"megabytes": 0},
    ],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        StandDrafter.Options(**options)


def test_a_row_wider_than_the_vocabulary_is_refused() -> None:
    from dataclasses import replace

    info = replace(tiny_target().info, vocab_size=8)
    with pytest.raises(OptionError, match="vocabulary"):
        make_factory(StandDrafter, {}, info)


def test_trees_by_name_and_from_files(tmp_path: Path) -> None:
    assert static_tree("heuristic") == recycling_tree(80)
    packaged = static_tree("stand")
    assert len(packaged) == 80
    assert max(packaged.depths) >= 10
    assert max(packaged.ranks) < 10
    chain_tree(5).save(tmp_path / "own.json")
    llm = LLM.from_target(
        tiny_target(),
        ByteTokenizer(),
        drafter=StandDrafter,
        drafter_options={"tree": str(tmp_path / "own.json")},
        budget=9,
    )
    trees = [event.tree for event in llm.stream("xyz" * 20, SamplingParams(max_tokens=30))]
    assert max(len(tree) for tree in trees) > 2
    assert all(tree.parents == tuple(range(-1, len(tree) - 1)) for tree in trees)
