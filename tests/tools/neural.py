"""Shared by tests of neural drafters: tiny targets, heads for them, and perfect heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafters import NeuralDrafter, drafter_classes
from draftwood.drafters.heads import HeadDrafter
from draftwood.growth.neural.policies import GROWTHS
from draftwood.heads import Eagle3Head, EagleHead, HeadModule, HydraHead, MedusaHead, save_head
from draftwood.models.config import ModelConfig
from draftwood.models.tensors import tensor_shapes
from draftwood.sampling import Warper
from draftwood.sources.neural.base import DraftModel
from draftwood.sources.neural.head import HeadModel
from draftwood.targets.load import Loaded
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import assemble
from draftwood.targets.tiny import TINY_CONFIG
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree, Proposal
from tests.conftest import logits_after, threads
from tests.tools.enumeration import Law
from tests.tools.head import random_head

CONFIG = replace(TINY_CONFIG, num_layers=6)  # enough for three taps that are not the last state
# Kind of head by drafter.
KIND_OF = {name: cls.kinds[-1] for name, cls in drafter_classes().items() if issubclass(cls, HeadDrafter)}
NEURAL = [name for name, cls in drafter_classes().items() if issubclass(cls, NeuralDrafter)]
KINDS = [*dict.fromkeys(KIND_OF.values()), "sps"]  # one drafter of each kind
_HEADS = TemporaryDirectory(prefix="heads-")
every_growth = pytest.mark.parametrize("growth", GROWTHS)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Products this small are faster with one thread."""
    with threads(1):
        yield


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by name, large enough that choices are not near ties."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else 2.0 / shape[-1] ** 0.5)
        tensors[name] = noise + 1.0 if "norm" in name else noise
    return tensors


def target_of(
    config: ModelConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, **options: Any
) -> NativeTarget:
    weights = assemble(config, lambda name: tensors[name].to(dtype))
    options = {"cache_tokens": 8192, "backend": "auto", **options}
    return NativeTarget("tiny", config, weights, options["cache_tokens"], backend=options["backend"])


def random_target(config: ModelConfig = CONFIG, seed: int = 0, noise: float = 0.0, **options: Any) -> NativeTarget:
    """``noise``: relative distance of the weights from the target without noise."""
    tensors = random_tensors(config, seed)
    if noise:
        other = random_tensors(config, seed + 1000)
        tensors = {name: torch.lerp(tensor, other[name], noise) for name, tensor in tensors.items()}
    return target_of(config, tensors, **options)


def saved_head(head: HeadModule) -> str:
    """A folder with the head, until the tests end."""
    folder = Path(_HEADS.name)
    return str(save_head(head, folder / f"head-{len(list(folder.iterdir()))}"))


@cache
def head_folder(kind: str, config: ModelConfig = CONFIG) -> str:
    """A random head: hardly any guess is right."""
    changes: dict[str, Any] = {"draft_vocab_size": config.vocab_size // 2} if kind == "eagle3" else {}
    if kind == "hydra":
        changes["prefix"] = True
    return saved_head(random_head(kind, config, **changes))


@contextmanager
def draft_models(make: Callable[..., NativeTarget]) -> Iterator[None]:
    """Set the model that ``sps`` loads within the context, for any name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "draftwood.drafters.sps.load_target",
            lambda options: Loaded(make(cache_tokens=options.cache_tokens), ByteTokenizer()),
        )
        yield


def neural_llm(
    drafter: str,
    target: NativeTarget,
    *,
    head: str | None = None,
    model: Callable[..., NativeTarget] | None = None,
    budget: int | str = 12,
    max_batch: int = 8,
    prefill_chunk: int = 256,
    **options: Any,
) -> LLM:
    """By default with a random head in its own numbers, or a draft model that sometimes agrees with the target."""
    if drafter != "sps":
        options = {"quantize": False, **options}
    with draft_models(model or (lambda **kwargs: random_target(noise=0.02, **kwargs))):
        place = {"model": "draft"} if drafter == "sps" else {"head": head or head_folder(KIND_OF[drafter])}
        return LLM.from_target(
            target,
            ByteTokenizer(),
            drafter=drafter,
            drafter_options={**place, **options},
            budget=budget,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
        )


def draft_model(llm: LLM) -> DraftModel:
    model: DraftModel = llm._default._shared.model
    return model


def is_empty(llm: LLM) -> bool:
    """Whether the cache of the draft model is empty."""
    model = draft_model(llm)
    book = model._cache if isinstance(model, HeadModel) else model.target.cache  # type: ignore[attr-defined]
    return bool(book.can_open(book.num_slots))


def tau(completions: Sequence[Any]) -> float:
    return sum(c.stats.output_tokens for c in completions) / sum(c.stats.cycles for c in completions)


def same_as_plain(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> list[Any]:
    results = llm.generate(prompts, params)
    plain = llm.generate(prompts, params, drafter="plain")
    assert [c.token_ids for c in results] == [c.token_ids for c in plain]
    assert [c.text for c in results] == [c.text for c in plain]
    assert [c.finish_reason for c in results] == [c.finish_reason for c in plain]
    assert is_empty(llm)
    return results


def mean_tree(results: Sequence[Any]) -> float:
    return max(c.stats.mean_tree_size for c in results)


def drafters_of(llm: LLM) -> list[NeuralDrafter]:
    """The drafters of the running requests."""
    return [session.drafter for session in llm._engine._scheduler.running]  # type: ignore[misc]


# -- perfect heads ---------------------------------------------------------------------------------------------------

ROUND = 24  # tokens; each has one successor, and together they form one cycle
SIZE = 48
CLOCK = replace(
    TINY_CONFIG,
    vocab_size=ROUND,
    hidden_size=SIZE,
    intermediate_size=SIZE,
    num_layers=6,
    num_heads=1,
    num_kv_heads=1,
    head_dim=SIZE,
    eos_token_ids=(),
)


def following(token: int) -> int:
    return (13 * token + 5) % ROUND


def clock_text(start: int, size: int) -> list[int]:
    text = [start]
    while len(text) < size:
        text.append(following(text[-1]))
    return text


def one_hot() -> torch.Tensor:
    """The embeddings, [V, H]: each token has its own axis among the first."""
    return torch.eye(ROUND, SIZE)


def successor_lm_head(steps: int = 1, sharpness: float = 2.0) -> torch.Tensor:
    """An lm_head, [V, H]: predicts the token that follows after ``steps`` steps."""
    head = torch.zeros(ROUND, SIZE)
    for token in range(ROUND):
        after = token
        for _ in range(steps):
            after = following(after)
        head[after, token] = sharpness
    return head


def clock_target(config: ModelConfig = CLOCK, **options: Any) -> NativeTarget:
    """A target whose next token is a function of the last one: its layers add nothing."""
    tensors = random_tensors(CLOCK)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    tensors["model.embed_tokens.weight"] = one_hot()
    tensors["model.norm.weight"] = torch.ones(SIZE)
    tensors["lm_head.weight"] = successor_lm_head()
    return target_of(config, tensors, **options)


def perfect_head(kind: str, noise: float = 0.0, tokens: Sequence[int] | None = None, **more: Any) -> HeadModule:
    """A head for the clock target that is always right; with ``noise`` sometimes wrong.

    ``tokens``: the draft vocabulary of an EAGLE-3 head.
    """
    changes: dict[str, Any] = {
        "eagle": {"feature": "raw", "fc_bias": False},
        "eagle3": {"norm_before_residual": True, "draft_vocab_size": len(tokens) if tokens else ROUND},
        "medusa": {},
        "hydra": {},
    }[kind]
    head = random_head(kind, CLOCK, **changes, **more)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        _teach(head, tokens)
        generator = torch.Generator().manual_seed(1)
        for parameter in head.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return head


def perfect_llm(drafter: str, **options: Any) -> LLM:
    head = None if drafter == "sps" else saved_head(perfect_head(KIND_OF[drafter]))
    return neural_llm(drafter, clock_target(), **{"head": head, "model": clock_target, **options})


def _teach(head: HeadModule, tokens: Sequence[int] | None) -> None:
    if isinstance(head, EagleHead):
        head.fc.weight[:, :SIZE] = torch.eye(SIZE)  # the token, and nothing before it
    elif isinstance(head, Eagle3Head):
        first = head.layers[0]
        first.input_layernorm.weight.fill_(SIZE**-0.5)  # the norm then sees one-hot vectors
        for projection, scale in (("q_proj", 20.0), ("k_proj", 20.0), ("v_proj", 1.0)):
            # A token attends to itself and equal tokens: they have their own axis in the half that is not rotated.
            getattr(first.self_attn, projection).weight[:, :SIZE] = scale * torch.eye(SIZE)
        first.self_attn.o_proj.weight.copy_(torch.eye(SIZE))
        head.norm.weight.fill_(1.0)
        if tokens:
            head.set_vocabulary(torch.tensor(tokens))
        head.lm_head.weight.copy_(successor_lm_head()[head.vocabulary()])
    elif isinstance(head, MedusaHead):
        for depth, branch in enumerate(head.branches, start=1):
            branch.lm_head.weight.copy_(successor_lm_head(depth + 1))  # from the token before the root
    elif isinstance(head, HydraHead):
        for branch in head.branches:
            branch.join.res_connection.weight[:, -SIZE:] = SIZE**0.5 * torch.eye(SIZE)  # the last token of the path
            branch.lm_head.weight.copy_(successor_lm_head())


# -- small vocabularies, for exact distributions ---------------------------------------------------------------------

FEW = replace(
    CONFIG,
    vocab_size=3,
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    eos_token_ids=(),
)
SOME = replace(FEW, vocab_size=12)
PROMPT = [1, 0, 2]


@cache
def few_head(config: ModelConfig) -> str:
    return saved_head(random_head("eagle", config))


def few_llm(drafter: str, config: ModelConfig, **options: Any) -> LLM:
    """The draft model is similar to the target."""
    return neural_llm(
        drafter,
        random_target(config),
        head=None if drafter == "sps" else few_head(config),
        model=lambda **kwargs: random_target(config, noise=0.1, **kwargs),
        **options,
    )


def law_of(llm: LLM, params: SamplingParams, size: int) -> Law:
    """The target's distribution of the next tokens."""
    law: Law = {(): 1.0}
    for _ in range(size):
        longer: Law = {}
        for output, weight in law.items():
            logits = logits_after(llm._engine.target, [*PROMPT, *output])[-1]
            probs = Warper(params, PROMPT).probs(logits, output).double()
            probs /= probs.sum()
            longer |= {(*output, int(t)): weight * float(probs[t]) for t in probs.nonzero().flatten()}
        law = longer
    return law


def with_wrong_proposals(tree: DraftTree) -> DraftTree:
    """Replace the proposals by uniform ones."""
    even = {
        node: Proposal(proposal.token_ids, np.full(len(proposal.probs), 1.0 / len(proposal.probs)))
        for node, proposal in tree.proposals.items()
    }
    return tree.replace(proposals=even)
