"""``draftwood inspect head --texts``: what a head is worth on texts that its model wrote."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from draftwood.cli.inspect.head_options import DEFAULT_GROWTHS, DEFAULTS, MAX_LENGTH, SECTION
from draftwood.cli.inspect.head_worth import _choose_texts
from draftwood.heads import save_head
from draftwood.targets.load import Loaded
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.train.config import DataSection, ValidateSection
from draftwood.train.data.read import TrainingData
from draftwood.train.loop.run import format_validation
from tests.tools.cli import Command, Result, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.head import SMALL, random_head
from tests.tools.train_data import lines, make
from tests.tools.trainer import configuration, data_folder, run

HELD_OUT = 5
SHORT = ("--max-tokens", "6", "--budget", "8", "--dtype", "float32", "--device", "cpu")


def asked(*more: str, model: str = "tiny", texts: str = "") -> tuple[str, ...]:
    return ("--model", model, "--texts", texts or data_folder(), *SHORT, *more)


@cache
def trained(method: str) -> tuple[str, dict[str, Any]]:
    """The folder of a head that was trained for a few steps, and what the run said of it on what it held out."""
    wanted = (f"data.held_out={HELD_OUT}", "validate.max_tokens=6", "validate.budget=8", "run.dtype=float32")
    out = Path(mkdtemp(prefix="worth-")) / method
    found = run(configuration(out, *wanted, method=method))
    return str(out / "head"), found[-1]


def worth_of(result: Result) -> dict[str, Any]:
    assert result.code == 0, result.err
    worth = json.loads(result.out)["worth"]
    assert isinstance(worth, dict)
    return worth


# -- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "hydra"])
def test_figures_match_validation_of_the_run(draftwood_command: Command, method: str) -> None:
    head, said = trained(method)
    result = draftwood_command("inspect", "head", head, *asked("--limit", str(HELD_OUT), "--json"))
    worth = worth_of(result)
    assert list(worth["trees"]) == list(DEFAULT_GROWTHS)
    assert worth["trees"] == said["trees"]
    assert worth["accuracy"] == said["accuracy"]
    assert [each["rank"] for each in worth["ranks"]] == [1, 2, 3, 4, 5]
    for found, told in zip(worth["ranks"], said["ranks"], strict=True):
        assert found == pytest.approx(told)
    assert (worth["texts"], worth["texts_there"], worth["prompts"]) == (HELD_OUT, 24, HELD_OUT)
    content = json.loads(result.out)
    assert content["fits"] is content["trained_for_it"] is True
    assert content["config"]["kind"] == method


def test_the_table(draftwood_command: Command) -> None:
    head, _ = trained("eagle3")
    limits = ("--limit", "6", "--prompts", "2", "--positions", "3")
    worth = worth_of(draftwood_command("inspect", "head", head, *asked(*limits, "--json")))
    result = draftwood_command("inspect", "head", head, *asked(*limits))
    facts, measured, trees, ranks = result.out.split("\n\n")
    assert facts == draftwood_command("inspect", "head", head, "--model", "tiny").out.rstrip("\n")
    beam = worth["trees"]["beam"]
    assert [line.split("  ", 1) for line in measured.splitlines()] == [
        ["measured on", "6 of 24 texts"],
        ["answered", "   2 prompts with trees of up to 8 nodes"],
        [
            "greedy path",
            f"pruned from {beam['greedy_pruned']:.0%} of beam trees; "
            f"{beam['accepted_greedy']:.0%} of accepted paths are on it",
        ],
        ["accuracy", f"   {worth['accuracy']:.3f} after the text"],
    ]
    assert [line.split() for line in trees.splitlines()[1:]] == [
        [name, f"{each['tau']:.3f}", f"{each['mean_tree_size']:.1f}"] for name, each in worth["trees"].items()
    ]
    assert [line.split() for line in ranks.splitlines()[1:]] == [
        [str(each["rank"]), *(f"{each[name]:.3f}" for name in ("accuracy", "ece", "ece_target"))]
        for each in worth["ranks"]
    ]
    assert worth["ranks"][0]["count"] == 6 * 3
    for label in ("drafting with beam", "drafting with salf", "measuring calibration"):
        assert label in result.err


@pytest.mark.parametrize(
    ("options", "has_trees", "has_ranks"), [(("--prompts", "0"), False, True), (("--positions", "0"), True, False)]
)
def test_parts_can_be_disabled(
    draftwood_command: Command, options: tuple[str, ...], has_trees: bool, has_ranks: bool
) -> None:
    head, _ = trained("eagle3")
    wanted = asked("--limit", "2", "--growth", "chain,salf", *options)
    worth = worth_of(draftwood_command("inspect", "head", head, *wanted, "--json"))
    assert list(worth["trees"]) == (["chain", "salf"] if has_trees else [])
    assert ("accuracy" in worth, "ranks" in worth) == (has_ranks, has_ranks)
    result = draftwood_command("inspect", "head", head, *wanted)
    assert ("tokens/pass" in result.out, "answered" in result.out) == (has_trees, has_trees)
    assert ("after draft rank" in result.out, "accuracy" in result.out) == (has_ranks, has_ranks)
    assert ("drafting" in result.err, "calibration" in result.err) == (has_trees, has_ranks)
    assert "greedy path" not in result.out  # that is of beam


def test_head_with_one_token_ahead_has_no_rank_table(draftwood_command: Command, tmp_path: Path) -> None:
    folder = save_head(random_head("medusa", TINY_CONFIG, num_heads_ahead=1), tmp_path / "head")
    wanted = asked("--limit", "3", "--growth", "beam")
    assert worth_of(draftwood_command("inspect", "head", str(folder), *wanted, "--json"))["ranks"] == []
    out = draftwood_command("inspect", "head", str(folder), *wanted).out
    assert "after the text" in out
    assert "rank" not in out


def test_validation_line_omits_missing_ranks() -> None:
    result: dict[str, Any] = {"step": 3, "loss": 1.5, "accuracy": 0.25, "ranks": []}
    assert format_validation(result) == "step 3, held out: loss 1.5000 · accuracy 0.250"
    ranks = [{"accuracy": 0.5, "ece": 0.125}, {"accuracy": 0.25, "ece": 0.0}]
    told = format_validation({**result, "ranks": ranks})
    assert told.endswith("accuracy 0.250 · below rank 1 to 2: accuracy 0.50 0.25, calibration error 0.12 0.00")
    assert format_validation({"step": 3, "loss": 1.5}) == "step 3, held out: loss 1.5000"


@pytest.mark.filterwarnings("ignore:mkldnn")  # of CPUs that have no bfloat16
def test_number_formats(draftwood_command: Command) -> None:
    head, _ = trained("eagle3")
    few = ("--model", "tiny", "--texts", data_folder(), "--device", "cpu", "--limit", "2", "--prompts", "0", "--json")
    for options, dtype in (((), "float32"), (("--dtype", "auto"), "float32"), (("--dtype", "bfloat16"), "bfloat16")):
        worth = worth_of(draftwood_command("inspect", "head", head, *few, *options))
        assert (worth["dtype"], worth["device"]) == (dtype, "cpu")


# -- which texts -----------------------------------------------------------------------------------------------------


def test_texts_match_held_out_texts_of_a_run() -> None:
    data = TrainingData.open(data_folder())
    found = {seed: [text.token_ids.tobytes() for text in _choose_texts(data, 9, seed)] for seed in (0, 1)}
    for seed, texts in found.items():
        _, held_out = data.split(9, seed)
        in_order = [held_out[index].token_ids.tobytes() for index in range(9)]
        assert sorted(texts) == sorted(in_order)
        assert texts != in_order
    assert set(found[0]) != set(found[1])
    everything = sorted(text.token_ids.tobytes() for text in _choose_texts(data, 1000, 0))
    assert everything == sorted(data[index].token_ids.tobytes() for index in range(len(data)))


def test_several_folders_and_text_limit(draftwood_command: Command, tmp_path: Path) -> None:
    """A prompt that was answered several times counts as one where texts are held out, but not here."""
    again = lines(tmp_path / "a.jsonl", {"turns": ["ab"]}, {"turns": ["cd"]}, {"turns": ["ab"]}, {"turns": ["ab"]})
    for name in ("one", "two"):
        make(tmp_path / name, (again,), temperature=1.0, seed=len(name))
    head, _ = trained("eagle3")
    places = ("--model", "tiny", "--texts", str(tmp_path / "one"), "--texts", str(tmp_path / "two"), *SHORT)
    for limit, used in (("1", 1), ("3", 3), ("50", 8)):
        few = ("--limit", limit, "--prompts", "0", "--json")
        worth = worth_of(draftwood_command("inspect", "head", head, *places, *few))
        assert (worth["texts"], worth["texts_there"]) == (used, 8)
    assert worth["folders"] == [str(tmp_path / "one"), str(tmp_path / "two")]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--texts", "data"), "Add --model MODEL"),
        (("--model", "tiny", "--prompts", "3", "--growth", "beam"), "got: --prompts, --growth"),
        (("--model", "tiny", "--texts", "nowhere"), "nowhere has no training data"),
        (asked("--prompts", "0", "--positions", "0"), "There is nothing to measure"),
        (asked("--limit", "0"), "--limit: '0' is not an integer of at least 1"),
        (asked("--budget", "1"), "--budget: '1' is not an integer of at least 2"),
        (asked("--growth", "beam,bean"), "--growth: 'bean' is not one of chain, static, beam"),
        (asked("--growth", "beam,"), "has an empty item"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_invalid_requests_are_refused(
    draftwood_command: Command, tmp_path: Path, argv: tuple[str, ...], text: str
) -> None:
    folder = save_head(random_head("eagle", TINY_CONFIG), tmp_path / "head")
    result = draftwood_command("inspect", "head", str(folder), *argv)
    assert result.code == 2
    assert text in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_texts_of_another_model_and_texts_without_answers(draftwood_command: Command, tmp_path: Path) -> None:
    folder = save_head(random_head("eagle", TINY_CONFIG), tmp_path / "head")
    other = Loaded(tiny_target(replace(TINY_CONFIG, num_layers=3)), ByteTokenizer())
    make(tmp_path / "other", model=other, self_made=2)
    long = lines(tmp_path / "long.jsonl", {"turns": ["x" * 20]})
    make(tmp_path / "long", (long,))
    for name, options, text in (
        ("other", (), "was written by another model"),
        ("long", ("--max-length", "8"), "no answer within the first 8 tokens"),
    ):
        result = draftwood_command("inspect", "head", str(folder), *asked(*options, texts=str(tmp_path / name)))
        assert result.code == 2
        assert text in result.err
        assert str(tmp_path / name) in result.err
        assert result.out == ""


def test_incompatible_head_is_not_measured(draftwood_command: Command, tmp_path: Path) -> None:
    folder = save_head(random_head("eagle", SMALL), tmp_path / "head")
    result = draftwood_command("inspect", "head", str(folder), *asked("--json"))
    assert result.code == 1
    content = json.loads(result.out)
    assert content["fits"] is False
    assert content["worth"] is None
    assert "hidden size" in draftwood_command("inspect", "head", str(folder), *asked()).out


# -- options ---------------------------------------------------------------------------------------------------------


def test_defaults_match_training() -> None:
    usual = ValidateSection()
    assert {name: getattr(usual, SECTION.get(name, name)) for name in DEFAULTS} == DEFAULTS
    assert usual.growths == DEFAULT_GROWTHS
    assert next(f.default for f in fields(DataSection) if f.name == "max_length") == MAX_LENGTH


def test_help_warns_about_training_texts(draftwood_command: Command) -> None:
    out = draftwood_command("inspect", "head", "--help").out
    assert "Results are too good on\ntexts from the training set" in out
    assert "--texts data" in out.split("examples:")[1]
