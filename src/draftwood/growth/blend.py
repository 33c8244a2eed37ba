"""One tree from several sources: the likeliest guess of all sources is added next.

    chance of a guess = logistic(bias + sum over sources of weight * log odds of its kind)

Each source hints at tokens with a *kind* (compiled/blend.py); every kind has an acceptance rate, counted online and
decayed. A token that a source knows about and does not hint at has a kind too, so silence counts as evidence. The
weights combine the rates: they are learned by gradient steps, separately for every state of a guess (which sources hint
at it, which are silent about it, which know nothing) and by whether any source is sure of a token. Chances of siblings
are scaled down if they exceed 1 in total. A node's value is the product of the chances on its path, so adding the best
candidate each time gives the best tree of that size.

Learning uses every guess after every emitted token, in the tree or not: guesses that are not verified are right or
wrong all the same. The same steps exist in C (compiled/blend.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import exp, log
from typing import NamedTuple

from draftwood.compiled import NONE, SURE, TAIL, CompiledBlend, HintSource, Learned, load_core, name_sets, state_of
from draftwood.tree import DraftTree

DECAY = 0.998  # per trial of a kind
STEP, BIAS_STEP = 0.005, 0.003  # of the gradient, for the weights and for the bias
MIN_RATE, MAX_RATE = 5e-4, 0.998  # no kind is certain
WIDTH = 16  # guesses kept per node


class BlendLimits(NamedTuple):
    budget: int  # nodes, the root included
    max_depth: int
    min_value: float  # chance of a path below which nothing is added


def new_blend(sources: Sequence[HintSource], learned: Learned) -> PythonBlend | CompiledBlend:
    core = load_core()
    if core is None:
        return PythonBlend(sources, learned)
    return CompiledBlend(core, sources, learned, DECAY, STEP, BIAS_STEP)


class Blend:
    """Grows the trees of one request from its sources, and learns how good their hints are."""

    def __init__(self, sources: Sequence[HintSource], learned: Learned) -> None:
        self._own = new_blend(sources, learned)

    @property
    def compiled(self) -> CompiledBlend | None:
        """The blend in C; None in Python."""
        return self._own if isinstance(self._own, CompiledBlend) else None

    def tree(self, tail: Sequence[int], limits: BlendLimits) -> DraftTree:
        """``tail``: the last tokens of the text, the root last."""
        return self._own.tree(tail, *limits)

    def outcomes(self, tail: Sequence[int], emitted: Sequence[int]) -> list[list[Outcome]]:
        """What came of every guess that the sources had, by emitted token; as ``learn``, but nothing is learned."""
        found = []
        for depth, right in enumerate(emitted):
            after = self._own.guesses([*tail, *emitted[:depth]][-TAIL:], depth)
            found.append([Outcome(listed, kinds, token == right) for token, listed, kinds in after])
        return found

    def learn(self, tail: Sequence[int], emitted: Sequence[int]) -> None:
        """``emitted`` followed the ``tail`` that the last tree grew from; the sources have not learned from it yet."""
        self._own.learn(tail, emitted)


class Outcome(NamedTuple):
    """One guess about an emitted token."""

    listed: int  # bit s: source s hinted at it
    kinds: Sequence[int]  # by source; NONE: it knew nothing
    is_right: bool


class _Guess(NamedTuple):
    chance: float
    token: int
    listed: int  # bit s: source s hints at it
    kinds: list[int]  # by source; NONE: it knows nothing
    weights: tuple[int, int]  # where they are


class PythonBlend:
    """Reference implementation, used where there is no compiler."""

    def __init__(self, sources: Sequence[HintSource], learned: Learned) -> None:
        self._sources, self._learned = sources, learned
        self._names = name_sets([source.name for source in sources])

    def tree(self, tail: Sequence[int], budget: int, max_depth: int, min_value: float) -> DraftTree:
        tokens, parents, depths, listed, chances, values = [tail[-1]], [NONE], [0], [0], [1.0], [1.0]
        tails = [list(tail[-TAIL:])]
        queue: list[tuple[float, int, int, int, list[_Guess]]] = []  # -value, order, parent, rank, its guesses
        order, node = 0, 0
        while True:
            room = budget - len(tokens)
            if room and depths[node] < max_depth:
                own = self._guesses(tails[node], depths[node])
                likely = [guess for guess in own if guess.chance >= min_value / values[node]]
                best = sorted(likely, key=lambda guess: -guess.chance)[: min(room, WIDTH)]
                if best:
                    heappush(queue, (-values[node] * best[0].chance, order, node, 0, best))
                    order += 1
            if not room or not queue:
                sources = tuple([self._names[bits] for bits in listed])
                return DraftTree.unchecked(tuple(tokens), tuple(parents), tuple(depths), sources, tuple(chances))
            negative, _, parent, rank, best = heappop(queue)
            if rank + 1 < len(best):
                heappush(queue, (-values[parent] * best[rank + 1].chance, order, parent, rank + 1, best))
                order += 1
            node, guess = len(tokens), best[rank]
            tokens.append(guess.token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            listed.append(guess.listed)
            chances.append(guess.chance)
            values.append(-negative)
            tails.append([*tails[parent][1 - TAIL :], guess.token])

    def guesses(self, tail: Sequence[int], depth: int) -> list[tuple[int, int, list[int]]]:
        found = self._guesses(list(tail[-TAIL:]), depth)
        return [(guess.token, guess.listed, guess.kinds) for guess in found]

    def chain(self, tail: Sequence[int], max_tokens: int, min_value: float) -> tuple[list[int], list[float]]:
        """The likeliest guess, the likeliest one after it, and so on, while the chance of the path is high enough; and
        that chance for each guess."""
        tokens: list[int] = []
        values: list[float] = []
        value = 1.0
        while len(tokens) < max_tokens:
            guesses = self._guesses([*tail, *tokens][-TAIL:], len(tokens))
            best = max(guesses, key=lambda guess: guess.chance, default=None)
            value *= best.chance if best else 0.0
            if best is None or value < min_value:
                break
            tokens.append(best.token)
            values.append(value)
        return tokens, values

    def learn(self, tail: Sequence[int], emitted: Sequence[int]) -> None:
        if not self._learned.learns:
            return
        text = list(tail[-TAIL:])
        for depth, right in enumerate(emitted):
            self._note(self._guesses(text[-TAIL:], depth), right)
            text.append(right)

    def _guesses(self, tail: Sequence[int], depth: int) -> list[_Guess]:
        """What may follow a text, in the order of the sources."""
        listed: dict[int, dict[int, int]] = {}  # token -> source -> kind
        absent, informed, logits = [NONE] * len(self._sources), 0, self._learned.logits
        for number, source in enumerate(self._sources):
            found = source.look(tail, depth)
            if found is None or not found.tokens:
                continue
            informed |= 1 << number
            absent[number] = found.absent
            for token, kind in zip(found.tokens, found.kinds, strict=True):
                listed.setdefault(token, {})[number] = kind
        is_sure = any(logits[number][kind] >= SURE for own in listed.values() for number, kind in own.items())
        guesses = []
        for token, own in listed.items():
            kinds = [own.get(number, kind) for number, kind in enumerate(absent)]
            bits = sum(1 << number for number in own)
            place = int(is_sure), state_of(informed, bits)
            odds, *weights = self._learned.weights[place].tolist()
            # What silence says comes first: it is the same for all guesses of the same sources.
            for number in sorted(range(len(kinds)), key=lambda number: number in own):
                if kinds[number] != NONE:
                    odds += weights[number] * float(logits[number][kinds[number]])
            guesses.append(_Guess(1.0 / (1.0 + exp(-odds)), token, bits, kinds, place))
        total = 0.0
        for guess in guesses:
            total += guess.chance
        if total > 1.0:
            guesses = [guess._replace(chance=guess.chance / total) for guess in guesses]
        return guesses

    def _note(self, guesses: Sequence[_Guess], right: int) -> None:
        learned = self._learned
        for chance, token, _, kinds, place in guesses:
            weights = learned.weights[place]
            hit = float(token == right)
            weights[0] += BIAS_STEP * (hit - chance)
            for number, kind in enumerate(kinds):
                if kind != NONE:
                    weights[number + 1] += STEP * (hit - chance) * learned.logits[number][kind]
        for guess in guesses:
            for number, kind in enumerate(guess.kinds):
                if kind != NONE:
                    self._count(number, kind, float(guess.token == right))

    def _count(self, number: int, kind: int, right: float) -> None:
        trials, hits = self._learned.trials[number], self._learned.hits[number]
        trials[kind] = trials[kind] * DECAY + 1.0
        hits[kind] = hits[kind] * DECAY + right
        rate = min(max((hits[kind] + 0.02) / (trials[kind] + 0.1), MIN_RATE), MAX_RATE)
        self._learned.logits[number][kind] = log(rate / (1.0 - rate))
