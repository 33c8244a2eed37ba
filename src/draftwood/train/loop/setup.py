"""Build everything a run needs from its configuration: texts, target, head and method."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from draftwood.config import ModelOptions, from_mapping
from draftwood.errors import CapabilityError, OptionError
from draftwood.heads import (
    Eagle3Head,
    HeadConfig,
    HeadModule,
    build_head,
    check_fit,
    default_head_config,
    find_head,
    fingerprint,
    grow_head,
    load_head_for,
    native_config,
)
from draftwood.models import ModelConfig
from draftwood.progress import Progress
from draftwood.targets import Target, load_target, pick_device
from draftwood.text import TextCodec
from draftwood.train.config import TrainConfig
from draftwood.train.data import TrainingData, draft_vocabulary
from draftwood.train.frozen import FrozenTarget, StoredSignals
from draftwood.train.loop.distributed import Processes
from draftwood.train.loop.trainer import SignalSource, choose_dtype
from draftwood.train.methods import Method, method_class


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    target: Target
    codec: TextCodec
    frozen: FrozenTarget
    head: HeadModule
    method: Method
    texts: TrainingData
    held_out: TrainingData
    num_steps: int
    coverage: float  # fraction of the generated tokens that are in the draft vocabulary


def check_method(config: TrainConfig) -> tuple[type[Method], Any]:
    """Return the method's class and options. Raise errors in them before a model is loaded."""
    cls = method_class(config.method.name)
    options = _method_options(cls, config.method.options)
    kind = config.head.kind
    if kind:
        cls.check_kind(kind)
    if cls.needs_trained_head and not config.head.start:
        raise OptionError(
            f"The method {cls.name!r} needs a trained head",
            next_step="Train a head with another method first, and set head.start to its folder.",
        )
    return cls, options


def _method_options(cls: type[Method], values: Mapping[str, Any]) -> Any:
    """Errors name the option as it is typed: method.steps."""
    try:
        return from_mapping(cls.Options, values, f"The method {cls.name!r}")
    except OptionError as error:
        if error.what.split()[0] not in {f.name for f in fields(cls.Options)}:
            raise
        raise OptionError(
            f"method.{error.what}", got=error.got, allowed=error.allowed, next_step=error.next_step
        ) from error


def open_texts(config: TrainConfig) -> tuple[TrainingData, TrainingData]:
    """Return the training texts and the held-out texts."""
    folders, most = config.data.folders, config.data.max_length
    data = TrainingData.open(*folders, max_length=most)
    if not len(data):
        prompts = [int(answered.argmax()) for _, answered in TrainingData.open(*folders).shuffled()]
        raise OptionError(
            "No text has an answer after truncation",
            got=f"data.max_length = {most}",
            allowed=f"{1 + min(prompts, default=most)} or more keeps an answer token of at least one text",
        )
    data.check_room(config.run.max_tokens)
    return data.split(config.data.held_out, config.run.seed)


def count_steps(config: TrainConfig, texts: TrainingData, world_size: int = 1) -> int:
    """Return the number of steps; 0 if the run is limited by time."""
    if config.optim.steps or config.optim.minutes:
        return config.optim.steps
    run, epochs = config.run, range(config.optim.epochs)
    sizes = [len(texts.batches(run.max_tokens, seed=run.seed, epoch=e, world_size=world_size)) for e in epochs]
    return max(1, sum(sizes) // config.optim.accumulate)


def make_head_config(config: TrainConfig, shape: object) -> HeadConfig:
    """Return the shape of a new head for a target of this shape."""
    cls, _ = check_method(config)
    if not isinstance(shape, ModelConfig):
        raise CapabilityError(
            "There is no default head for a target that runs in transformers",
            got=config.model.name,
            next_step="Start from a head for this model: head.start = FOLDER.",
        )
    kind = config.head.kind or cls.kinds[0]
    own: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.head.changes.items()
    }
    size = config.head.draft_vocab_size or None
    if size and size > shape.vocab_size:
        raise OptionError(
            "The draft vocabulary is larger than that of the target",
            got=f"head.draft_vocab_size = {size}",
            allowed=f"at most {shape.vocab_size}",
        )
    here = Path(config.model.name).expanduser().absolute()  # name a local model after its folder or file
    name = here.name if here.is_dir() else here.stem if here.exists() else config.model.name
    head = default_head_config(kind, shape, draft_vocab_size=size, target_name=name, **own)
    problems = check_fit(head, shape)
    if problems:
        raise OptionError("With these head.changes the head does not fit the target", got="; ".join(problems))
    return head


def prepare(config: TrainConfig, processes: Processes | None = None, progress: Progress | None = None) -> Setup:
    processes = processes or Processes()
    cls, options = check_method(config)
    texts, held_out = open_texts(config)
    num_steps = count_steps(config, texts, processes.world_size)
    device = pick_device(processes.device(config.model.device))
    dtype = str(choose_dtype(config.run.dtype, device)).removeprefix("torch.")
    model = ModelOptions(
        model=config.model.name,
        dtype=dtype,
        device=str(device),
        target=config.model.target,
        cache_tokens=config.model.cache_tokens or None,
    )
    target, codec = load_target(model, progress)
    if not target.info.can_tap:
        raise CapabilityError("The target does not expose its hidden states", got=target.info.backend)
    texts.check_model(target)
    longest = max((int(data.lengths.max()) for data in (texts, held_out) if len(data)), default=0)
    if longest > target.num_slots:
        raise OptionError(
            "The longest text does not fit into the target's cache",
            got=f"{longest} tokens",
            allowed=f"at most {target.num_slots}",
            next_step="Raise model.cache_tokens, or lower data.max_length.",
        )
    head, coverage = make_head(config, target, texts)
    frozen = FrozenTarget.of(target, head)
    method = cls(options, head, frozen, config.run.seed)
    return Setup(
        target=target,
        codec=codec,
        frozen=frozen,
        head=head,
        method=method,
        texts=texts,
        held_out=held_out,
        num_steps=num_steps,
        coverage=coverage,
    )


def make_head(config: TrainConfig, target: Target, texts: TrainingData) -> tuple[HeadModule, float]:
    """Return the head (float32, bound to the target, on its device) and the coverage of its vocabulary."""
    if config.head.start:
        head = _load_start(config, target)
    else:
        shape = make_head_config(config, native_config(target))
        head = build_head(replace(shape, target_fingerprint=fingerprint(target.parts().norm)))
        if isinstance(head, Eagle3Head) and head.config.has_draft_vocabulary:
            ends = target.info.eos_token_ids
            chosen = draft_vocabulary(texts, head.config.draft_vocab_size, head.config.vocab_size, ends)
            head.set_vocabulary(torch.from_numpy(chosen.token_ids))
        head = head.to(target.info.device)
        head.bind(target.parts())
        head.reset_parameters(torch.Generator().manual_seed(config.run.seed))
    return head.requires_grad_(True).train(), measure_coverage(head, texts)


def _load_start(config: TrainConfig, target: Target) -> HeadModule:
    head, head_config, _ = load_head_for(find_head(config.head.start), target, torch.float32)
    if config.head.kind and config.head.kind != head_config.kind:
        raise OptionError("The head in head.start is of another kind", got=head_config.kind, allowed=config.head.kind)
    head.config = replace(
        head_config, target_fingerprint=fingerprint(target.parts().norm)
    )  # it is trained for this target now
    return grow_head(head, config.head.changes, target.parts(), config.run.seed) if config.head.changes else head


def measure_coverage(head: HeadModule, texts: TrainingData) -> float:
    """Return the fraction of the generated tokens that are in the head's vocabulary."""
    if not isinstance(head, Eagle3Head):
        return 1.0
    written, _ = texts.token_counts()
    return float(written[head.vocabulary().cpu().numpy()].sum() / max(1, written.sum()))


def make_signal_source(
    config: TrainConfig, setup: Setup, processes: Processes, progress: Progress | None
) -> SignalSource:
    """Return the target, or its hidden states on disk, which the first process writes if they are missing."""
    if not config.run.cache_signals:
        return setup.frozen
    taps = setup.head.config.taps_for(setup.target.info.num_layers)
    stored = StoredSignals(setup.frozen, Path(config.run.cache_signals), taps)
    if processes.is_first:
        groups = setup.texts.batches(config.run.max_tokens)
        stored.fill([[setup.texts[i] for i in group] for group in groups], setup.target.info.device, progress)
    processes.wait()
    stored.open()
    return stored
