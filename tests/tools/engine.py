"""Shared by the engine tests: prompts, drafters that stress the engine, a tiny LLM, expected output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from draftwood import LLM, Completion, SamplingParams
from draftwood.drafters import Drafter, DraftRequest, NeuralDrafter, VerifiedTree, check_drafter, drafter_classes
from draftwood.errors import OptionError
from draftwood.targets.tiny import tiny_target
from draftwood.text import TextCodec
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree, Proposal, TreeBuilder
from tests.conftest import logits_after

PROMPTS = [
    "hello hello hello",
    "a",
    "the cat sat on the mat, the cat sat",
    "xyz" * 20,
    "one two three one two",
    "q" * 9,
]


def _needs_only_the_target(cls: type[Drafter]) -> bool:
    try:
        check_drafter(cls, None)
    except OptionError:
        return False
    return not issubclass(cls, NeuralDrafter)


# Registered drafters that need only the target. The others have their own tests: `rest` with a datastore,
# neural drafters in tests/drafters/neural.
STANDALONE = {name: cls for name, cls in drafter_classes().items() if _needs_only_the_target(cls)}
CHOOSING = [name for name, cls in STANDALONE.items() if not cls.draws]
DRAWING = [name for name, cls in STANDALONE.items() if cls.draws]
COPYING = [name for name, cls in STANDALONE.items() if cls.copies_text]


class WildDrafter(Drafter):
    """Random trees from a small vocabulary: chosen, drawn or mixed children at every node."""

    name = "wild"

    def begin(self, request: DraftRequest) -> None:
        self._last = request.prompt_ids[-1]
        self._rng = request.rng
        self._draws = not request.params.is_greedy

    def propose(self, budget: int) -> DraftTree:
        builder = TreeBuilder(self._last)
        proposals, num_chosen = {}, {}
        node = 0
        while node < len(builder) and len(builder) + 4 <= budget:
            chosen = self._rng.choice(256, size=int(self._rng.integers(0, 3)), replace=False)
            for token in chosen:
                builder.add(node, int(token), "chosen")
            if self._draws and self._rng.random() < 0.7:
                rest = np.setdiff1d(np.arange(256), chosen)
                q = self._rng.dirichlet(np.full(len(rest), 0.1))
                ids, q = rest[q > 1e-9], q[q > 1e-9] / q[q > 1e-9].sum()
                for token in self._rng.choice(ids, size=min(2, len(ids)), replace=False, p=q):
                    builder.add(node, int(token), "drawn")
                proposals[node], num_chosen[node] = Proposal(ids, q), len(chosen)
            node += 1
        return builder.build(proposals, num_chosen)

    def observe(self, verified: VerifiedTree) -> None:
        self._last = verified.emitted[-1]


class OracleDrafter(Drafter):
    """Knows the plain output and drafts exactly that, with decoys."""

    name = "oracle"
    outputs: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012 - see ``learn``

    @classmethod
    def learn(cls, llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[Completion]:
        """Learn the plain output of these prompts and forget all others."""
        plain = llm.generate(prompts, params, drafter="plain")
        cls.outputs = {tuple(llm.tokenizer.encode(p)): c.token_ids for p, c in zip(prompts, plain, strict=True)}
        return plain

    def begin(self, request: DraftRequest) -> None:
        self._last = request.prompt_ids[-1]
        self._ahead = list(self.outputs[tuple(request.prompt_ids)])

    def propose(self, budget: int) -> DraftTree:
        builder = TreeBuilder(self._last)
        node = 0
        for token in self._ahead[: (budget - 1) // 2]:
            builder.add(node, (token + 1) % 256, "decoy")
            node = builder.add(node, token, "oracle")
        return builder.build()

    def observe(self, verified: VerifiedTree) -> None:
        self._ahead = self._ahead[len(verified.emitted) :]
        self._last = verified.emitted[-1]


@pytest.fixture(params=["eager", "auto"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with make_llm(request.param) as llm:
        yield llm


def make_llm(backend: str = "auto", codec: TextCodec | None = None, **options: object) -> LLM:
    target = tiny_target(backend=backend, cache_tokens=4096)
    return LLM.from_target(target, codec or ByteTokenizer(), **{"drafter": "plain", "budget": 12, **options})


def reference(llm: LLM, prompt: str, max_tokens: int) -> list[int]:
    """Greedy decoding by hand, with a full pass for every token."""
    tokens = llm.tokenizer.encode(prompt)
    output: list[int] = []
    while len(output) < max_tokens and 257 not in output:
        output.append(int(logits_after(llm._engine.target, tokens + output)[-1].argmax()))
    return output


def law_of_pairs(llm: LLM, prompt: Sequence[int], temperature: float, top_k: int) -> dict[tuple[int, int], float]:
    """The model's probability of every pair of first tokens, warped by hand."""

    def probabilities(tokens: Sequence[int]) -> torch.Tensor:
        scores = logits_after(llm._engine.target, tokens)[-1] / temperature
        return torch.where(scores >= scores.topk(top_k).values[-1], scores, -torch.inf).softmax(-1).double()

    first = probabilities(prompt)
    expected = {}
    for a in first.nonzero().flatten().tolist():
        second = probabilities([*prompt, a])
        for b in second.nonzero().flatten().tolist():
            expected[a, b] = float(first[a] * second[b])
    return expected
