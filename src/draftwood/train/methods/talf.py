"""TALF: a head learns what the target says behind every node of trees that the target grew itself.

For root positions of a text the target grows a tree once (`trees/grow.py`); its distributions behind the nodes are the
labels, in every epoch. The head follows every path and reads its own features on the way, all nodes of a depth of all
roots together (`trees/run.py`). The loss is the cross-entropy, summed over the nodes of a tree; there is no regression
of features. With k = 1 it is HASS without that regression, along the target's choices instead of the text.

In the paper all nodes of a tree count alike: the root is one of 1 + k * (depth - 1), and a node that the target would
hardly ever reach weighs as much. With ``weights = "path"`` a node counts as often as the target would get there: the
loss is then what is to be expected along its own continuations, and less of the head goes to rare branches.

In the paper a tree hangs off every position. Where ``roots`` of a text do, for the time that trees take, a guess right
behind the text is learned at these alone. With ``text`` it is learned at all positions, which the head and the target
read anyway, and counts as much as before: the same loss is to be expected, and less is left to chance.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor

from draftwood.drafters import check_choice, check_flag, check_whole
from draftwood.errors import OptionError
from draftwood.heads import Head, HeadConfig, identity
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.frozen import FrozenTarget
from draftwood.train.losses import Evaluator, Positions
from draftwood.train.methods.base import Method
from draftwood.train.methods.unrolled import zero_of
from draftwood.train.trees import (
    Beam,
    DraftHead,
    HeadRun,
    Labels,
    Texts,
    TextTrees,
    TreeStore,
    counted_roots,
    drawn_roots,
    grow_trees,
    joined,
    node_losses,
    padded,
    spread,
    texts_of,
    vocabulary_of,
)

MOST_WIDTH = 1 << 14  # parents are kept in 16 bits
WEIGHTS = ("even", "path")


@dataclass(frozen=True, kw_only=True, slots=True)
class TalfOptions:
    width: int = 4  # k: nodes of a depth
    depth: int = 3  # steps of the head: the root, and depth - 1 rows of nodes below it
    roots: int = 0  # positions of a text that trees hang off, drawn once for all epochs; 0: all that count
    labels: int = 64  # tokens of a label that are kept; all others are one class
    weights: str = "even"  # of the nodes of a tree: all alike, or (path) the target's probability of the way there
    text: bool = False  # whether guesses behind the text are learned at all positions, not at those with a tree alone
    folder: str = ""  # where trees are kept from one run to the next; empty: nowhere
    memory_mb: int = 8192  # of trees that are held; the others are read, or grown, again

    detach: bool = False  # no gradient from a node into the output that it reads

    def __post_init__(self) -> None:
        check_whole(self, 1, "width", high=MOST_WIDTH)
        check_whole(self, 1, "depth", "labels")
        check_whole(self, 0, "roots", "memory_mb")
        check_flag(self, "detach", "text")
        check_choice(self, "weights", WEIGHTS)
        if self.weights == "path" and self.labels < self.width:
            raise OptionError(
                "The weights of paths need every child among the labels",
                got=f"labels = {self.labels}, width = {self.width}",
                allowed="labels of width or more",
            )


class TalfMethod(Method):
    name: ClassVar[str] = "talf"
    kinds: ClassVar[tuple[str, ...]] = ("eagle", "eagle3")
    Options = TalfOptions

    options: TalfOptions

    def __init__(self, options: TalfOptions, head: Head, frozen: FrozenTarget, seed: int = 0) -> None:
        super().__init__(options, head, frozen, seed)
        self._vocabulary = vocabulary_of(cast(DraftHead, head))
        tokens = head.config.draft_vocab_size
        self._beam = Beam(min(options.width, tokens), options.depth, min(options.labels, tokens))
        folder = Path(options.folder) if options.folder else None
        self.store = TreeStore(self._setting(), self._grow, folder, options.memory_mb << 20)

    @classmethod
    def outputs_per_position(cls, options: TalfOptions, head: HeadConfig) -> int:
        return 1 + options.width * (options.depth - 1)

    def losses(self, batch: Batch, signals: Signals) -> Losses:
        head = cast(DraftHead, self.head)
        device = batch.token_ids.device
        texts, roots = texts_of(batch), counted_roots(batch)
        guesses = [len(own) for own in roots]
        if self.options.roots:
            pairs = zip(texts, roots, strict=True)
            roots = [drawn_roots(own, self.options.roots, text, self.seed) for text, own in pairs]
        trees = _sent(joined(self.store.trees(texts, roots)), device)  # of M roots
        positions, is_root = padded(roots, 1, device)  # [B, R]
        where = is_root.flatten().nonzero()[:, 0]  # [M]
        run = HeadRun(head, batch, signals, positions, detach=self.options.detach, checkpoints=self.checkpoints)
        hidden = self._follow(run, trees, where, is_root.shape)  # [B, R, nodes, H]
        num_nodes = hidden.shape[2]
        counts = trees.counts.clone()  # [M, nodes]
        counts[:, 0] &= not self.options.text
        counted = counts.flatten().nonzero()[:, 0]  # [N] among all nodes of the M roots
        nodes = where[counted // num_nodes] * num_nodes + counted % num_nodes
        labels = Labels(*(part.flatten(0, 1)[counted] for part in (trees.ids, trees.probs, trees.rest, trees.counts)))
        found = node_losses(head, hidden.flatten(0, 2).index_select(0, nodes), labels, self.block)
        num_roots = is_root.sum().float()
        weighted = found.cross_entropy
        if self.options.weights == "path":
            weighted = weighted * self._reach(trees).flatten()[counted]
        loss = weighted.sum() if len(weighted) else zero_of(head)
        parts = self._parts(found.cross_entropy, found.is_right, counted % num_nodes)
        if self.options.text:
            shares = [len(own) / max(all_of_them, 1) for own, all_of_them in zip(roots, guesses, strict=True)]
            of_text, its_parts = self._behind_text(run, batch, signals, torch.tensor(shares, device=device))
            loss, parts = loss + of_text, parts | its_parts
        total = loss / num_roots.clamp(min=1.0)
        return Losses(total, {"loss": total.detach(), **parts}, num_roots)

    def _behind_text(
        self, run: HeadRun, batch: Batch, signals: Signals, shares: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of guesses at all positions; those of a text count together as its roots would: its accuracy [B]."""
        positions = Positions.of(batch)
        evaluator = Evaluator(self.head, self.frozen, lambda hidden, _: cast(DraftHead, self.head).logits(hidden))
        hidden = run.along_text()[positions.text, positions.last - 1]  # [P, H]
        evaluation = evaluator.evaluate(hidden[None], positions, batch, signals.hidden, self.block)
        cross_entropy, right = evaluation.cross_entropy[0], evaluation.right[0]  # [P]
        means = {"cross_entropy": cross_entropy.detach(), "accuracy": right.float()}
        number = max(positions.number, 1)
        return (cross_entropy * shares[positions.text]).sum(), {name: x.sum() / number for name, x in means.items()}

    def _follow(self, run: HeadRun, trees: TextTrees, where: Tensor, shape: torch.Size) -> Tensor:
        """The head's outputs behind all nodes, [B, R, nodes, H]. The roots stand at ``where`` of B x R."""
        outputs = [run.at_roots()]
        for level in zip(trees.tokens.long().unbind(1), trees.parents.long().unbind(1), strict=True):  # [M, k] each
            outputs.append(run.step(*(spread(each, where, shape) for each in level)))
        return torch.cat(outputs, dim=2)

    def _reach(self, trees: TextTrees) -> Tensor:
        """The target's probability of the way to every node, [M, nodes], among the tokens that the head has."""
        reached = torch.ones_like(trees.rest[:, :1])
        rows, above = [reached], 0  # the number of the first node of the row above
        for tokens, parents in zip(trees.tokens.unbind(1), trees.parents.long().unbind(1), strict=True):  # [M, k]
            ids, probs = (
                torch.take_along_dim(part, above + parents[..., None], 1) for part in (trees.ids, trees.probs)
            )
            said = (probs.float() * (ids == self.head.draft_ids(tokens.long())[..., None])).sum(dim=-1)
            above += reached.shape[1]
            reached = reached.gather(1, parents) * said
            rows.append(reached)
        return torch.cat(rows, dim=1)

    def _parts(self, cross_entropy: Tensor, is_right: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        """Means by depth; ``numbers [N]`` are those of the nodes in their trees."""
        depths = (numbers + self._beam.width - 1) // self._beam.width
        sizes, losses, right = (
            torch.zeros(self._beam.depth, device=depths.device).index_add_(0, depths, each.detach().float())
            for each in (torch.ones_like(cross_entropy), cross_entropy, is_right)
        )
        sizes = sizes.clamp(min=1.0)
        parts = {}
        for depth in range(self._beam.depth):
            suffix = f"_{depth}" if depth else ""
            parts[f"cross_entropy{suffix}"] = losses[depth] / sizes[depth]
            parts[f"accuracy{suffix}"] = right[depth] / sizes[depth]
        return parts

    def _grow(self, texts: Texts, roots: Texts) -> list[TextTrees]:
        return grow_trees(self.frozen.target, texts, roots, self._beam, self._vocabulary)

    def _setting(self) -> str:
        """What the trees of a text depend on besides the text: the target, the beam and the head's vocabulary."""
        target, own = self.frozen.target, self._vocabulary
        tokens = "all" if own is None else hashlib.sha256(own.cpu().numpy().tobytes()).hexdigest()
        return f"{identity(target)} {target.info.name} {target.info.dtype} {tuple(self._beam)} {tokens}"


def _sent(trees: TextTrees, device: torch.device) -> TextTrees:
    """To the device; a GPU reads them by itself meanwhile."""
    if device.type != "cuda":
        return TextTrees(*(part.to(device) for part in trees))
    return TextTrees(*(part.pin_memory().to(device, non_blocking=True) for part in trees))
