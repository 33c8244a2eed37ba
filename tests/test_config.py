"""Options are checked on creation, and every message states what is allowed."""

from __future__ import annotations

import math

import pytest

from draftwood import SamplingParams
from draftwood.config import EngineOptions, from_mapping, one_of
from draftwood.drafters import Drafter, check_drafter, drafter_class, drafter_names, make_factory
from draftwood.drafters.plain import PlainDrafter
from draftwood.errors import DraftwoodError, MissingExtraError, OptionError
from draftwood.targets.tiny import tiny_target


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "warm"},
        {"temperature": True},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"stop": ("",)},
        {"stop": 3},
        {"stop": (b"x",)},
        {"stop_token_ids": 5},
        {"stop_token_ids": None},
        {"stop_token_ids": "ab"},
        {"stop_token_ids": (1.5,)},
        {"stop_token_ids": (True,)},
        {"stop_token_ids": (-1,)},
        {"seed": -1},
        {"n": 0},
        {"logprobs": -1},
    ],
)
def test_sampling_parameters_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))) as caught:
        SamplingParams(**wrong)
    assert (caught.value.code, caught.value.param) == ("invalid_value", next(iter(wrong)))


def test_single_stop_string_is_accepted() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


@pytest.mark.parametrize("budget", [0, -3, 10_000, 2.5, True, "large", None])
def test_budgets_out_of_range(budget: object) -> None:
    with pytest.raises(OptionError, match="1 to 1024"):
        EngineOptions(budget=budget)


def test_unknown_option_error_lists_known_options() -> None:
    with pytest.raises(OptionError, match=r"no option 'hot'[\s\S]*temperature"):
        from_mapping(SamplingParams, {"hot": 1}, "sampling")
    with pytest.raises(OptionError, match=r"'pld' has no option 'n'[\s\S]*max_ngram"):
        make_factory("pld", {"n": 3}, tiny_target().info)
    with pytest.raises(OptionError, match="no options"):
        make_factory("plain", {"n": 3}, tiny_target().info)
    with pytest.raises(OptionError, match="allowed: a, b"):
        one_of("letter", "c", ("a", "b"))


@pytest.mark.parametrize("drafter", ["pld", "goose", "iso3", "sequoia"])
@pytest.mark.parametrize(
    "options", [{"min_ngram": 0}, {"min_ngram": 6}, {"max_draft": 0}, {"max_draft": True}, {"max_ngram": 1_000_000}]
)
def test_options_out_of_range(drafter: str, options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        make_factory(drafter, options, tiny_target().info)


def test_unknown_drafter_suggests_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"Did you mean 'plain'\?"):
        drafter_class("plian")
    assert {"plain", "pld"} <= set(drafter_names())


@pytest.mark.parametrize("drafter", [None, 5, ["pld"], int, Drafter, PlainDrafter])
def test_invalid_drafters_are_refused(drafter: object) -> None:
    wrong = drafter if drafter is not PlainDrafter else PlainDrafter(PlainDrafter.Options(), None)
    with pytest.raises(OptionError, match=r"not a drafter[\s\S]*pld"):
        check_drafter(wrong, None)
    assert check_drafter(PlainDrafter, None)[0] is PlainDrafter


def test_drafter_options_are_a_mapping() -> None:
    with pytest.raises(OptionError, match="mapping"):
        check_drafter("pld", 5)


def test_external_drafters_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from draftwood.drafters import registry

    entries = [
        EntryPoint("mine", "draftwood.drafters.pld:PromptLookupDrafter", registry.GROUP),
        EntryPoint("gone", "no_such_package:Drafter", registry.GROUP),
        EntryPoint("odd", "math:pi", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    assert drafter_class("mine").name == "pld"
    with pytest.raises(DraftwoodError, match="cannot be loaded"):
        drafter_class("gone")
    with pytest.raises(DraftwoodError, match="not a Drafter subclass"):
        drafter_class("odd")


def test_missing_extra_names_the_command() -> None:
    assert "pip install 'draftwood[hf]'" in str(MissingExtraError("This", "transformers", "hf"))
