"""Errors of neural drafters, from Python and on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwood import LLM, SamplingParams
from draftwood.config import ModelOptions
from draftwood.drafters import make_factory
from draftwood.drafters.heads import HeadOptions
from draftwood.drafters.neural_options import NeuralOptions
from draftwood.errors import CapabilityError, DraftwoodError, ModelError, OptionError
from draftwood.growth.neural.policies import GROWTHS
from draftwood.heads import save_head
from draftwood.targets.load import Loaded
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import ByteTokenizer
from tests.tools.cli import SHORT, TINY, Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.head import SMALL, random_head
from tests.tools.neural import KIND_OF, NEURAL

HEADS = list(KIND_OF)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head of each kind for the built-in model, and one for another model."""
    place = tmp_path_factory.mktemp("heads")
    made: dict[str, Any] = {kind: random_head(kind, TINY_CONFIG) for kind in ("eagle", "eagle3", "medusa", "hydra")}
    made["other"] = random_head("eagle", SMALL)
    made["deeper"] = random_head("eagle", replace(TINY_CONFIG, num_layers=4))
    return {name: save_head(head, place / name) for name, head in made.items()}


def refused(error: type[DraftwoodError], drafter: str, *wanted: str, target: Any = None, **options: Any) -> None:
    with pytest.raises(error) as caught:
        LLM.from_target(target or tiny_target(), ByteTokenizer(), drafter=drafter, drafter_options=options, budget=8)
    message = str(caught.value)
    assert all(text in message for text in wanted), message


# -- from Python -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", HEADS)
def test_a_head_must_be_named(drafter: str) -> None:
    refused(OptionError, drafter, f"{drafter!r} needs a head", "drafter_options={'head'", "--drafter-option head=")


def test_missing_head_is_refused(tmp_path: Path) -> None:
    refused(DraftwoodError, "eagle", "nowhere", head=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("drafter", "kind"), [("eagle", "eagle3"), ("eagle3", "medusa"), ("medusa", "hydra"), ("hydra", "eagle")]
)
def test_head_of_another_kind_is_refused(heads: dict[str, Path], drafter: str, kind: str) -> None:
    refused(OptionError, drafter, "not for the drafter", f"got: {kind}", head=str(heads[kind]))


def test_head_for_another_target_is_refused(heads: dict[str, Path]) -> None:
    wanted = "hidden size: the head needs 24, the target has 48", "vocabulary", "inspect head"
    refused(ModelError, "eagle", "does not fit tiny", *wanted, head=str(heads["other"]))
    refused(ModelError, "eagle", "the target has 2", head=str(heads["deeper"]))


class Closed(NativeTarget):
    """A target without access to hidden states."""

    def __init__(self, open_target: NativeTarget, **changes: Any) -> None:
        self.__dict__.update(open_target.__dict__)
        self.info = replace(open_target.info, **changes)


def test_target_without_hidden_states_is_refused(heads: dict[str, Path]) -> None:
    target = Closed(tiny_target(), can_tap=False)
    refused(CapabilityError, "eagle", "does not expose its hidden states", target=target, head=str(heads["eagle"]))


def test_a_small_model_must_be_named() -> None:
    refused(OptionError, "sps", "needs a draft model", "drafter_options={'model'", "--drafter-option model=")


class ShiftedTokenizer(ByteTokenizer):
    """The same tokens under other ids."""

    def token_text(self, token_id: int) -> str:
        return super().token_text((token_id + 1) % self.vocab_size)


class LongerTokenizer(ByteTokenizer):
    """A few more tokens at the end."""

    vocab_size = ByteTokenizer.vocab_size + 6

    def token_text(self, token_id: int) -> str:
        return super().token_text(token_id) if token_id < 258 else f"<extra {token_id}>"


def set_draft_model(monkeypatch: pytest.MonkeyPatch, target: NativeTarget, codec: ByteTokenizer) -> None:
    """Set the model that ``sps`` loads."""
    monkeypatch.setattr("draftwood.drafters.sps.load_target", lambda *_, **__: Loaded(target, codec))


def test_draft_model_with_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference is reported; tokens that only one vocabulary has are accepted."""
    set_draft_model(monkeypatch, tiny_target(), ShiftedTokenizer())
    differing = r"0: '\\x00' / '\\x01'"
    refused(ModelError, "sps", "has another vocabulary", "tiny has 258 tokens", differing, model="x")
    longer = tiny_target(replace(TINY_CONFIG, vocab_size=264))
    set_draft_model(monkeypatch, longer, LongerTokenizer())
    llm = LLM.from_target(tiny_target(), ByteTokenizer(), drafter="sps", drafter_options={"model": "x"}, budget=8)
    params = SamplingParams(max_tokens=8)
    assert llm.generate("a", params)[0].token_ids == llm.generate("a", params, drafter="plain")[0].token_ids


def test_draft_model_without_trees_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_draft_model(monkeypatch, Closed(tiny_target(), can_tree=False), ByteTokenizer())
    refused(CapabilityError, "sps", "cannot run trees", model="x")


@pytest.mark.parametrize("drafter", NEURAL)
def test_neural_drafter_needs_target_model_not_only_its_info(drafter: str) -> None:
    with pytest.raises(CapabilityError, match="needs the target model"):
        make_factory(drafter, {"model" if drafter == "sps" else "head": "."}, tiny_target().info)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"growth": "wild"}, list(GROWTHS)),
        ({"depth": -1}, ["0 to 128"]),
        ({"depth": 1.5}, ["whole number"]),
        ({"top_k": 0}, ["1 to 64"]),
        ({"batch": 0}, ["batch"]),
        ({"threshold": 1.5}, ["0 to 1"]),
        ({"draw": "yes"}, ["true", "false"]),
        ({"support": 65}, ["1 to 64"]),
        ({"tree": "no-such-tree"}, ["heuristic"]),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], wanted: list[str]) -> None:
    for record in (NeuralOptions, HeadOptions):
        with pytest.raises(OptionError) as caught:
            record(**options)
        assert all(text in str(caught.value) for text in wanted)


def test_an_unknown_option_is_refused() -> None:
    refused(OptionError, "eagle", "model", model="x")
    refused(OptionError, "sps", "head", head="x")


# -- on the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", NEURAL)
def test_command_reports_missing_options(draftwood_command: Command, drafter: str) -> None:
    result = draftwood_command("generate", "hello", *SHORT, "--drafter", drafter)
    assert result.code == 2
    assert "Traceback" not in result.err
    assert f"{drafter!r} needs a" in result.err
    option = "model" if drafter == "sps" else "head"
    assert f"--drafter-option {option}=" in result.err


def test_command_reports_invalid_options(draftwood_command: Command, heads: dict[str, Path]) -> None:
    for drafter, option, wanted in (
        ("eagle3", f"head={heads['medusa']}", "not for the drafter"),
        ("eagle", f"head={heads['other']}", "does not fit"),
        ("eagle", "head=/nowhere/at/all", "/nowhere/at/all"),
        ("eagle", "growth=wild", "growth is unknown"),
        ("sps", "model=/nowhere/at/all", "/nowhere/at/all"),
    ):
        result = draftwood_command("generate", "hello", *SHORT, "--drafter", drafter, "--drafter-option", option)
        assert result.code == 2
        assert "Traceback" not in result.err
        assert wanted in result.err


def test_command_reports_unsupported_models(
    draftwood_command: Command, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_draft_model(monkeypatch, tiny_target(), ShiftedTokenizer())
    result = draftwood_command("generate", "hello", *SHORT, "--drafter", "sps", "--drafter-option", "model=x")
    assert (result.code, "has another vocabulary" in result.err) == (2, True)
    closed = Loaded(Closed(tiny_target(), can_tap=False), ByteTokenizer())
    monkeypatch.setattr("draftwood.llm.load_target", lambda *_, **__: closed)
    option = f"head={heads['eagle']}"
    result = draftwood_command("generate", "hello", *SHORT, "--drafter", "eagle", "--drafter-option", option)
    assert (result.code, "does not expose its hidden states" in result.err) == (2, True)


@pytest.mark.parametrize("drafter", NEURAL)
def test_command_generates(draftwood_command: Command, heads: dict[str, Path], drafter: str) -> None:
    option = "model=tiny" if drafter == "sps" else f"head={heads[KIND_OF[drafter]]}"
    plain = draftwood_command("generate", "hello", *SHORT, "--drafter", "plain")
    result = draftwood_command("generate", "hello", *SHORT, "--drafter", drafter, "--drafter-option", option)
    assert result.code == 0
    assert result.out == plain.out


def test_command_draws_a_tree(draftwood_command: Command, heads: dict[str, Path]) -> None:
    chosen = ("--drafter", "eagle2", "--drafter-option", f"head={heads['eagle']}")
    result = draftwood_command("inspect", "tree", "hello hello", *TINY, *chosen, "--cycles", "2")
    assert result.code == 0
    assert result.out.count("eagle2") >= 2 * 7
    content = json.loads(draftwood_command("inspect", "tree", "hello", *TINY, *chosen, "--json", "--cycles", "1").out)
    assert len(content["cycles"]) == 1


def test_command_lists_neural_drafters(draftwood_command: Command) -> None:
    listed = json.loads(draftwood_command("drafters", "--json").out)["drafters"]
    assert set(NEURAL) <= set(listed)
    assert listed["eagle"]["options"]["growth"] == "static"
    assert listed["eagle3"]["options"]["growth"] == "beam"
    assert listed["sps"]["options"]["growth"] == "salf"
    assert all("head" in listed[name]["options"] for name in HEADS)
    assert "eagle3" in draftwood_command("drafters").out


def test_a_head_whose_layout_leaves_sizes_to_the_target(tmp_path: Path) -> None:
    """The original files of Hydra++ lack the number of attention heads; it comes from the target."""
    target = tiny_target()
    folder = save_head(random_head("hydra", TINY_CONFIG, prefix=True), tmp_path / "head", to="hydra")
    llm = LLM.from_target(target, ByteTokenizer(), drafter="hydra", drafter_options={"head": str(folder)}, budget=8)
    plain = LLM.from_target(target, ByteTokenizer(), drafter="plain")
    params = SamplingParams(max_tokens=12)
    assert llm.generate("abc", params)[0].token_ids == plain.generate("abc", params)[0].token_ids


def test_a_draft_model_on_a_cpu_runs_as_its_file_stores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype would ask for expanded weights."""
    asked = []

    def load(options: ModelOptions) -> Loaded:
        asked.append(options.dtype)
        return Loaded(tiny_target(cache_tokens=options.cache_tokens), ByteTokenizer())

    monkeypatch.setattr("draftwood.drafters.sps.load_target", load)
    LLM.from_target(tiny_target(), ByteTokenizer(), drafter="sps", drafter_options={"model": "small.gguf"})
    assert asked == ["auto"]
