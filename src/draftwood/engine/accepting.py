"""From the target's answer to events: accept the longest correct paths, let drafters learn, write the tokens out."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftwood.compiled import Core, Outcomes, OutcomesMemory, address_of, load_core
from draftwood.drafters import VerifiedBatch, VerifiedTree
from draftwood.engine.events import BONUS_SOURCE, CycleDetail, TokenEvent, TokenLogprobs
from draftwood.engine.passes import Answer, Judged
from draftwood.engine.session import Session
from draftwood.sampling import UNUSABLE
from draftwood.sizing import note_outcomes
from draftwood.structured import StructureMatcher
from draftwood.targets import Target, top_rows
from draftwood.tree import DraftTree, pack_places
from draftwood.verify import AcceptedPath, accept_greedy, accept_predrawn, accept_sampled

BONUS_ONLY = (BONUS_SOURCE,)
ROOT_PATH = (0,)


@dataclass(slots=True)
class Accepted:
    """The accepted path of one session's tree, and what of it becomes output."""

    index: int  # of the session in the pass
    session: Session
    offered: DraftTree  # what its drafter proposed
    tree: DraftTree  # the part that was verified
    path: tuple[int, ...]  # accepted nodes, root first
    token_ids: list[int]  # that they and the bonus token add, up to a stop condition


def accept_trees(answer: Answer) -> list[Accepted]:
    """For each session that verified a tree, the longest path that the target agrees with, up to a stop condition.

    A session that fails, or was cancelled while the pass ran, is left out.
    """
    core = load_core()
    known, results = list[int](), list[Accepted]()  # known: sessions whose token after each node is known
    for index, session in enumerate(answer.sessions):
        if session.finish_reason is not None or session.is_prefilling:
            continue
        drawn = answer.drawn[index]
        if session.takes_choices and session.is_resting:  # plain decoding
            results.append(_cut(index, session, ROOT_PATH, answer.choices_of(index)))
        elif core is not None and (session.takes_choices or (drawn is not None and UNUSABLE not in drawn)):
            known.append(index)
        else:
            with session:
                accepted = _accept(session, index, answer)
                results.append(_cut(index, session, accepted.path, accepted.token_ids(session.tree)))
    if core is not None and known:
        results += _accept_in_c(core, known, answer)
    return results


def learn(accepted: Sequence[Accepted], answer: Answer) -> list[Accepted]:
    """Shows drafters what came of their trees; those that rest see nothing, and are left out of what is returned."""
    started = time.perf_counter()
    alone, groups, awake = list[Accepted](), dict[object, list[Accepted]](), list[Accepted]()
    for each in accepted:
        session = each.session
        if session.is_resting:
            session.num_skipped += len(each.token_ids)
            if session.sizer is not None:
                session.sizer.note_rest()
            continue
        awake.append(each)
        drafter = session.drafter
        if drafter.learns_in_batch and not drafter.observes_alone:
            groups.setdefault((type(drafter), drafter.wants_top), []).append(each)
        else:
            alone.append(each)
    for group in groups.values():
        if not _observe_batch(group, answer):
            alone += group
    for each in alone:
        with each.session:
            _observe(each, answer)
    if awake:
        share = (time.perf_counter() - started) / len(awake)
        for each in awake:
            each.session.learn_seconds = share
    return awake


def note_trees(drafted: Sequence[Accepted]) -> None:
    """Shows sizers what came of the trees of a cycle, before they see those of the next one (``Fitted.note``)."""
    sized = [each for each in drafted if each.session.sizer is not None]
    note_outcomes(
        [each.session.sizer for each in sized if each.session.sizer is not None],
        [each.offered for each in sized],
        [each.tree for each in sized],
        [each.token_ids for each in sized],
    )


def _observe(each: Accepted, answer: Answer) -> None:
    session, token_ids = each.session, each.token_ids
    output = answer.part(each.index) if session.reads_rows else answer.no_rows
    choices = answer.choices_of(each.index)
    session.drafter.observe(
        VerifiedTree(each.tree, output.logits, choices, each.path, token_ids, output.taps, output.top)
    )


def _observe_batch(group: Sequence[Accepted], answer: Answer) -> bool:
    """Shows a drafter all trees that it made; False if the top entries of their rows are not known."""
    drafters, trees = [each.session.drafter for each in group], [each.tree for each in group]
    top, wanted = answer.output.top, drafters[0].wants_top
    if wanted and (top is None or top.ids.shape[1] < wanted):
        if sum(map(len, trees)) < answer.num_rows:
            return False
        top = top_rows(answer.output.logits, wanted)
    indices, judged = [each.index for each in group], answer.judged
    memory = judged.memory if judged is not None and judged.indices == indices else None
    outcomes = Outcomes(trees, [each.path for each in group], [each.token_ids for each in group], memory)
    first_rows = [answer.first_rows[index] for index in indices]
    try:
        type(drafters[0]).observe_batch(drafters, VerifiedBatch(outcomes, first_rows, top))
    except Exception as error:  # noqa: BLE001 - drafters may be third-party code; only their requests end
        for each in group:
            each.session.fail(error)
    return True


def commit(target: Target, accepted: Sequence[Accepted]) -> None:
    """Commits all tokens but the last: the roots and the accepted nodes before it."""
    for each in accepted:
        try:
            path, size = each.path, len(each.token_ids)
            target.keep(each.session.sequence, path if len(path) == size else path[:size])
        except Exception as error:  # noqa: BLE001 - only this request ends
            each.session.fail(error)


def write(accepted: Sequence[Accepted], answer: Answer, now: float) -> list[TokenEvent]:
    """Text, statistics and events of a cycle that finished ``now``."""
    events = []
    for each in accepted:
        session, tree, path, token_ids = each.session, each.tree, each.path, each.token_ids
        if session.error is not None:
            continue
        stats, num_emitted = session.stats, len(token_ids)
        if stats.cycles == 0:
            stats.first_token_seconds = now - session.admitted
        stats.total_seconds = now - session.admitted
        sources = stats.note_tree(tree, path[1 : num_emitted + 1], num_emitted)
        if len(sources) < num_emitted:
            sources = (*sources, BONUS_SOURCE) if sources else BONUS_ONLY
        logprobs: tuple[TokenLogprobs, ...] = ()
        if session.params.logprobs is not None:
            logprobs = _logprobs(session.params.logprobs, token_ids, path, answer.part(each.index).logits)
        events.append(
            TokenEvent(
                session.sample.request_id,
                tuple(token_ids),
                sources,
                session.writer.decode(token_ids),
                logprobs,
                session.finish_reason,
                stats,
                tree,
                path,
                _detail(each, answer.part(each.index).logits) if session.sample.request.with_cycles else None,
            )
        )
    return events


def _accept(session: Session, index: int, answer: Answer) -> AcceptedPath:
    tree, warper, drawn = session.tree, session.warper, answer.drawn[index]
    if session.matcher is not None:
        return accept_matching(session, session.matcher, answer.part(index).logits, answer.choices_of(index))
    if drawn is not None:
        return accept_predrawn(tree, drawn, session.randomness)
    if session.takes_choices:
        return accept_greedy(tree, answer.choices_of(index))
    logits = answer.part(index).logits
    if session.params.is_greedy:
        return accept_greedy(tree, lambda node: warper.choice(logits[node], tree.path_tokens(node)))
    return accept_sampled(tree, lambda node: warper.probs(logits[node], tree.path_tokens(node)), session.randomness)


def accept_matching(
    session: Session, matcher: StructureMatcher, logits: torch.Tensor, choices: Sequence[int]
) -> AcceptedPath:
    """As ``_accept``, with the logits of tokens that the structure forbids at -inf. Only nodes on the accepted path are
    looked at, and their masks only computed if the target's own choice is not enough."""
    tree, warper = session.tree, session.warper
    takes_choices = session.params.is_greedy and not session.params.has_penalties

    def choose(node: int) -> int:
        matcher.take(tree.tokens[node : node + 1] if node else ())
        choice = choices[node]
        if matcher.is_complete or (takes_choices and matcher.allows(choice)):  # what follows the end is not emitted
            return choice
        return warper.choice(_mask(logits[node], matcher), tree.path_tokens(node))

    def probs_of(node: int) -> torch.Tensor:
        matcher.take(tree.tokens[node : node + 1] if node else ())
        if matcher.is_complete:
            return torch.ones_like(logits[node])
        return warper.probs(_mask(logits[node], matcher), tree.path_tokens(node))

    is_greedy = session.params.is_greedy
    accepted = accept_greedy(tree, choose) if is_greedy else accept_sampled(tree, probs_of, session.randomness)
    matcher.go_back(len(accepted.path) - 1)
    return accepted


def _mask(logits: torch.Tensor, matcher: StructureMatcher) -> torch.Tensor:
    return logits.masked_fill(~matcher.allowed().to(logits.device), -torch.inf)


def _accept_in_c(core: Core, indices: Sequence[int], answer: Answer) -> list[Accepted]:
    """Acceptance of many trees at once, by the target's choices or by the tokens that were drawn."""
    sessions, first_rows = answer.sessions, array("q", [answer.first_rows[index] for index in indices])
    places = pack_places([sessions[index].tree for index in indices])
    choices = answer.with_drawn(indices)
    paths, emitted = array("i", bytes(4 * len(choices))), array("i", bytes(4 * len(choices)))
    lengths = array("q", bytes(8 * len(indices)))
    memory = [part.buffer_info()[0] for part in (first_rows, paths, emitted, lengths)]
    core.accept(len(indices), places, memory[0], address_of(choices), *memory[1:])
    total = sum(lengths)
    nodes, tokens, results, start = paths[:total].tolist(), emitted[:total].tolist(), list[Accepted](), 0
    drawn = answer.drawn
    for index, length in zip(indices, lengths, strict=True):
        session, end = sessions[index], start + length
        if drawn[index] is not None:
            session.randomness.skip(length)
        results.append(_cut(index, session, tuple(nodes[start:end]), tokens[start:end]))
        start = end
    if total == sum([len(each.token_ids) for each in results]):
        answer.judged = Judged(indices, OutcomesMemory(places, lengths, paths, lengths, emitted))
    return results


def _cut(index: int, session: Session, path: tuple[int, ...], token_ids: list[int]) -> Accepted:
    """Appends the tokens to the output, up to a stop condition."""
    matcher, writer = session.matcher, session.writer
    if matcher is None:
        emitted = writer.write(token_ids)
    else:
        kept = token_ids[: matcher.take_output(token_ids)]
        emitted = writer.write(kept, is_complete=matcher.is_complete)
    session.tokens += emitted
    session.finish_reason = writer.finish_reason
    if not session.takes_choices:
        session.warper.commit(emitted)
    return Accepted(index, session, session.offered, session.tree, path, emitted)


def _detail(each: Accepted, logits: torch.Tensor) -> CycleDetail:
    tree, path, stats, token_ids = each.tree, each.path, each.session.stats, each.token_ids
    inner = sorted({*tree.parents[1:], *path})
    row_of = {node: row for row, node in enumerate(inner)}
    rows = logits[inner].softmax(dim=-1)  # [inner, V]
    after = [row_of[node] for node in (*tree.parents[1:], *path[: len(token_ids)])]
    probs = rows[after, [*tree.tokens[1:], *token_ids]].tolist()
    return CycleDetail(
        target_probs=(1.0, *probs[: len(tree) - 1]),
        emitted_probs=tuple(probs[len(tree) - 1 :]),
        draft_seconds=stats.draft_seconds,
        verify_seconds=stats.verify_seconds,
        total_seconds=stats.total_seconds,
    )


def _logprobs(
    wanted: int, token_ids: Sequence[int], path: Sequence[int], logits: torch.Tensor
) -> tuple[TokenLogprobs, ...]:
    rows = logits[list(path[: len(token_ids)])].log_softmax(dim=-1)  # [emitted, V]
    best, best_ids = rows.topk(min(wanted, rows.shape[-1]), dim=-1)
    own = rows[torch.arange(len(token_ids)), list(token_ids)].tolist()
    return tuple(
        TokenLogprobs(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(token_ids, own, best_ids.tolist(), best.tolist(), strict=True)
    )
