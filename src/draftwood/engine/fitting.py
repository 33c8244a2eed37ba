"""Between drafting and verification: each draft is checked and cut to what may, pays, fits and can be emitted."""

import time
from collections.abc import Iterable, Sequence
from itertools import repeat

from draftwood.engine.drafting import Draft
from draftwood.engine.session import Session
from draftwood.errors import TreeError
from draftwood.sizing import NO_LOAD, Load, loads_of_others
from draftwood.structured import constrain
from draftwood.tree import DraftTree


def fit_trees(sessions: Sequence[Session], drafts: Sequence[Draft | None]) -> None:
    """Sets the tree that each session verifies in this cycle. A draft that cannot be verified ends its session."""
    loads: Iterable[Load] = repeat(NO_LOAD, len(sessions))
    if any(session.sizer is not None for session in sessions):
        loads = loads_of_others([_load(session) for session in sessions])
    for session, made, load in zip(sessions, drafts, loads, strict=True):
        if made is not None:
            with session:
                session.tree = _fit(session, made, load)


def _load(session: Session) -> Load:
    """What a session is about to ask of the pass, estimated from its last tree."""
    size = len(session.tree)
    is_plain = session.is_prefilling or session.sizer is None or size == 1
    return Load(size, 1.0 if is_plain or session.sizer is None else session.sizer.expected)


def _fit(session: Session, made: Draft, load: Load) -> DraftTree:
    tree, budget, seconds = made
    if isinstance(tree, Exception):
        raise tree
    started = time.perf_counter() - seconds  # checking and cutting count as drafting
    is_plain = len(tree.tokens) == 1 and tree.tokens[0] == session.tokens[-1]
    if not is_plain:
        _check(session, tree, budget)
    if session.matcher is not None and session.drafts:
        tree = constrain(tree, session.matcher, session.sample.budget if session.num_left > 1 else 1)
        is_plain = len(tree.tokens) == 1
    session.offered = tree
    if is_plain:  # nothing to cut
        session.stats.draft_seconds += time.perf_counter() - started
        return tree
    context = len(session.tokens) - 1
    if session.sizer is not None:
        tree = session.sizer.cut(tree, context, time.perf_counter() - started, load)
    tree = tree.first(session.capacity - context).limit_depth(session.num_left - 1)
    session.stats.draft_seconds += time.perf_counter() - started
    return tree


def _check(session: Session, tree: DraftTree, budget: int) -> None:
    size, root, last = len(tree.tokens), tree.tokens[0], session.tokens[-1]
    lowest, highest = min(tree.tokens), max(tree.tokens)
    if size > budget or root != last or lowest < 0 or highest >= session.vocab_size:
        raise TreeError(
            f"The drafter {session.drafter.name!r} proposed a tree that cannot be verified",
            got=f"{size} nodes, root token {root}, tokens {lowest} to {highest}",
            allowed=f"at most {budget} nodes, root token {last}, tokens 0 to {session.vocab_size - 1}",
        )
