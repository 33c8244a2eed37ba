"""Training steps: gradients, saved state and the log."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.display import ticks
from draftwood.errors import DraftwoodError, MissingExtraError, OptionError
from draftwood.targets.tiny import tiny_target
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.config import OptimSection
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.frozen.stored_signals import StoredSignals
from draftwood.train.loop.distributed import Processes
from draftwood.train.loop.logs import Board, Log, read_log
from draftwood.train.loop.schedule import MovingAverage, learning_rate
from draftwood.train.loop.setup import make_head_config
from draftwood.train.loop.trainer import NotFiniteError, Trainer
from draftwood.train.measure.plot import average_points, plot_log
from tests.tools.train import MODEL, random_examples
from tests.tools.trainer import PlainMethod, Texts, configuration, losses, plain_trainer, run, same, state_of

PARTS = [[0, 1], [2], [3, 4, 5]]  # batches with different numbers of positions that count


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.head.state_dict().items()}


def test_micro_batches_are_weighted_by_counted_positions() -> None:
    whole, parts = plain_trainer([[0, 1, 2, 3, 4, 5]]), plain_trainer(PARTS, "optim.accumulate=3")
    for _ in range(3):
        one, other = whole.step(), parts.step()
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.weight == other.weight
        assert one.tokens == other.tokens
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)
        assert one.parts["accuracy"] == pytest.approx(other.parts["accuracy"], rel=1e-5)


def test_gradients_are_clipped_and_norm_is_logged() -> None:
    free, clipped = plain_trainer(PARTS, "optim.clip=0"), plain_trainer(PARTS, "optim.clip=0.01")
    assert free.step().gradient_norm == pytest.approx(clipped.step().gradient_norm)
    lengths = [
        torch.stack([p.grad.norm() for p in each.head.parameters() if p.grad is not None]).norm().item()
        for each in (free, clipped)
    ]
    assert lengths[0] > 1.0
    assert lengths[1] == pytest.approx(0.01, rel=1e-3)


def test_training_lowers_the_loss() -> None:
    trainer = plain_trainer([[0, 1, 2, 3, 4, 5]], "optim.lr=1e-2", "optim.clip=1.0", steps=40)
    results = [trainer.step() for _ in range(40)]
    assert results[-1].loss < 0.1 * results[0].loss
    assert results[-1].parts["accuracy"] > 0.9
    loss, parts = trainer.validation_loss([random_examples([6, 9, 14, 20, 8, 11], prompt=3)])
    assert loss < 1.1 * results[-1].loss
    assert parts["accuracy"] > 0.9


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_half_precision_is_used_for_matmuls_only() -> None:
    trainer = plain_trainer(PARTS, "run.dtype=bfloat16")
    exact = plain_trainer(PARTS)
    assert trainer.step().loss == pytest.approx(exact.step().loss, rel=0.05)
    assert {parameter.dtype for parameter in trainer.head.parameters()} == {torch.float32}
    assert not same(weights(trainer), weights(exact))


@pytest.mark.parametrize("method", ["eagle3", "talf"])
def test_recomputed_activations_do_not_change_results(tmp_path: Path, method: str) -> None:
    plain = run(configuration(tmp_path / "plain", method=method))
    again = run(configuration(tmp_path / "again", "run.checkpointing=true", method=method))
    assert losses(plain) == pytest.approx(losses(again), rel=1e-5)


class BreakingMethod(PlainMethod):
    """Fails with a certain text."""

    wrong = "loss"

    def losses(self, batch: Batch, signals: Signals) -> Losses:
        found = super().losses(batch, signals)
        if batch.token_ids.shape[1] != 14:  # the batch [2]
            return found
        root = (found.total * 0.0).sqrt()  # zero, with a gradient that is infinite
        return found._replace(total=found.total + (root if self.wrong == "gradient" else root / root))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("loss", r"The loss is not finite in step 1\n  got: epoch 0, batch 1\n"),
        ("gradient", r"The gradients are not finite in step 1\n  got: epoch 0, batches 0 to 2\n"),
    ],
)
def test_non_finite_step_is_not_taken_and_names_its_batch(
    monkeypatch: pytest.MonkeyPatch, wrong: str, message: str
) -> None:
    monkeypatch.setattr(BreakingMethod, "wrong", wrong)
    trainer = plain_trainer(PARTS, "optim.accumulate=3", cls=BreakingMethod)
    before = weights(trainer)
    with pytest.raises(NotFiniteError, match=message):
        trainer.step()
    assert same(before, weights(trainer))
    assert trainer.progress.step == 0


def test_epochs_are_consecutive_and_empty_data_is_reported() -> None:
    trainer = plain_trainer(PARTS, "optim.accumulate=2", steps=8)
    places = []
    for _ in range(4):
        trainer.step()
        places.append(tuple(trainer.progress.place))
    assert places == [(0, 2), (1, 1), (1, 3), (2, 2)]
    with pytest.raises(OptionError, match="too few texts to train on"):
        plain_trainer([]).step()


def step_lasting(trainer: Trainer, seconds: float) -> float:
    """Take a step with the given simulated duration; return its learning rate."""
    before = trainer.progress.seconds
    rate = trainer.step().lr
    assert trainer.progress.seconds > before
    trainer.progress.seconds = before + seconds
    return rate


def rates(trainer: Trainer, seconds: float = 3.0) -> list[float]:
    """The learning rates of a run with steps of the given duration."""
    found = []
    while not trainer.is_done:
        found.append(step_lasting(trainer, seconds))
    return found


def test_run_limited_by_minutes_ends_on_time_with_rate_zero() -> None:
    changes = ("optim.steps=0", "optim.minutes=1")
    timed = rates(plain_trainer(PARTS, *changes))
    assert timed == pytest.approx(rates(plain_trainer(PARTS, steps=20)))
    assert len(rates(plain_trainer(PARTS, *changes), seconds=500.0)) == 1


def test_minutes_continue_after_resume() -> None:
    changes = ("optim.steps=0", "optim.minutes=1")
    first, second = (plain_trainer(PARTS, *changes) for _ in range(2))
    whole = rates(plain_trainer(PARTS, *changes))
    for _ in range(7):
        step_lasting(first, 3.0)
    second.restore(first.snapshot())
    assert rates(second) == pytest.approx(whole[7:])


def test_minutes_are_refused_for_several_processes() -> None:
    trainer = plain_trainer(PARTS, "optim.steps=0", "optim.minutes=1")
    with pytest.raises(OptionError, match="one process only"):
        Trainer(trainer.config, trainer.method, trainer._texts, trainer._source, 0, Processes(world_size=2))


# -- schedules -------------------------------------------------------------------------------------------------------


@given(warmup=st.integers(0, 50), steps=st.integers(1, 200), end=st.floats(0.0, 1.0))
def test_learning_rate_warms_up_linearly_and_decays(warmup: int, steps: int, end: float) -> None:
    optim = OptimSection(lr=1e-3, lr_end=end, warmup_steps=warmup, steps=steps)
    rates = [learning_rate(optim, step, steps) for step in range(steps)]
    top = min(warmup, steps)
    assert all(0.0 < rate <= 1e-3 * (1 + 1e-9) for rate in rates[: top + 1])
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(rate >= 1e-3 * end * (1 - 1e-9) for rate in rates[top:])
    assert learning_rate(optim, steps, steps) == pytest.approx(1e-3 * (end if top < steps else 1.0))


def test_moving_average_is_applied_and_weights_are_restored() -> None:
    weight = torch.zeros(2)
    mean = MovingAverage([weight], 0.5)
    for step, value in enumerate([1.0, 3.0], start=100):
        weight.fill_(value)
        mean.update(step)
    assert mean.values[0].tolist() == [1.75, 1.75]
    with mean.applied():
        assert weight.tolist() == [1.75, 1.75]
    assert weight.tolist() == [3.0, 3.0]
    assert mean.values[0].tolist() == [1.75, 1.75]


def test_saved_head_is_the_moving_average(tmp_path: Path) -> None:
    run(configuration(tmp_path / "run", "optim.ema=0.5"))
    kept, last = (state_of(tmp_path / "run" / name) for name in ("head", "checkpoints/step-00000004/head"))
    assert not torch.equal(kept["fc.weight"], last["fc.weight"])
    assert torch.equal(kept["d2t"], last["d2t"])


# -- hidden states on disk -------------------------------------------------------------------------------------------


def test_cached_signals_match_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = plain_trainer(PARTS)
    frozen, taps = trainer.method.frozen, trainer.head.config.taps
    examples = random_examples([6, 9, 14], prompt=3)
    kept = StoredSignals(frozen, tmp_path / "kept", taps)
    kept.fill([examples[:2], examples[2:]], torch.device("cpu"), None)
    kept.open()
    size = (tmp_path / "kept" / "states.bin").stat().st_size
    assert size == kept.num_bytes(29)
    batch = Batch.of([examples[2], examples[0]])
    wanted = frozen.signals(batch)
    with monkeypatch.context() as patch:
        patch.setattr(type(frozen), "signals", lambda *_: pytest.fail("the target ran"))
        found = kept.signals(batch)
        StoredSignals(frozen, tmp_path / "kept", taps).fill([examples], torch.device("cpu"), None)  # they exist
    assert torch.equal(found.taps, wanted.taps)
    assert torch.equal(found.hidden, wanted.hidden)
    unknown = Batch.of(random_examples([5], seed=7))
    assert torch.equal(kept.signals(unknown).hidden, frozen.signals(unknown).hidden)
    with pytest.raises(OptionError, match="belong to another model or dtype"):
        StoredSignals(frozen, tmp_path / "kept", taps[:1]).open()


def test_cached_signals_of_quantized_model_are_separate(tmp_path: Path) -> None:
    examples, taps = random_examples([6, 9]), (0, 1, 2)
    for quantize in (None, "int8"):
        frozen = FrozenTarget(tiny_target(MODEL, backend="eager", quantize=quantize), taps)
        kept = StoredSignals(frozen, tmp_path, taps)
        if quantize is None:
            kept.fill([examples], torch.device("cpu"), None)
        else:
            with pytest.raises(OptionError, match="belong to another model or dtype"):
                kept.fill([examples], torch.device("cpu"), None)


@pytest.mark.parametrize("place", ["Tiny-0.6B", "Tiny-0.6B.gguf"])
def test_head_config_has_target_name_not_path(place: str, tmp_path: Path) -> None:
    there = tmp_path / place
    there.touch() if there.suffix == ".gguf" else there.mkdir()
    config = configuration(tmp_path / "run", f"model.name={there}", method="eagle")
    assert make_head_config(config, MODEL).target_name == "Tiny-0.6B"


def test_cached_signals_need_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = plain_trainer(PARTS)
    kept = StoredSignals(trainer.method.frozen, tmp_path, trainer.head.config.taps)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(DraftwoodError, match="too full"):
        kept.fill([random_examples([6])], torch.device("cpu"), None)
    assert not list(tmp_path.iterdir())


def test_run_with_cached_signals_has_same_losses(tmp_path: Path) -> None:
    plain = run(configuration(tmp_path / "plain", method="eagle"))
    kept = run(configuration(tmp_path / "kept", f"run.cache_signals={tmp_path / 'states'}", method="eagle"))
    assert losses(plain) == losses(kept)
    assert (tmp_path / "states" / "index.json").is_file()


# -- logs ------------------------------------------------------------------------------------------------------------


def test_resumed_log_drops_repeated_steps(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path)
    for step in (1, 2, 3):
        log.add("train", {"step": step})
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # the process was killed
    Log(path, from_step=2).add("train", {"step": 3, "new": True})
    assert [line["step"] for line in read_log(path)] == [1, 2, 3]
    assert read_log(path)[-1]["new"]
    assert not read_log(tmp_path / "none.jsonl")


def test_tensorboard_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.compat.proto.event_pb2", None)
    Board("auto", tmp_path).add("train", {"step": 1, "loss": 2.0})
    with pytest.raises(MissingExtraError, match="tensorboard"):
        Board("on", tmp_path)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=900), st.integers(0, 5))
def test_plot_is_valid_for_any_log(values: list[float], num_validated: int) -> None:
    lines = [{"kind": "train", "step": step, "loss": value} for step, value in enumerate(values)]
    lines += [
        {"kind": "validate", "step": step, "loss": 1.0, "trees": {"beam & more": {"tau": 1.0 + step}}}
        for step in range(num_validated)
    ]
    picture = ElementTree.fromstring(plot_log(lines, "<a run>"))
    curves = [node for node in picture.iter() if "data-m" in node.attrib]
    assert len(curves) == bool([v for v in values if math.isfinite(v)]) + 2 * bool(num_validated)
    assert len(average_points([(0.0, value) for value in values])) <= 400


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_ticks_are_few_and_within_range(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-6 <= value <= low + span + 1e-6 for value in found)


def test_values_that_hardly_differ_have_one_tick() -> None:
    assert ticks(0.0, 5e-324) == [0.0]
    assert ticks(2.0, math.nextafter(2.0, 3.0)) == [2.0]


def test_fake_texts_have_interface_of_training_data() -> None:
    """The interface that the trainer uses is that of `TrainingData`."""
    from draftwood.train.data.read import TrainingData

    names = {name for name in vars(Texts) if not name.startswith("_")} | {"__getitem__"}
    assert names <= set(dir(TrainingData))


def test_small_cache_limits_texts_at_once(tmp_path: Path) -> None:
    """Training and validation adapt to the cache size; losses do not change."""
    more = ("data.held_out=4", "validate.texts=4", "validate.prompts=1", "validate.max_tokens=4", "run.max_tokens=256")
    usual = run(configuration(tmp_path / "usual", *more, method="eagle"))
    narrow = run(configuration(tmp_path / "narrow", *more, "model.cache_tokens=300", method="eagle"))
    assert losses(narrow) == pytest.approx(losses(usual), rel=1e-5)
    with pytest.raises(OptionError, match="longest text does not fit"):
        run(configuration(tmp_path / "none", *more, "model.cache_tokens=8", method="eagle"))


def test_hidden_states_have_the_dtype_of_the_target() -> None:
    """Whatever a pass returns: they are stored by their size."""
    target = tiny_target(MODEL, dtype=torch.bfloat16)
    found = FrozenTarget(target, (1, 2))._run_passes(Batch.of(random_examples([5, 7])))
    assert found.dtype == target.info.dtype
