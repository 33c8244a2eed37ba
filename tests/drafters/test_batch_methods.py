"""Drafters for batches: a subclass that changes one method alone is asked for each request."""

from draftwood import SamplingParams
from draftwood.drafters import VerifiedTree
from draftwood.drafters.goose import GooseDrafter
from draftwood.drafters.plain import PlainDrafter
from draftwood.tree import DraftTree
from tests.tools.engine import PROMPTS, make_llm

SEEN: list[str] = []


class Listening(GooseDrafter):
    name = "listening"

    def observe(self, verified: VerifiedTree) -> None:
        SEEN.append("observe")
        super().observe(verified)


class Proposing(GooseDrafter):
    name = "proposing"

    def propose(self, budget: int) -> DraftTree:
        SEEN.append("propose")
        return super().propose(budget)


class Mixed(Listening, Proposing):
    name = "mixed"


def test_which_methods_are_called_for_each_request() -> None:
    assert not GooseDrafter.observes_alone
    assert not PlainDrafter.observes_alone
    assert Listening.observes_alone
    assert Mixed.observes_alone
    assert [cls.proposes_alone for cls in (GooseDrafter, Listening, Proposing, Mixed)] == [False, False, True, True]


def test_changed_methods_are_called_in_a_batch() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for cls, expected in ((Listening, "observe"), (Proposing, "propose")):
        SEEN.clear()
        with make_llm(drafter=cls, budget=6, max_batch=4) as llm:
            got = [answer.token_ids for answer in llm.generate(PROMPTS[:4], params)]
            plain = [answer.token_ids for answer in llm.generate(PROMPTS[:4], params, drafter="plain")]
        assert got == plain
        assert set(SEEN) == {expected}
