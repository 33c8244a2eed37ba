"""Between drafting and verification: drafts are checked and cut to what may be emitted, what pays and what fits."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.engine.session import Session
from draftwood.errors import TreeError
from draftwood.sizing import CutDrafts, Drafts, Load, Offers, Sizer, cut_drafted, note_silence
from draftwood.structured import constrain


class Fitted(NamedTuple):
    """What sizers have to note about the trees of a cycle, after the last one was written out."""

    cut: CutDrafts | None  # trees of chosen children
    silent: Sequence[Sizer]  # of drafters that were asked for guesses and had none

    def note(self) -> None:
        if self.cut is not None:
            self.cut.note()
        if self.silent:
            note_silence(self.silent, () if self.cut is None else self.cut.sizers)


def fit_trees(drafted: Sequence[Session], num_read: int, ready: tuple[int, ...]) -> Fitted:
    """Sets the tree that each session verifies in this cycle, from the one that was offered.

    A draft that cannot be verified ends its session. ``num_read``: positions of prompts in the same pass. ``ready``:
    sizes of passes that can run at once.
    """
    started = time.perf_counter()
    plain, drawn, chosen = list[Session](), list[Session](), list[Session]()
    num_resting = 0
    for session in drafted:
        if session.is_resting and session.matcher is None:
            num_resting += 1
            continue
        tree = session.offered
        size = tree.size
        is_known = size == 1 or tree.is_native or (min(tree.tokens) >= 0 and max(tree.tokens) < session.vocab_size)
        if size > session.num_wanted or tree.root != session.tokens[-1] or not is_known:
            session.fail(_describe(session))
            continue
        if session.matcher is not None and session.drafts:
            tree = session.offered = constrain(tree, session.matcher, session.budget if session.num_left > 1 else 1)
        if tree.size == 1 or session.sizer is None:
            plain.append(session)
        else:
            (drawn if tree.proposals else chosen).append(session)
    if drawn:
        _cut_drawn(drawn, drafted, num_read)
    for session in plain:
        tree = session.offered
        session.tree = tree if tree.size == 1 else tree.first(session.room).limit_depth(session.num_left - 1)
    cut = None
    if chosen:
        others = [session.tree.size for group in (plain, drawn) for session in group]
        load = Load(num_read + num_resting + sum(others), float(num_resting + len(others)))
        cut = _cut_chosen(chosen, load, ready)
    silent = [session.sizer for session in plain if session.sizer is not None and session.num_wanted > 1]
    share = (time.perf_counter() - started) / max(len(drafted) - num_resting, 1)  # counts as drafting
    for group in (plain, drawn, chosen):
        for session in group:
            session.draft_seconds += share
    return Fitted(cut, silent)


def _cut_chosen(sessions: Sequence[Session], load: Load, ready: tuple[int, ...]) -> CutDrafts:
    context = sum([len(session.tokens) for session in sessions]) // len(sessions) - 1
    cut = cut_drafted(_drafts_of(sessions), context, load, ready)
    for session, tree in zip(sessions, cut.trees, strict=True):
        session.tree = tree
    return cut


def _cut_drawn(sessions: Sequence[Session], all_drafted: Sequence[Session], num_read: int) -> None:
    """What the pass is going to be like is estimated from the last trees."""
    positions = num_read + sum(len(session.tree) for session in all_drafted)
    tokens = sum(session.num_expected for session in all_drafted)
    for session in sessions:
        assert session.sizer is not None
        others = Load(positions - len(session.tree), tokens - session.num_expected)
        session.tree = session.sizer.cut_drawn(_drafts_of([session]), len(session.tokens) - 1, others)
        positions, tokens = others.positions + len(session.tree), others.tokens + session.num_expected


def _drafts_of(sessions: Sequence[Session]) -> Drafts:
    lengths = [len(session.tokens) for session in sessions]
    offers = Offers(
        [session.offered for session in sessions],
        [session.capacity - length + 1 for session, length in zip(sessions, lengths, strict=True)],
        [session.max_length - length - 1 for session, length in zip(sessions, lengths, strict=True)],
        [session.drafter.lesson for session in sessions],
    )
    return Drafts(
        [session.sizer for session in sessions if session.sizer is not None],
        offers,
        [session.draft_seconds for session in sessions],
        [session.learn_seconds for session in sessions],
        [session.was_ready for session in sessions],
    )


def _describe(session: Session) -> TreeError:
    tree = session.offered
    return TreeError(
        f"The drafter {session.drafter.name!r} proposed a tree that cannot be verified",
        got=f"{len(tree)} nodes, root token {tree.root}, tokens {min(tree.tokens)} to {max(tree.tokens)}",
        allowed=(
            f"at most {session.num_wanted} nodes, root token {session.tokens[-1]}, tokens 0 to {session.vocab_size - 1}"
        ),
    )
