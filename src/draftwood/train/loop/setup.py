"""From a configuration to everything a run needs: texts, the target, the head, the method."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    load_head_for,
    native_config,
)
from draftwood.models import ModelConfig
from draftwood.progress import Progress
from draftwood.targets import Target, load_target, pick_device
from draftwood.text import TextCodec
from draftwood.train.config import TrainConfig
from draftwood.train.data import TrainingData, draft_vocabulary
from draftwood.train.frozen import FrozenTarget, KeptSignals
from draftwood.train.loop.distributed import Processes
from draftwood.train.loop.trainer import SignalSource, compute_dtype
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
    coverage: float  # share of what the target wrote that the head's vocabulary has


def check_method(config: TrainConfig) -> tuple[type[Method], Any]:
    """The method's class and its options; a slip of the pen should not wait for a model to load."""
    cls = method_class(config.method.name)
    options = from_mapping(cls.Options, config.method.options, f"The method {config.method.name!r}")
    kind = config.head.kind
    if kind:
        cls.check_kind(kind)
    if cls.goes_on and not config.head.start:
        raise OptionError(
            f"The method {cls.name!r} makes a trained head better",
            next_step="Train one by another method first, and set head.start to its folder.",
        )
    return cls, options


def open_texts(config: TrainConfig) -> tuple[TrainingData, TrainingData]:
    """Those to train on, and those to validate on."""
    folders, most = config.data.folders, config.data.max_length
    data = TrainingData.open(*folders, max_length=most)
    if not len(data):
        prompts = [int(answered.argmax()) for _, answered in TrainingData.open(*folders).shuffled()]
        raise OptionError(
            "Texts that are cut so short have no answer left",
            got=f"data.max_length = {most}",
            allowed=f"{1 + min(prompts, default=most)} or more keep at least a token of one",
        )
    data.check_room(config.run.max_tokens)
    return data.split(config.data.held_out, config.run.seed)


def count_steps(config: TrainConfig, texts: TrainingData, world_size: int = 1) -> int:
    """0: as many as there is time for."""
    if config.optim.steps or config.optim.minutes:
        return config.optim.steps
    run, epochs = config.run, range(config.optim.epochs)
    sizes = [len(texts.batches(run.max_tokens, seed=run.seed, epoch=e, world_size=world_size)) for e in epochs]
    return max(1, sum(sizes) // config.optim.accumulate)


def head_shape(config: TrainConfig, shape: object) -> HeadConfig:
    """Of a head that starts anew, for a target of this shape."""
    cls, _ = check_method(config)
    if not isinstance(shape, ModelConfig):
        raise CapabilityError(
            "There is no usual head for a target that transformers runs",
            got=config.model.name,
            next_step="Start from a head that fits it: head.start = FOLDER.",
        )
    kind = config.head.kind or cls.kinds[0]
    own: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.head.changes.items()
    }
    size = config.head.draft_vocab_size or None
    here = Path(config.model.name).expanduser().absolute()  # a path says where a model lies, not what it is called
    name = here.name if here.is_dir() else here.stem if here.exists() else config.model.name
    head = default_head_config(kind, shape, draft_vocab_size=size, target_name=name, **own)
    problems = check_fit(head, shape)
    if problems:
        raise OptionError("A head with these head.changes does not fit the target", got="; ".join(problems))
    return head


def prepare(config: TrainConfig, processes: Processes | None = None, progress: Progress | None = None) -> Setup:
    processes = processes or Processes()
    cls, options = check_method(config)
    texts, held_out = open_texts(config)
    num_steps = count_steps(config, texts, processes.world_size)
    device = pick_device(processes.device(config.model.device))
    dtype = str(compute_dtype(config.run.dtype, device)).removeprefix("torch.")
    options = ModelOptions(
        model=config.model.name,
        dtype=dtype,
        device=str(device),
        target=config.model.target,
        cache_tokens=config.model.cache_tokens or None,
    )
    target, codec = load_target(options, progress)
    if not target.info.can_tap:
        raise CapabilityError("The target does not expose its hidden states", got=target.info.backend)
    texts.check_model(target)
    longest = max((int(data.lengths.max()) for data in (texts, held_out) if len(data)), default=0)
    if longest > target.num_slots:
        raise OptionError(
            "The target's cache has no room for the longest text",
            got=f"{longest} tokens",
            allowed=f"at most {target.num_slots}",
            next_step="Raise model.cache_tokens, or cut texts with data.max_length.",
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
    """In float32 on the target's device, bound to it; and what its vocabulary covers of what the target wrote."""
    if config.head.start:
        head = _started(config, target)
    else:
        shape = head_shape(config, native_config(target))
        head = build_head(replace(shape, target_fingerprint=fingerprint(target.parts().norm)))
        if isinstance(head, Eagle3Head) and head.config.has_draft_vocabulary:
            ends = target.info.eos_token_ids
            chosen = draft_vocabulary(texts, head.config.draft_vocab_size, head.config.vocab_size, ends)
            head.set_vocabulary(torch.from_numpy(chosen.token_ids))
        head = head.to(target.info.device)
        head.bind(target.parts())
        head.reset_parameters(torch.Generator().manual_seed(config.run.seed))
    return head.requires_grad_(True).train(), _coverage(head, texts)


def _started(config: TrainConfig, target: Target) -> HeadModule:
    head, head_config, _ = load_head_for(find_head(config.head.start), target, torch.float32)
    if config.head.kind and config.head.kind != head_config.kind:
        raise OptionError("The head to start from is of another kind", got=head_config.kind, allowed=config.head.kind)
    head.config = replace(head_config, target_fingerprint=fingerprint(target.parts().norm))  # it learns this one now
    return head


def _coverage(head: HeadModule, texts: TrainingData) -> float:
    if not isinstance(head, Eagle3Head):
        return 1.0
    written, _ = texts.token_counts()
    return float(written[head.vocabulary().cpu().numpy()].sum() / max(1, written.sum()))


def signal_source(config: TrainConfig, setup: Setup, processes: Processes, progress: Progress | None) -> SignalSource:
    """The target itself, or its hidden states on disk, which the first process writes if they are not there."""
    if not config.run.cache_signals:
        return setup.frozen
    taps = setup.head.config.taps_for(setup.target.info.num_layers)
    kept = KeptSignals(setup.frozen, Path(config.run.cache_signals), taps)
    if processes.is_first:
        groups = setup.texts.batches(config.run.max_tokens)
        kept.fill([[setup.texts[i] for i in group] for group in groups], setup.target.info.device, progress)
    processes.wait()
    kept.open()
    return kept
