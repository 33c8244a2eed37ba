"""Speculative sampling: a small model with the same vocabulary drafts for the large one."""

from dataclasses import dataclass

from draftwood.config import ModelOptions
from draftwood.drafters.neural import NeuralDrafter, SharedDraftModel
from draftwood.drafters.neural_options import MAX_NODES, NeuralOptions
from draftwood.errors import ModelError, OptionError
from draftwood.sources.neural import SmallModel
from draftwood.targets import Target, load_target
from draftwood.text import TextCodec

NUM_COMPARED = 200  # tokens whose texts are compared
EXTRA_SLOTS = 8 * MAX_NODES  # for the trees of several requests, besides the texts that the target can hold
SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallModelOptions(NeuralOptions):
    growth: str = "salf"
    threshold: float = 0.6  # `salf`: stop when the expected tokens of another draft pass fall below this
    model: str = ""  # known name, folder, GGUF file or hub id


class SmallModelDrafter(NeuralDrafter):
    name = "sps"
    summary = "Speculative sampling: a small model with the same vocabulary drafts"
    guesses_from = "a small model (`model=NAME`)"
    tree_shape = "best-first with early stop (`growth=salf`)"
    can_rest = True
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
            ModelOptions(
                model=options.model,
                # On a CPU a GGUF file runs as it is stored, which a dtype would forbid.
                dtype="auto" if info.device.type == "cpu" else str(info.dtype).removeprefix("torch."),
                device=str(info.device),
                cache_tokens=target.num_slots + EXTRA_SLOTS,
            )
        )
        check_same_vocabulary(codec, loaded.codec, info.name, loaded.target.info.name)
        return cls.make_shared(SmallModel(loaded.target, info.vocab_size), options, info)


def check_same_vocabulary(codec: TextCodec, other: TextCodec, name: str, other_name: str) -> None:
    """Raise if the draft model has another vocabulary. Extra ids at the end are allowed: model families pad their
    vocabularies differently."""
    shared = min(codec.vocab_size, other.vocab_size)
    step = max(1, shared // NUM_COMPARED)
    ids = [*range(0, shared, step), *range(max(0, shared - NUM_COMPARED), shared)]
    differing = [index for index in dict.fromkeys(ids) if codec.token_text(index) != other.token_text(index)]
    if differing:
        pairs = [f"{index}: {codec.token_text(index)!r} / {other.token_text(index)!r}" for index in differing[:SHOWN]]
        raise ModelError(
            "The draft model has another vocabulary",
            got=f"{name} has {codec.vocab_size} tokens, {other_name} {other.vocab_size}; {', '.join(pairs)}",
            allowed="a model with the same tokenizer",
            next_step="Use a smaller model of the same family.",
        )
