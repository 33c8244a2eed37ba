"""Speculative sampling: a small model with the same vocabulary drafts for the large one."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.drafters.neural import MAX_NODES, NeuralDrafter, NeuralOptions, SharedDraftModel
from draftwood.errors import ModelError, OptionError
from draftwood.sources.neural import SmallModel
from draftwood.targets import Target, load_target
from draftwood.text import TextCodec

SAMPLES = 200  # tokens whose texts are compared
MORE_SLOTS = 8 * MAX_NODES  # for the trees of some requests, beyond what the target holds of their texts
SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallModelOptions(NeuralOptions):
    growth: str = "salf"
    model: str = ""  # a known name, a folder, a GGUF file or a hub id


class SmallModelDrafter(NeuralDrafter):
    name = "sps"
    summary = "Speculative sampling: a small model with the same vocabulary drafts"
    guesses_from = "a small model (`model=NAME`)"
    tree_shape = "best-first with early stop (`growth=salf`)"
    Options = SmallModelOptions

    @classmethod
    def check(cls, options: SmallModelOptions) -> None:
        if not options.model:
            raise OptionError(
                "The drafter 'sps' needs a draft model",
                next_step="Name one: drafter_options={'model': 'NAME'}, or --drafter-option model=NAME.",
            )

    @classmethod
    def attach(cls, options: SmallModelOptions, target: Target, codec: TextCodec) -> SharedDraftModel:
        info = target.info
        loaded = load_target(
            options.model,
            dtype=str(info.dtype).removeprefix("torch."),
            device=str(info.device),
            cache_tokens=target.num_slots + MORE_SLOTS,
        )
        check_same_vocabulary(codec, loaded.codec, info.name, loaded.target.info.name)
        return cls.make_shared(SmallModel(loaded.target, info.vocab_size), options, info)


def check_same_vocabulary(codec: TextCodec, other: TextCodec, name: str, other_name: str) -> None:
    """Refuses a draft model whose tokens mean something else. Ids that only one of them has do no harm at the end of a
    vocabulary, where families pad it differently."""
    shared = min(codec.vocab_size, other.vocab_size)
    step = max(1, shared // SAMPLES)
    ids = [*range(0, shared, step), *range(max(0, shared - SAMPLES), shared)]
    differing = [index for index in dict.fromkeys(ids) if codec.token_text(index) != other.token_text(index)]
    if differing:
        pairs = [f"{index}: {codec.token_text(index)!r} / {other.token_text(index)!r}" for index in differing[:SHOWN]]
        raise ModelError(
            "The draft model speaks another vocabulary",
            got=f"{name} has {codec.vocab_size} tokens, {other_name} {other.vocab_size}; {', '.join(pairs)}",
            allowed="a model with the same tokenizer",
            next_step="Use a smaller model of the same family.",
        )
