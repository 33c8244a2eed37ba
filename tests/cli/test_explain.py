"""``draftwood tune --explain``: the table, what it concludes, JSON and the plot."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from draftwood import LLM, SamplingParams
from draftwood.tune import Account, Way, best_of, explain, list_ways
from draftwood.tune.explain import BUDGETS
from tests.tools.cli import Command, _plain_environment, draftwood_command, prompt_file  # noqa: F401 - fixtures

RUN = ("tune", "--explain", "--model", "tiny", "--max-tokens", "12")


def test_shows_every_way_and_a_conclusion(draftwood_command: Command, prompt_file: Path) -> None:
    result = draftwood_command(*RUN, "--prompts", str(prompt_file))
    assert result.code == 0
    lines = result.out.splitlines()
    for name, count in (("plain", 1), ("chain", len(BUDGETS) + 1), ("tree", len(BUDGETS) + 1)):
        assert sum(line.startswith(f"{name} ") for line in lines) == count, name
    assert sum(line.rstrip().endswith("best") for line in lines) == 1
    assert sum(line.startswith("--budget auto, ") for line in lines) == 2
    assert sum("(the default)" in line for line in lines) == 1
    assert any(line.startswith(("Fastest: ", "Nothing pays here")) for line in lines)


def test_json_and_plot(draftwood_command: Command, prompt_file: Path, tmp_path: Path) -> None:
    plot = tmp_path / "pays.svg"
    result = draftwood_command(*RUN, "--prompts", str(prompt_file), "--limit", "1", "--json", "--plot", str(plot))
    content = json.loads(result.out)
    assert content["prompts"] == 1
    first = content["ways"][0]
    assert (first["way"], first["tokens_per_pass"], first["positions"], first["plain_share"]) == (
        "plain",
        1.0,
        1.0,
        1.0,
    )
    assert content["best"] in content["ways"]
    drawn = "".join(ElementTree.parse(plot).getroot().itertext())
    for name in ("plain", "chain, auto", "tree, auto", *map(str, BUDGETS)):
        assert name in drawn


def test_prompts_need_a_measurement(draftwood_command: Command, prompt_file: Path) -> None:
    result = draftwood_command("tune", "--model", "tiny", "--prompts", str(prompt_file))
    assert result.code != 0
    assert "--explain" in result.err


def test_a_head_is_compared_if_there_is_one() -> None:
    assert {way.label for way in list_ways(None)} == {"plain", "chain", "tree"}
    with_head = [way for way in list_ways("some-head") if way.label == "tree and head"]
    assert {way.budget for way in with_head} == {*BUDGETS, "auto"}
    assert all(way.options["head"] == "some-head" for way in with_head)


def test_accounts_add_up() -> None:
    def new_llm(**options: object) -> LLM:
        return LLM("tiny", **options)  # type: ignore[arg-type]

    ways = [Way("plain", "plain", {}, 1), Way("tree", "blend", {}, 8)]
    plain, tree = explain(new_llm, ["one two one two", "hello"], SamplingParams(max_tokens=10), ways)
    assert (plain.tokens, plain.cycles, plain.plain_cycles) == (20, 20, 20)
    assert tree.tokens == 20
    assert tree.tokens_per_pass == pytest.approx(20 / tree.cycles)
    assert 1 < tree.positions <= 8
    slow, quick = Account(way=ways[0], tokens=5), Account(way=ways[1], tokens=5)
    slow.seconds["total"], quick.seconds["total"] = 2.0, 1.0
    assert best_of([slow, quick]) is quick
