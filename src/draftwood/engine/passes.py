"""One forward pass for many sessions: what each contributes, and what each gets back."""

import time
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draftwood.compiled import OutcomesMemory
from draftwood.engine.draws import plan_draw, take_drawn
from draftwood.engine.fitting import Fitted
from draftwood.engine.session import Session
from draftwood.engine.timing import Spent, Times, charge_rows
from draftwood.targets import ForwardOutput, PendingPass, Segment, Target, chain_parents


class Pass(NamedTuple):
    """A pass that was launched and whose answer has not been read yet."""

    sessions: Sequence[Session]
    segments: Sequence[Segment]
    flight: PendingPass
    fitted: Fitted  # its trees
    taps: Sequence[int]  # layers whose hidden states come with it
    spent: Spent

    @property
    def times(self) -> Times:
        return self.spent.times


class Judged(NamedTuple):
    """Sessions whose trees C has judged, and what came of them as C reads it."""

    indices: Sequence[int]
    memory: OutcomesMemory


class Answer:
    """What the target says about the segments of all sessions."""

    judged: Judged | None = None  # unless a stop condition cut what one of them emitted

    def __init__(self, launched: Pass, output: ForwardOutput, choices: npt.NDArray[np.int64]) -> None:
        self.sessions, self.segments = launched.sessions, launched.segments
        self.output = output  # of all sessions
        self._choices = choices  # [R] greedy token after each node
        num_rows = [segment.num_logits for segment in launched.segments]
        self.first_rows = list(accumulate(num_rows, initial=0))
        # Sampled token after each node, where it was drawn for many sessions at once.
        started = time.perf_counter()
        self.drawn = take_drawn(output, self.sessions, self.segments)
        if any(self.drawn):
            drawn_rows = [len(tokens or ()) for tokens in self.drawn]
            charge_rows(self.sessions, drawn_rows, time.perf_counter() - started)
        self._taps = launched.taps
        self._parts: Sequence[ForwardOutput] | None = None

    @property
    def num_rows(self) -> int:
        """R, of all sessions."""
        return len(self._choices)

    def choices_of(self, index: int) -> list[int]:
        """Greedy tokens after the nodes of one session's segment."""
        return self._choice_list[self.first_rows[index] : self.first_rows[index + 1]]

    def with_drawn(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """[R] The token after each node: of the sessions at ``indices`` the drawn one, if they have drawn ones."""
        drawn = {index: tokens for index in indices if (tokens := self.drawn[index]) is not None}
        if not drawn:
            return self._choices
        found = self._choices.copy()
        for index, tokens in drawn.items():
            found[self.first_rows[index] : self.first_rows[index + 1]] = tokens
        return found

    @cached_property
    def _choice_list(self) -> list[int]:
        choices: list[int] = self._choices.tolist()
        return choices

    def part(self, index: int) -> ForwardOutput:
        """The rows of one session. All are split when the first is read: hundreds of views take their time."""
        if self._parts is None:
            self._parts = self.output.split(self.segments)
        return self._with_own_taps(self._parts[index], index)

    def only_part(self, index: int) -> ForwardOutput:
        """The same, where few sessions read theirs."""
        part = self.output.only(self.segments, index) if self._parts is None else self._parts[index]
        return self._with_own_taps(part, index)

    def _with_own_taps(self, part: ForwardOutput, index: int) -> ForwardOutput:
        session = self.sessions[index]
        if not self._taps or session.has_left:
            return part
        return select_taps(part, self._taps, session.drafter.wants_taps)

    @cached_property
    def no_rows(self) -> ForwardOutput:
        """In place of ``part``, for sessions that read no rows."""
        return ForwardOutput(self.output.logits[:0], self.output.greedy_ids[:0], None)


def segment_of(session: Session, num_sessions: int) -> Segment:
    """The next part of the session's prompt, or its tree, in a pass for so many sessions."""
    if not session.is_prefilling:
        token_ids, parents = session.tree.links()
        draw = plan_draw(session) if session.draws_ahead else None
        return Segment(session.sequence, token_ids, parents, session.tree.size, 0, draw)
    start = session.num_committed
    part = session.tokens[start : start + session.num_unread]
    is_new = session.num_read == session.num_prompt and not session.is_resting  # drafters have seen what is read again
    if is_new and session.learns_prompt is None:
        session.learns_prompt = session.drafter.wants_prompt_logits and _pays_to_learn(session, num_sessions)
    reads_prompt = is_new and session.learns_prompt
    return Segment(session.sequence, part, chain_parents(len(part)), len(part) if reads_prompt else 0)


def _pays_to_learn(session: Session, num_sessions: int) -> bool:
    """Whether the drafter should get the logits of what is left of the prompt."""
    sizer, num_left = session.sizer, session.num_read - 1 - session.num_committed
    num_sharing = 1 if session.draws else num_sessions  # draws must not depend on other requests
    return sizer is None or sizer.reads_prompt(num_left, session.max_tokens, num_sharing)


def launch(target: Target, sessions: Sequence[Session], fitted: Fitted, lane: int) -> Pass:
    segments = [segment_of(session, len(sessions)) for session in sessions]
    drafters = [session.drafter for session in sessions if not session.is_resting]
    wanted = {(drafter.wants_top, drafter.wants_taps) for drafter in drafters}
    target.set_top(max([top for top, _ in wanted], default=0))
    taps = sorted(set().union(*[taps for _, taps in wanted]))
    target.set_taps(taps)
    started = time.perf_counter()
    flight = target.launch(segments, lane)
    times = Times(launched=started, passing=time.perf_counter() - started)
    spent = Spent(  # listed while the target works
        sessions,
        [len(segment.token_ids) for segment in segments],
        [session.is_prefilling for session in sessions],
        [session.draft_seconds for session in sessions],
        times,
    )
    return Pass(sessions, segments, flight, fitted, taps, spent)


def collect(launched: Pass) -> Answer:
    """Waits for the pass and takes its answer."""
    launched.fitted.note()  # while the target works
    started = time.perf_counter()
    output = launched.flight.wait()
    choices = np.array(output.greedy_ids.cpu().numpy())  # the one place where the host waits for the device
    now, times = time.perf_counter(), launched.times
    times.passing += now - started
    times.elapsed = now - times.launched
    return Answer(launched, output, choices)


def select_taps(output: ForwardOutput, tapped: Sequence[int], wanted: Sequence[int]) -> ForwardOutput:
    """Keeps the hidden states of the ``wanted`` layers, of those of all ``tapped`` ones."""
    if output.taps is None or tuple(tapped) == tuple(wanted):
        return output
    parts = output.taps.chunk(len(tapped), dim=-1)
    own = [parts[tapped.index(layer)] for layer in wanted]
    return output._replace(taps=torch.cat(own, dim=-1) if own else None)
