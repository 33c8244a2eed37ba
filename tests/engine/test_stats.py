"""Statistics of a request: what a verified tree adds, and the summary lines at the end."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from draftwood import SamplingParams
from draftwood.cli.console.report import guesses_line, stats_line
from draftwood.engine.stats import RequestStats
from draftwood.tree import DraftTree, TreeBuilder
from tests.tools.engine import PROMPTS, make_llm


def goose_tree(route: str = "spine") -> DraftTree:
    """Nodes 1 - 2 - 3 are the spine; 4 and 5 leave it at the root, 6 and 7 at node 1, 8 continues 6."""
    builder = TreeBuilder(0)
    one = builder.add(0, 11, "context")
    two = builder.add(one, 12, "context")
    builder.add(two, 13, "context")
    builder.add(0, 21, "transition")
    builder.add(0, 22, "transition")
    six = builder.add(one, 23, "transition")
    builder.add(one, 24, "transition")
    builder.add(six, 25, "transition")
    return builder.build(route=route)


def noted(*cycles: tuple[DraftTree, list[int], int]) -> RequestStats:
    stats = RequestStats()
    for tree, accepted, num_emitted in cycles:
        stats.note_tree(tree, accepted, num_emitted)
    return stats


def test_rates_of_two_sources_need_guesses_of_one_each() -> None:
    sources = ("root", "context", "transition", "context+transition")
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 0, 0), (0, 1, 1, 1), sources, (1.0, 0.2, 0.2, 0.2))
    assert noted((tree, [1], 2)).source_rates() is None
    assert noted((tree.first(3), [1], 2)).source_rates() == (1.0, 0.0)


def test_path_that_leaves_the_spine() -> None:
    stats = noted((goose_tree(), [1, 6], 3))
    assert (stats.cycles, stats.output_tokens, stats.drafted_nodes) == (1, 3, 8)
    assert stats.drafted_by_source == Counter(context=3, transition=5)
    # The children of the root (1, 4, 5), of node 1 (2, 6, 7) and of node 6 (8) were tried.
    assert stats.tried_by_source == Counter(context=2, transition=5)
    assert stats.accepted_by_source == Counter(context=1, transition=1)
    assert stats.accepted_by_path == Counter({"context+transition": 2})
    assert stats.tried_by_depth == Counter({1: 1, 2: 1, 3: 1})
    assert stats.accepted_by_depth == Counter({1: 1, 2: 1})
    assert stats.routes == Counter(spine=1)
    assert stats.source_rates() == (1 / 2, 1 / 5)
    assert stats.acceptance_by_source() == {"context": 1 / 2, "transition": 1 / 5}
    assert stats.acceptance_by_depth() == [1.0, 1.0, 0.0]
    assert stats.mean_tree_size == 9.0


def test_cycles_add_up() -> None:
    root_only = DraftTree.root_only(0)
    chain = DraftTree.chain([0, 1, 2], "context", route="bypass")
    stats = noted(
        (goose_tree(), [1, 2, 3], 4),
        (goose_tree(), [4], 2),
        (goose_tree(), [], 1),
        (chain, [1, 2], 3),
        (DraftTree.chain([0, 1], "draft"), [], 1),
        (root_only, [], 1),
    )
    assert stats.accepted_by_path == Counter(context=5, transition=1)
    # Spine tokens: 3 in the first cycle, only the first in the next two, both of the chain.
    assert stats.tried_by_source == Counter(context=3 + 1 + 1 + 2, transition=4 + 2 + 2, draft=1)
    assert stats.accepted_by_source == Counter(context=5, transition=1)
    assert stats.routes == Counter(spine=3, bypass=1, draft=1, plain=1)
    assert stats.source_rates() == (5 / 7, 1 / 8)
    assert stats.acceptance_length == 12 / 6


def test_tree_cut_to_its_root_counts_as_plain() -> None:
    assert noted((goose_tree().first(1), [], 1)).routes == Counter(plain=1)


def test_nodes_after_a_stop_do_not_count_as_tried() -> None:
    stats = noted((goose_tree(), [1], 1))  # node 1 ends the output: nothing follows it
    assert stats.tried_by_source == Counter(context=1, transition=2)
    assert stats.accepted_by_path == Counter(context=1)
    assert noted((goose_tree(), [], 1)).tried_by_source == Counter(context=1, transition=2)


def test_json_has_rates_if_there_are_two_sources() -> None:
    content = noted((goose_tree(), [1, 6], 3), (goose_tree(), [], 1)).as_dict()
    assert content["tried_by_source"] == {"context": 3, "transition": 7}
    assert content["accepted_by_path"] == {"context+transition": 2}
    assert noted((goose_tree(), [1], 2)).as_dict()["accepted_by_source"] == {"context": 1}
    assert content["routes"] == {"spine": 2}
    assert (content["p_s"], content["p_t"], content["p_ratio"]) == (0.3333, 0.1429, 2.33)
    assert json.loads(json.dumps(content)) == content
    never_right = noted((goose_tree(), [1], 2)).as_dict()
    assert (never_right["p_t"], never_right["p_ratio"]) == (0.0, None)
    for others in (noted(), noted((DraftTree.chain([0, 1], "context"), [1], 2))):
        assert not {"p_s", "p_t", "p_ratio"} & others.as_dict().keys()


def test_closing_line_has_rates_and_routes_if_several() -> None:
    several = noted((goose_tree(), [1, 6], 3), (goose_tree("bypass"), [], 1), (goose_tree().first(1), [], 1))
    line = stats_line(several, "stop")
    assert "p_s 0.33, p_t 0.14 (2.3x)" in line
    assert "spine 33%, bypass 33%, plain 33%" in line
    never_right = stats_line(noted((goose_tree(), [1], 2)), "stop")
    assert "p_s 0.50, p_t 0.00" in never_right
    assert "x)" not in never_right
    one_way = noted((DraftTree.chain([0, 1], "context", route="branch"), [1], 2), (DraftTree.root_only(0), [], 1))
    for stats in (RequestStats(), one_way):
        assert not any(word in stats_line(stats, "stop") for word in ("p_s", "p_t", "%", "branch", "plain"))


@pytest.mark.parametrize(
    ("drafter", "shown"), [("goose", True), ("pld", False), ("recycling", False), ("plain", False)]
)
def test_the_closing_line_of_drafters(drafter: str, shown: bool) -> None:
    llm = make_llm(drafter=drafter, budget=24)
    result = llm.generate(PROMPTS[3], SamplingParams(max_tokens=80, ignore_eos=True))[0]
    line = stats_line(result.stats, result.finish_reason)
    assert ("p_s" in line) == shown
    assert ("spine" in line) == shown


def test_paths_and_sources_agree_with_what_was_emitted() -> None:
    llm = make_llm(drafter="goose", budget=24)
    for result in llm.generate(PROMPTS, SamplingParams(max_tokens=60)):
        stats = result.stats
        assert stats.output_tokens == len(result.token_ids)
        assert Counter(source for source in result.sources if source != "target") == stats.accepted_by_source
        assert sum(stats.accepted_by_path.values()) == sum(stats.accepted_by_source.values())
        assert sum(stats.routes.values()) == stats.cycles
        for source, accepted in stats.accepted_by_source.items():
            assert accepted <= stats.tried_by_source[source] <= stats.drafted_by_source[source]


def test_second_line_reports_acceptance_rates() -> None:
    stats = noted((goose_tree(), [1], 2))
    line = guesses_line(stats)
    rates = stats.acceptance_by_source()
    assert all(f"{name} {rate:.2f}" in line for name, rate in rates.items())
    assert f"by depth {stats.acceptance_by_depth()[0]:.2f}" in line
    (path,) = stats.accepted_by_path
    assert line.endswith(f"accepted along {path} {stats.accepted_by_path[path]}")
    assert "accepted" not in guesses_line(noted((goose_tree(), [], 1)))
