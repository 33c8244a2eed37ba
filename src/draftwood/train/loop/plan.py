"""Plan of a training run: parameters, memory, number of steps, and their time, measured on a few steps.

Memory is estimated from shapes. Activations are those of the unrolled steps of the head; memory that the caching
allocator reserves is not included. *Work* is the largest temporary memory of a block of positions or of a step.
"""

from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch

from draftwood.display import duration, readable_size
from draftwood.heads import HeadConfig, build_head, find_head, find_local_shape, load_head, load_target_shape
from draftwood.models import ModelConfig, resolve, tensor_shapes
from draftwood.progress import Progress, report
from draftwood.targets import default_cache_tokens, pick_device
from draftwood.train.config import TrainConfig
from draftwood.train.data import TrainingData
from draftwood.train.loop.setup import check_method, count_steps, make_head_config, open_texts, prepare
from draftwood.train.loop.trainer import Trainer, choose_dtype
from draftwood.train.losses import max_logits

TIMED_STEPS = 5
WARMUP_STEPS = 2
MAX_TIMING = 20.0  # seconds; at least one step is timed
LOGIT_BYTES, LABEL_BYTES = (
    12,
    4,
)  # per logit of the head (with log-probability and gradient), and per logit of the target
SCORE_BYTES = 12  # per attention score: raw, masked, and as a weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    method: str
    options: dict[str, Any]
    kind: str
    head_parameters: int
    draft_vocab_size: int
    dtype: str
    device: str
    texts: int
    held_out: int
    tokens: int  # per epoch
    batches: int  # per epoch and process
    tokens_per_step: int
    steps: int  # 0: limited by time, and not measured
    epochs: float
    memory: dict[str, int]  # bytes
    signal_bytes: int  # on disk, if hidden states are cached
    seconds_per_step: float | None = None
    not_timed: str = "--no-time"  # reason, if it was not timed

    @property
    def total_memory(self) -> int:
        return sum(self.memory.values())

    def content(self) -> dict[str, Any]:
        seconds = self.seconds_per_step
        more = {} if seconds is None else {"seconds": seconds * self.steps}
        return {**asdict(self), "total_memory": self.total_memory, **more}

    def rows(self) -> list[tuple[str, str]]:
        """Return rows of a table: name and description."""
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        seconds = self.seconds_per_step
        memory = ", ".join(f"{name} {readable_size(size)}" for name, size in self.memory.items())
        timed = f"not measured: {self.not_timed}" if seconds is None else duration(seconds * self.steps)
        pace = "" if seconds is None else f", {seconds:.3f} s per step, {self.tokens_per_step / seconds:,.0f} tokens/s"
        steps = f"{self.steps:,} ({self.epochs:.1f} epochs)" if self.steps else "limited by time,"
        return [
            ("method", f"{self.method}: {options}"),
            ("head", f"{self.kind}, {self.head_parameters / 1e6:,.1f} million parameters"),
            ("vocabulary", f"{self.draft_vocab_size:,} tokens"),
            ("texts", f"{self.texts:,} of {self.tokens:,} tokens, {self.held_out:,} held out"),
            ("steps", f"{steps} of about {self.tokens_per_step:,} tokens"),
            ("runs on", f"{self.device} in {self.dtype}"),
            ("memory", f"about {readable_size(self.total_memory)}: {memory}"),
            ("on disk", f"{readable_size(self.signal_bytes)} if run.cache_signals is set"),
            ("time", timed + pace),
        ]


def make_plan(
    config: TrainConfig, *, world_size: int = 1, timed: bool = True, progress: Progress | None = None
) -> Plan:
    """Plan a run without writing anything. The target is loaded only to time steps."""
    cls, options = check_method(config)
    texts, held_out = open_texts(config)
    shape = find_local_shape(config.model.name)
    if shape is None:
        resolve(config.model.name, progress)  # training needs it anyway
        shape = load_target_shape(config.model.name)
    if config.head.start:
        model = shape if isinstance(shape, ModelConfig) else None
        head = load_head(find_head(config.head.start), model=model).config
    else:
        head = make_head_config(config, shape)
    cls.check_kind(head.kind)
    outputs = cls.outputs_per_position(options, head)
    scores = cls.scores_per_position(options, head, int(texts.lengths.max(initial=0)))
    device = pick_device(config.model.device)
    dtype = choose_dtype(config.run.dtype, device)
    batches = texts.batches(config.run.max_tokens, seed=config.run.seed, world_size=world_size)
    tokens = int(texts.lengths.sum())
    per_step = tokens / max(1, len(batches) * world_size) * config.optim.accumulate * world_size
    steps = count_steps(config, texts, world_size)
    plan = Plan(
        method=cls.name,
        options=asdict(options),
        kind=head.kind,
        head_parameters=build_head(head, device="meta").num_parameters(),
        draft_vocab_size=head.draft_vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        texts=len(texts),
        held_out=len(held_out),
        tokens=tokens,
        batches=len(batches),
        tokens_per_step=round(per_step),
        steps=steps,
        epochs=steps * config.optim.accumulate / max(1, len(batches)),
        memory=estimate_memory(config, head, shape, dtype, device, outputs, scores, world_size),
        signal_bytes=signal_bytes(head, dtype, texts),
    )
    if not timed:
        return plan
    try:
        pace = measure_step_time(config, progress)
    except torch.OutOfMemoryError:  # a plan reports it instead of failing
        return replace(plan, not_timed=f"a step does not fit into the memory of {device}")
    if config.optim.minutes:
        steps = max(1, round(60.0 * config.optim.minutes / pace))
        plan = replace(plan, steps=steps, epochs=steps * config.optim.accumulate / max(1, len(batches)))
    return replace(plan, seconds_per_step=pace)


def signal_bytes(head: HeadConfig, dtype: torch.dtype, texts: TrainingData) -> int:
    """Return the size of the hidden states of all texts on disk."""
    return int(texts.lengths.sum()) * (head.num_taps + 1) * head.target_hidden_size * dtype.itemsize


def estimate_memory(
    config: TrainConfig,
    head: HeadConfig,
    shape: object,
    dtype: torch.dtype,
    device: torch.device,
    unrolled: int,
    scores: int,
    world_size: int = 1,
) -> dict[str, int]:
    """Estimate the bytes that one process needs, by purpose."""
    parameters = build_head(head, device="meta").num_parameters()
    parts = world_size if config.run.strategy == "fsdp" else 1
    tokens = config.run.max_tokens
    sizes = {"head": 4 * parameters, "gradients": 4 * parameters // parts, "optimiser": 8 * parameters // parts}
    if config.optim.ema:
        sizes["running mean"] = 4 * parameters // parts
    sizes["activations"] = tokens * unrolled * _activations(head, config.run.checkpointing) * dtype.itemsize
    sizes["work"] = max(_logit_bytes(head, tokens, unrolled, device), tokens * scores * SCORE_BYTES)
    sizes["hidden states"] = tokens * (head.num_taps + 1) * head.target_hidden_size * dtype.itemsize
    if isinstance(shape, ModelConfig):
        weights = sum(prod(size) for size in tensor_shapes(shape).values())
        slots = config.model.cache_tokens or default_cache_tokens(8, shape.context_length)
        sizes["target"] = weights * dtype.itemsize
        sizes["target's cache"] = slots * shape.cache_bytes_per_token(dtype.itemsize)
    return sizes


def _logit_bytes(head: HeadConfig, tokens: int, unrolled: int, device: torch.device) -> int:
    """Estimate the memory of the logits that are computed at once (`losses.Evaluator`)."""
    own, labels = unrolled * head.draft_vocab_size, head.vocab_size
    positions = min(tokens, max(1, max_logits(device) // (own + labels)))
    return positions * (LOGIT_BYTES * own + LABEL_BYTES * labels)


def _activations(head: HeadConfig, checkpointing: bool) -> int:
    """Return how many numbers per token and unrolled step the backward pass needs."""
    if not head.num_layers:
        return 3 * head.hidden_size * max(1, head.num_heads_ahead)
    if checkpointing:
        return 3 * head.hidden_size
    attention = (head.num_heads + 2 * head.num_kv_heads) * head.head_dim
    states = 16 if head.kind == "eagle3" else 10  # it normalises embeddings and features, and concatenates them
    return head.num_layers * (states * head.hidden_size + 3 * attention + 4 * head.intermediate_size)


def measure_step_time(config: TrainConfig, progress: Progress | None = None) -> float:
    """Measure the mean time of a few steps after warm-up. The head that they train is discarded."""
    setup = prepare(config, progress=progress)
    trainer = Trainer(config, setup.method, setup.texts, setup.frozen, setup.num_steps)
    times: list[float] = []
    while len(times) < WARMUP_STEPS + TIMED_STEPS and sum(times) < MAX_TIMING:
        report(progress, "timing steps", len(times), WARMUP_STEPS + TIMED_STEPS)
        times.append(trainer.step().seconds)
    report(progress, "timing steps", 1, 1)
    timed = times[WARMUP_STEPS:] or times[-1:]
    return sum(timed) / len(timed)
