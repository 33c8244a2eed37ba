"""From the target's answer to an event: accept the longest correct path, write it out, let the drafter learn."""

import time
from collections.abc import Sequence

import torch

from draftwood.drafters import VerifiedTree
from draftwood.engine.events import BONUS_SOURCE, CycleDetail, TokenEvent, TokenLogprobs
from draftwood.engine.output import Block
from draftwood.engine.passes import Answer
from draftwood.engine.session import Session
from draftwood.structured import StructureMatcher
from draftwood.verify import AcceptedPath, accept_greedy, accept_predrawn, accept_sampled


def accept(session: Session, answer: Answer) -> AcceptedPath:
    """The longest path of the session's tree that the target agrees with, and the target's own next token."""
    tree, warper, logits = session.tree, session.warper, answer.output.logits
    if session.matcher is not None:
        return _accept_matching(session, answer, session.matcher)
    if answer.drawn is not None:
        return accept_predrawn(tree, answer.drawn, session.randomness)
    if session.takes_choices:
        return accept_greedy(tree, answer.choices)
    if session.params.is_greedy:
        return accept_greedy(tree, lambda node: warper.choice(logits[node], tree.path_tokens(node)))
    return accept_sampled(tree, lambda node: warper.probs(logits[node], tree.path_tokens(node)), session.randomness)


def _accept_matching(session: Session, answer: Answer, matcher: StructureMatcher) -> AcceptedPath:
    """As ``accept``, with the logits of tokens that the structure forbids at -inf. Only nodes on the accepted path are
    looked at, and their masks only computed if the target's own choice is not enough."""
    tree, warper, logits = session.tree, session.warper, answer.output.logits
    takes_choices = session.params.is_greedy and not session.params.has_penalties

    def choose(node: int) -> int:
        matcher.take(tree.tokens[node : node + 1] if node else ())
        choice = answer.choices[node]
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


def emit(session: Session, accepted: AcceptedPath) -> Block:
    """Appends the accepted tokens to the output, up to a stop condition, and counts the cycle."""
    token_ids, matcher = accepted.token_ids(session.tree), session.matcher
    if matcher is not None:
        token_ids = token_ids[: matcher.take_output(token_ids)]
    block = session.writer.write(token_ids, is_complete=matcher is not None and matcher.is_complete)
    num_emitted = len(block.token_ids)
    session.tokens += block.token_ids
    session.finish_reason = block.finish_reason
    if not session.takes_choices:
        session.warper.commit(block.token_ids)
    stats, now = session.stats, time.perf_counter()
    if stats.cycles == 0:
        stats.first_token_seconds = now - session.admitted
    stats.total_seconds = now - session.admitted
    stats.note_tree(session.tree, accepted.path[1 : num_emitted + 1], num_emitted)
    return block


def learn(session: Session, accepted: AcceptedPath, block: Block, answer: Answer) -> None:
    """Shows sizer and drafter what came of their tree."""
    tree, output = session.tree, answer.output
    if session.sizer is not None:
        session.sizer.note(session.offered, tree, block.token_ids)
    session.drafter.observe(
        VerifiedTree(tree, output.logits, answer.choices, accepted.path, block.token_ids, output.taps, output.top)
    )


def event_of(session: Session, accepted: AcceptedPath, block: Block, answer: Answer) -> TokenEvent:
    tree, path = session.tree, accepted.path
    return TokenEvent(
        request_id=session.sample.request_id,
        token_ids=tuple(block.token_ids),
        sources=(*[tree.sources[node] for node in path[1:]], BONUS_SOURCE)[: len(block.token_ids)],
        texts=block.texts,
        logprobs=_logprobs(session.params.logprobs, block.token_ids, path, answer.output.logits),
        finish_reason=block.finish_reason,
        stats=session.stats,
        tree=tree,
        path=path,
        detail=_detail(session, path, block, answer.output.logits) if session.sample.request.with_cycles else None,
    )


def _detail(session: Session, path: Sequence[int], block: Block, logits: torch.Tensor) -> CycleDetail:
    tree, stats = session.tree, session.stats
    inner = sorted({*tree.parents[1:], *path})
    row_of = {node: row for row, node in enumerate(inner)}
    rows = logits[inner].softmax(dim=-1)  # [inner, V]
    after = [row_of[node] for node in (*tree.parents[1:], *path[: len(block.token_ids)])]
    probs = rows[after, [*tree.tokens[1:], *block.token_ids]].tolist()
    return CycleDetail(
        target_probs=(1.0, *probs[: len(tree) - 1]),
        emitted_probs=tuple(probs[len(tree) - 1 :]),
        draft_seconds=stats.draft_seconds,
        verify_seconds=stats.verify_seconds,
        total_seconds=stats.total_seconds,
    )


def _logprobs(
    wanted: int | None, token_ids: Sequence[int], path: Sequence[int], logits: torch.Tensor
) -> tuple[TokenLogprobs, ...]:
    if wanted is None:
        return ()
    rows = logits[list(path[: len(token_ids)])].log_softmax(dim=-1)  # [emitted, V]
    best, best_ids = rows.topk(min(wanted, rows.shape[-1]), dim=-1)
    own = rows[torch.arange(len(token_ids)), list(token_ids)].tolist()
    return tuple(
        TokenLogprobs(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(token_ids, own, best_ids.tolist(), best.tolist(), strict=True)
    )
