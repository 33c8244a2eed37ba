"""Structured output equals plain masked decoding: greedy token for token, sampled by enumerating every outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from draftwood import LLM, SamplingParams, Structured
from draftwood.drafters import Drafter
from draftwood.engine.accepting import accept_matching
from draftwood.engine.session import Session
from draftwood.sampling import Randomness, Warper
from draftwood.sources import build_datastore, tokenizer_fingerprint
from draftwood.structured import Structure, constrain, trees
from draftwood.tree import DraftTree
from tests.tools.engine import CHOOSING, DRAWING, WildDrafter, make_llm
from tests.tools.enumeration import KINDS, Case, Law, Shape, depth_of, difference, outcomes
from tests.tools.neural import NEURAL, neural_llm, random_target, same_as_plain
from tests.tools.structured import END, LetterTokenizer, Words, compile_for, masked_greedy

pytest.importorskip("llguidance")

PATTERN = "(ab|ba){1,3}c?"
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["oak", "ash", "elm"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "height": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "tags", "height"],
    "additionalProperties": False,
}
STRUCTURES = [
    Structured(json_schema=SCHEMA),
    Structured(regex="[a-f]{3,8}(, [a-f]{3,8})*\\."),
    Structured(grammar='start: item ("; " item){0,4}\nitem: NAME "=" NUMBER\nNAME: /[a-z]{1,4}/\nNUMBER: /[0-9]{1,3}/'),
]

PROMPTS = ["hello hello hello", "a", "one two three one two"]
MAX_TOKENS = 60
_EXPECTED: dict[tuple[str, Structured], list[int]] = {}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as tiny:
        yield tiny


def expected(llm: LLM, prompt: str, structured: Structured) -> list[int]:
    key = prompt, structured
    if key not in _EXPECTED:
        _EXPECTED[key] = masked_greedy(llm, llm.tokenizer.encode(prompt), structured, MAX_TOKENS)
    return _EXPECTED[key]


# -- greedy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structured", STRUCTURES, ids=lambda each: each.kind)
@pytest.mark.parametrize("drafter", [*CHOOSING, *DRAWING, WildDrafter])
def test_greedy_output_is_plain_masked_decoding(llm: LLM, drafter: str | type[Drafter], structured: Structured) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, structured=structured)
    found = llm.generate(PROMPTS, params, drafter=drafter)
    assert [completion.token_ids for completion in found] == [expected(llm, prompt, structured) for prompt in PROMPTS]


@pytest.mark.parametrize("budget", [1, 2, 40, "auto"])
def test_every_budget_gives_the_same_output(budget: int | str) -> None:
    params = SamplingParams(max_tokens=50, structured=STRUCTURES[0], presence_penalty=0.3)
    with make_llm(budget=budget) as tiny:
        plain = tiny.generate(PROMPTS, params, drafter="plain")
        for drafter in ("goose", "recycling"):
            assert [c.token_ids for c in tiny.generate(PROMPTS, params, drafter=drafter)] == [
                c.token_ids for c in plain
            ]


@pytest.mark.parametrize("drafter", CHOOSING)
def test_a_seed_gives_the_same_output_with_every_choosing_drafter(llm: LLM, drafter: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=11, structured=STRUCTURES[0])
    plain = llm.generate(PROMPTS, params, drafter="plain")
    assert [c.token_ids for c in llm.generate(PROMPTS, params, drafter=drafter)] == [c.token_ids for c in plain]


@pytest.mark.parametrize("drafter", NEURAL)
def test_neural_drafters(drafter: str) -> None:
    with neural_llm(drafter, random_target(cache_tokens=2048)) as tiny:
        for structured in STRUCTURES[:2]:
            same_as_plain(tiny, PROMPTS[:2], SamplingParams(max_tokens=24, structured=structured))


def test_a_datastore(llm: LLM, tmp_path: Path) -> None:
    texts = ['{"kind": "elm", "tags": [], "height": 12}', "abc, def, abcdef."]
    path = tmp_path / "texts.datastore"
    corpus = [llm.tokenizer.encode(text) for text in texts]
    vocab_size, fingerprint = llm.info.vocab_size, tokenizer_fingerprint(llm.tokenizer)
    build_datastore(corpus, vocab_size=vocab_size, tokenizer=fingerprint, sources=["a"]).save(path)
    with make_llm(drafter="rest", drafter_options={"datastore": str(path)}) as tiny:
        for structured in STRUCTURES:
            found = tiny.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, structured=structured))
            assert [c.token_ids for c in found] == [expected(llm, prompt, structured) for prompt in PROMPTS]


def test_batches_mix_structures(llm: LLM) -> None:
    kinds = [SamplingParams(max_tokens=30, structured=each) for each in (*STRUCTURES, None)]
    alone = [llm.generate(PROMPTS[0], params, drafter="goose")[0].token_ids for params in kinds]
    requests = [llm.request(llm.tokenizer.encode(PROMPTS[0]), params, drafter="goose") for params in kinds]
    assert [completion.token_ids for completion in llm._run(requests)] == alone


# -- sampled -----------------------------------------------------------------------------------------------------------


def masked_probs(case: Case, words: Words, context: tuple[int, ...]) -> dict[int, float]:
    """The law of the next token in plain masked decoding; empty after the end."""
    p = case.probs(context)[0].double()
    allowed = words.allowed(context)
    total = sum(float(p[token]) for token in allowed)
    return {token: float(p[token]) / total for token in allowed if p[token] > 0.0}


def extend(case: Case, words: Words, law: Law, length: int) -> Law:
    whole: Law = defaultdict(float)
    for output, weight in law.items():
        after = masked_probs(case, words, output) if len(output) < length else {}
        if not after:
            whole[output] += weight
        longer = {(*output, token): weight * share for token, share in after.items()}
        for sequence, share in extend(case, words, longer, length).items() if longer else ():
            whole[sequence] += share
    return whole


def run_cycle(
    structure: Structure, case: Case, shape: Shape, kind: str, start: tuple[int, ...], chance: Randomness
) -> tuple[int, ...]:
    """Draft, constrain, verify and cut, as one cycle of the engine does after the output ``start``."""
    after_start = Case(case.pair, case.vocab, case.seed)
    after_start.probs = lambda context: case.probs((*start, *context))  # type: ignore[assignment]
    matcher = structure.start()
    assert matcher.take(start) == len(start)
    tree = constrain(after_start.draft(shape, kind, chance), matcher, 9)
    logits = torch.stack([after_start.probs(tuple(tree.path_tokens(node)))[0].log() for node in range(len(tree))])
    params = SamplingParams(temperature=1.0)
    session = SimpleNamespace(tree=tree, matcher=matcher, params=params, randomness=chance, warper=Warper(params, [0]))
    accepted = accept_matching(cast(Session, session), matcher, logits, logits.argmax(-1).tolist())
    tokens = accepted.token_ids(cast(DraftTree, tree))
    return tuple(tokens[: matcher.take_output(tokens)])


SHAPES: list[Shape] = [
    (),
    ((),),
    ((), ()),
    (((),),),
    ((), (), ()),
    (((), ()), ()),
    ((((),),), ()),
    ((((), ()),), ((),)),
]


@pytest.mark.parametrize("start", [(), (0,), (2, 1), (2, 2, 0, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_output_has_the_law_of_plain_masked_decoding(kind: str, start: tuple[int, ...]) -> None:
    words, structure = Words(PATTERN), compile_for(LetterTokenizer(), Structured(regex=PATTERN))
    for shape in SHAPES if kind == "chosen" else SHAPES[:4]:
        case, length = Case("independent", vocab=END + 1), len(start) + depth_of(shape) + 4
        law: Law = defaultdict(float)
        for output, weight in outcomes(partial(run_cycle, structure, case, shape, kind, start)):
            law[*start, *output] += weight
        expected = extend(case, words, {start: 1.0}, length)
        assert difference(extend(case, words, law, length), expected) < 1e-6, shape


def test_the_enumeration_detects_dropped_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbidden children must stay where children were drawn, or the others are accepted too often."""
    words, case, shape = Words(PATTERN), Case("independent", vocab=END + 1), ((), ())
    structure = compile_for(LetterTokenizer(), Structured(regex=PATTERN))

    def run(chance: Randomness) -> tuple[int, ...]:
        with monkeypatch.context() as patch:
            walk = trees._walk

            def drop(tree: DraftTree, *args: Any, **options: Any) -> tuple[list[int], list[trees.Span]]:
                allowed, (kept, _) = words.allowed(()), walk(tree, *args, **options)
                return [node for node in kept if node == 0 or tree.tokens[node] in allowed], []

            patch.setattr(trees, "_walk", drop)
            return run_cycle(structure, case, shape, "drawn", (), chance)

    law: Law = defaultdict(float)
    for output, weight in outcomes(run):
        law[output] += weight
    expected = extend(case, words, {(): 1.0}, 3)
    assert difference(extend(case, words, law, 3), expected) > 1e-3
