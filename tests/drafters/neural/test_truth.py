"""Probabilities of neural drafters equal those of their model for the whole text in one pass with the true features.

Every probability in every tree and the draft cache are compared, for heads and models that are sometimes right,
so that some of their nodes are accepted and others dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.engine import GenerationRequest
from draftwood.growth.neural.policies import GROWTHS
from draftwood.heads import Eagle3Head, EagleHead, HeadModule
from draftwood.sources.neural.head import HeadModel
from draftwood.targets.base import Segment, Target, chain_parents
from draftwood.targets.cache import KVCache
from draftwood.targets.native.target import NativeTarget
from draftwood.tree import DraftTree
from tests.conftest import logits_after, prefill
from tests.tools.head import GrowingCache, causal
from tests.tools.neural import (
    CONFIG,
    _one_thread,  # noqa: F401 - fixtures
    clock_target,
    clock_text,
    draft_model,
    drafters_of,
    head_folder,
    neural_llm,
    perfect_head,
    random_target,
    saved_head,
)

PROMPTS = [clock_text(3, 5), clock_text(9, 2), clock_text(0, 30)]
Eagle = EagleHead | Eagle3Head
Says = Callable[[Sequence[int], Sequence[int]], torch.Tensor]  # what follows a text and a path below it, [V]


def features_of(target: Target, head: HeadModule, text: Sequence[int]) -> torch.Tensor:
    """Input features of the head for all tokens of a text but the last, [n - 1, H], in one pass."""
    target.set_taps(head.config.taps_for(target.info.num_layers))
    sequence = target.open(len(text))
    taps = target.forward([Segment(sequence, text, chain_parents(len(text)), 0)]).taps
    target.close(sequence)
    assert taps is not None
    return head.fuse(taps[:-1].clone())


def read_in_one_pass(target: Target, head: Eagle, text: Sequence[int]) -> tuple[torch.Tensor, GrowingCache]:
    seen = GrowingCache()
    tokens = torch.tensor(text[1:])
    hidden = head(head.embed(tokens), features_of(target, head, text), torch.arange(len(tokens)), seen.attend)
    return hidden, seen


@torch.inference_mode()
def eagle_reference(target: Target, head: Eagle, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    hidden, seen = read_in_one_pass(target, head, text)
    for step, token in enumerate(path):
        position = torch.tensor([len(text) - 1 + step])
        hidden = head(head.embed(torch.tensor([token])), hidden[-1:], position, seen.attend)
    probs = torch.zeros(head.config.vocab_size)
    own = head.logits(hidden[-1]).softmax(-1)
    probs[head.target_ids(torch.arange(len(own)))] = own
    return probs


@torch.inference_mode()
def multi_token_reference(target: Target, head: Any, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    features = features_of(target, head, text)
    hidden = head(features, torch.arange(len(features)), causal)[-1]
    logits: torch.Tensor = head.logits_at(len(path) + 1, hidden, head.embed(torch.tensor([text[-1], *path])))
    return logits.softmax(-1)


def make_reference(llm: LLM) -> Says:
    """The expected distribution of the draft model, from its parts and the whole text."""
    target, model = llm._engine.target, draft_model(llm)
    if not isinstance(model, HeadModel):
        small: NativeTarget = model.target  # type: ignore[attr-defined]
        return lambda text, path: logits_after(small, [*text, *path])[-1].softmax(-1)
    head: Any = model._head
    says = eagle_reference if isinstance(head, (EagleHead, Eagle3Head)) else multi_token_reference
    return lambda text, path: says(target, head, text, path)


def check_tree(tree: DraftTree, text: Sequence[int], says: Says) -> None:
    """Every node has the probability that the draft model gives it after its parent."""
    assert tree.tokens[0] == text[-1]
    for node in {parent for parent in tree.parents if parent >= 0}:
        probs = says(text, tree.path_tokens(node))
        for child in tree.children_of(node):
            assert tree.probs[child] == pytest.approx(float(probs[tree.tokens[child]]), rel=2e-3, abs=1e-6)


def check_cache(llm: LLM, drafter: Any, text: Sequence[int]) -> None:
    """The draft cache of a text equals that of a single pass over the text."""
    model = draft_model(llm)
    if isinstance(model, HeadModel):
        if not isinstance(model._head, (EagleHead, Eagle3Head)):
            return
        cache = model._cache
        with torch.inference_mode():
            _, seen = read_in_one_pass(llm._engine.target, model._head, text)
        wanted = [torch.stack([rows[place] for rows in seen._rows.values()]).transpose(1, 2) for place in (0, 1)]
    else:
        small: NativeTarget = model.target  # type: ignore[attr-defined]
        cache = small.cache
        sequence = prefill(small, text)
        wanted = rows_of(cache, sequence)
        small.close(sequence)
    got = rows_of(cache, drafter._sequence)
    size = got[0].shape[2]
    assert size == drafter._length
    assert size + len(drafter._unread) == len(text) - isinstance(model, HeadModel)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs[:, :, :size], atol=1e-4, rtol=1e-3)


def rows_of(cache: KVCache, sequence: int) -> list[torch.Tensor]:
    """Committed keys and values, [layers, kv_heads, n, D]."""
    extent = cache[sequence]
    return [rows[:, :, extent.base : extent.base + extent.length].clone() for rows in (cache.keys, cache.values)]


def check_run(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    """Check concurrent requests tree by tree; return the mean number of tokens per tree."""
    says = make_reference(llm)
    engine = llm._engine
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    texts = {
        engine.submit(GenerationRequest(prompt_ids=tuple(prompt), params=params, drafter=llm._default))[0]: list(prompt)
        for prompt in prompts
    }
    cycles = 0
    for event in engine.events(list(texts)):
        text = texts[event.request_id]
        check_tree(event.tree, text, says)
        text += event.token_ids
        cycles += 1
        for session in engine._scheduler.running:
            if session.sample.request_id == event.request_id and cycles % 3 == 0:
                check_cache(llm, session.drafter, text)
    assert not drafters_of(llm)
    return len(prompts) * max_tokens / cycles


CLOCK_NOISE = {"eagle": 0.2, "eagle3": 0.1, "medusa": 0.45, "hydra": 0.3, "hydra++": 0.3}


@pytest.mark.parametrize("growth", ["beam", "static", "salf"])
@pytest.mark.parametrize("kind", CLOCK_NOISE)
def test_partly_correct_heads(kind: str, growth: str) -> None:
    more = {"prefix": True} if kind == "hydra++" else {}
    kind_of_head = kind.removesuffix("++")
    head = saved_head(perfect_head(kind_of_head, CLOCK_NOISE[kind], **more))
    drafter = "eagle2" if kind == "eagle" else kind_of_head
    llm = neural_llm(drafter, clock_target(), head=head, growth=growth, budget=9, top_k=4, prefill_chunk=7)
    assert 1.2 < check_run(llm, PROMPTS, 14) < 5.0


@pytest.mark.parametrize("growth", GROWTHS)
def test_partly_correct_draft_model(growth: str) -> None:
    llm = neural_llm("sps", random_target(), growth=growth, budget=9, top_k=4, threshold=0.2)
    assert 1.2 < check_run(llm, [[7, 8, 9], [5], list(range(60))], 16) < 5.0


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra"])
def test_random_heads_on_a_target_with_layers(kind: str) -> None:
    """Every tap matters here; hardly anything is accepted."""
    drafter = "eagle2" if kind == "eagle" else kind
    llm = neural_llm(drafter, random_target(), head=head_folder(kind), growth="beam", budget=9, top_k=4)
    assert CONFIG.num_layers == 6
    check_run(llm, [[7, 8, 9], [5], list(range(60))], 6)


def test_comparison_detects_wrong_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: features that are one token late."""
    llm = neural_llm("eagle2", random_target(), growth="beam", budget=9, top_k=4)
    fuse = EagleHead.fuse
    says = make_reference(llm)
    tree = next(llm.stream([7, 8, 9, 10], SamplingParams(max_tokens=4))).tree
    check_tree(tree, [7, 8, 9, 10], says)
    monkeypatch.setattr(EagleHead, "fuse", lambda self, taps: fuse(self, taps).roll(1, dims=0))
    late = next(llm.stream([7, 8, 9, 10], SamplingParams(max_tokens=4))).tree
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_tree(late, [7, 8, 9, 10], says)
