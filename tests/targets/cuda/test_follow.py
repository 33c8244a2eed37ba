"""The kernel that finds the accepted path of a tree on the device, against the host's acceptance."""

from __future__ import annotations

import random

import pytest
import torch

from draftwood.targets.base import DeviceAnswer, Draw, PendingPass, Segment
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cuda.inputs import NO_SLOT, Inputs, new_moves
from draftwood.targets.native.decoder import pack
from draftwood.tree import DraftTree
from draftwood.verify import accept_greedy
from tests.tools.cuda import SMALL, new_target
from tests.tools.triton import DEVICE, INTERPRETED, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda.kernels import GIVEN, follow_path

ROWS, PER_TILE = 16, 5


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def random_tree(rng: random.Random, size: int, *, is_chain: bool) -> DraftTree:
    parents, depths, tokens = [-1], [0], [rng.randrange(100)]
    taken: dict[int, set[int]] = {}
    while len(parents) < size:
        parent = len(parents) - 1 if is_chain else max(rng.randrange(len(parents)), rng.randrange(len(parents)))
        token = rng.choice([token for token in range(100) if token not in taken.setdefault(parent, set())])
        taken[parent].add(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(token)
    return DraftTree.unchecked(
        tokens=tuple(tokens),
        parents=tuple(parents),
        depths=tuple(depths),
        sources=("root", *("guess",) * (size - 1)),
        probs=(1.0,) * size,
        proposals={},
    )


def random_choices(rng: random.Random, tree: DraftTree) -> list[int]:
    """After most nodes the token of one of its children."""
    children = tree.children()
    return [
        tree.tokens[rng.choice(below)] if below and rng.random() < 0.8 else rng.randrange(100) for below in children
    ]


def follow(
    tree: DraftTree, choices: list[int], rows: int, base: int, length: int
) -> tuple[Inputs, list[int], list[int]]:
    """The inputs on the host, the addresses of the hidden states and what is told."""
    cache = KVCache(1, 1, 1, 400, torch.float32, torch.device("cpu"))
    sequence = cache.open(200)
    inputs = Inputs(rows, 2 * rows, 16, DEVICE)
    inputs.fill(pack([Segment(sequence, tree.tokens, tree.parents, tree.size)], cache), new_moves())
    inputs.send()
    found = torch.full((rows, 7), -1, dtype=torch.int32, device=DEVICE)
    found[: tree.size, 0] = torch.tensor(choices, device=DEVICE)
    taps = torch.zeros(rows, 24, dtype=torch.bfloat16, device=DEVICE)[:, :20]
    answer = DeviceAnswer(inputs.ids, inputs.positions, inputs.slots, inputs.words, inputs.tiles, found, taps)
    own = Inputs(ROWS, -(-ROWS // PER_TILE), PER_TILE, DEVICE)
    addresses = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
    told = torch.zeros(1 + ROWS, dtype=torch.int32, device=DEVICE)
    own._device.fill_(77)  # what an earlier search left
    own.words.zero_()
    own.afters.zero_()
    follow_path(answer, base, length, own, addresses, told)
    own._host.copy_(own._device)
    return own, [(address - taps.data_ptr()) // 48 for address in addresses.tolist()], told.tolist()


@runs_kernels
@pytest.mark.parametrize(("size", "rows"), [(1, 1), (2, 4), (9, 16), (24, 24), (40, 64), (100, 128)])
@pytest.mark.parametrize("is_chain", [False, True])
def test_the_path_becomes_text(size: int, rows: int, is_chain: bool) -> None:
    rng = random.Random(size)
    for _ in range(4):
        tree = random_tree(rng, size, is_chain=is_chain)
        choices = random_choices(rng, tree)
        if is_chain and rng.random() < 0.5:
            choices[: size - 1] = tree.tokens[1:]  # all of it is right
        accepted = accept_greedy(tree, choices)
        path, emitted = accepted.path, list(accepted.token_ids(tree))
        base, length = rng.randrange(1000), rng.randrange(1000)
        own, places, told = follow(tree, choices, rows, base, length)
        assert told[0] == len(path)
        count = min(len(path), ROWS)
        assert told[1 : 1 + count] == emitted[:count]
        assert places[:count] == list(path[:count])

        # The same inputs as if the host had known the text.
        cache = KVCache(1, 1, 1, 4000, torch.float32, torch.device("cpu"))
        cache.open(base)
        sequence = cache.open(length + ROWS)
        cache.reserve(sequence, range(-1, length - 1))
        cache.keep(sequence, range(length))
        wanted = Inputs(ROWS, -(-ROWS // PER_TILE), PER_TILE, torch.device("cpu"))
        wanted.fill(pack([Segment(sequence, emitted[:count], range(-1, count - 1), 1)], cache), new_moves())
        for name in ("_ids", "_positions", "_tiles", "_words", "_afters"):
            assert (getattr(own, name) == getattr(wanted, name)).all(), name
        assert own._slots.tolist() == [*wanted._slots[:count].tolist(), *[NO_SLOT] * (ROWS - count)]
        assert own._wanted[0] == wanted._wanted[0] == count - 1
        assert own._moves[: 1 + ROWS].tolist() == [count, *[GIVEN] * ROWS]


@runs_kernels
@pytest.mark.parametrize("is_drawn", [False, True])
def test_what_a_pass_leaves_on_the_device(is_drawn: bool) -> None:
    """Its answer leads to the same path there as on the host."""
    target = new_target(SMALL, torch.bfloat16, "fused-cuda")
    sequences, draw = [target.open(8) for _ in range(2)], None
    if is_drawn:
        draw = Draw((0.7, 0, 1.0, 0.0), lambda: [0.3, 0.6, 0.9, 0.5])

    def launch(tokens: list[int], *, at: list[int]) -> PendingPass:
        return target.launch([Segment(sequences[0], tokens, at, len(tokens), draw=draw)])

    assert launch([5, 6, 7, 8], at=[-1, 0, 0, 1]).on_device() is None  # without hidden states
    target.set_taps([1])
    first = launch([5, 6, 7, 8], at=[-1, 0, 0, 1]).wait()
    choice = int(first.greedy_ids[0] if first.drawn is None else first.drawn[0])
    tokens, parents = [5, choice ^ 1, choice, 9], [-1, 0, 0, 2]
    flight = launch(tokens, at=parents)
    answer = flight.on_device()
    assert answer is not None
    own, addresses = Inputs(ROWS, ROWS, PER_TILE, DEVICE), torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
    told = torch.zeros(1 + ROWS, dtype=torch.int32, device=DEVICE)
    follow_path(answer, 0, 3, own, addresses, told)
    output = flight.wait()
    assert (output.drawn is not None) == is_drawn
    choices = (output.greedy_ids if output.drawn is None else output.drawn).tolist()
    tree = DraftTree.unchecked(
        tokens=tuple(tokens),
        parents=tuple(parents),
        depths=(0, 1, 1, 2),
        sources=("root", *("guess",) * 3),
        probs=(1.0,) * 4,
        proposals={},
    )
    accepted = accept_greedy(tree, choices)
    assert len(accepted.path) > 1
    count, *found = told.tolist()
    assert found[:count] == list(accepted.token_ids(tree))
    assert output.taps is not None
    width = output.taps.shape[1] * output.taps.element_size()
    places = [(address - output.taps.data_ptr()) // width for address in addresses[:count].tolist()]
    assert places == list(accepted.path)
    two = [Segment(sequence, [5], [-1], 1) for sequence in sequences]
    assert target.launch(two).on_device() is None
