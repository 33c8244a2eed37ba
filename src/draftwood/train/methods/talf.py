"""TALF: train the head on every node of trees that the target grows.

For root positions of a text the target grows a tree once (`trees/grow.py`). Its distributions after the nodes are the
labels in every epoch. The head follows every path with its own features, all nodes of a depth of all roots at once
(`trees/head_run.py`). The loss is the cross-entropy summed over the nodes of a tree, without feature regression. With
k = 1 it is HASS without regression, along the target's choices instead of the text.

In the paper all nodes of a tree have the same weight. With ``weights = "path"`` a node is weighted by the target's
probability of reaching it: the loss is then the expected loss along the target's own continuations.

In the paper every position is a root. With ``roots`` only some positions are, to save time. With ``text`` the
prediction right after the text is then still trained at all positions, with the same total weight: the expected loss is
the same and its variance is lower.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor

from draftwood.drafters import check_choice, check_flag, check_int
from draftwood.errors import OptionError
from draftwood.heads import Head, HeadConfig, identify_target
from draftwood.progress import Progress
from draftwood.train.base import Batch, Example, Losses, Signals
from draftwood.train.frozen import FrozenTarget
from draftwood.train.losses import Evaluator, Positions
from draftwood.train.methods.base import Method
from draftwood.train.methods.unrolled import check_weights, feature_noise, zero_of
from draftwood.train.trees import (
    Beam,
    DraftHead,
    HeadRun,
    Labels,
    Texts,
    TextTrees,
    TreeStore,
    counted_roots,
    find_vocabulary,
    grow_trees,
    joined,
    node_losses,
    padded,
    sample_roots,
    scatter,
    texts_of,
)

MAX_WIDTH = 1 << 14  # parents are stored in 16 bits
WEIGHTS = ("even", "path")


@dataclass(frozen=True, kw_only=True, slots=True)
class TalfOptions:
    width: int = 4  # k: nodes per depth
    depth: int = 3  # steps of the head: the root, then depth - 1 levels of nodes
    roots: int = 0  # root positions per text, sampled once for all epochs; 0: all counted positions
    labels: int = 64  # tokens per label; all others form one class
    weights: str = "even"  # of nodes: even, or path (the target's probability of reaching the node)
    text: bool = False  # also train the prediction after the text at positions without a tree
    folder: str = ""  # folder that stores trees between runs; empty: none
    memory_mb: int = 8192  # memory for trees; others are read or grown again
    prepare: bool = False  # grow all trees before the first step, outside the time of training
    noise: float = 0.0  # width of uniform noise on features of texts of 512 tokens; scaled by 512 / length
    detach: bool = False  # no gradient from a node into its parent's output

    def __post_init__(self) -> None:
        check_int(self, 1, "width", high=MAX_WIDTH)
        check_int(self, 1, "depth", "labels")
        check_int(self, 0, "roots", "memory_mb")
        check_flag(self, "detach", "text", "prepare")
        check_weights(self, "noise")
        check_choice(self, "weights", WEIGHTS)
        if self.weights == "path" and self.labels < self.width:
            raise OptionError(
                'With weights = "path" labels must not be smaller than width',
                got=f"labels = {self.labels}, width = {self.width}",
                allowed="labels >= width",
            )


class TalfMethod(Method):
    name: ClassVar[str] = "talf"
    kinds: ClassVar[tuple[str, ...]] = ("eagle", "eagle3")
    Options = TalfOptions

    options: TalfOptions

    def __init__(self, options: TalfOptions, head: Head, frozen: FrozenTarget, seed: int = 0) -> None:
        super().__init__(options, head, frozen, seed)
        self._vocabulary = find_vocabulary(cast(DraftHead, head))
        tokens = head.config.draft_vocab_size
        self._beam = Beam(min(options.width, tokens), options.depth, min(options.labels, tokens))
        folder = Path(options.folder) if options.folder else None
        self.store = TreeStore(self._store_key(), self._grow, folder, options.memory_mb << 20)

    @classmethod
    def outputs_per_position(cls, options: TalfOptions, head: HeadConfig) -> int:
        return 1 + options.width * (options.depth - 1)

    def prepare(self, batches: Sequence[Sequence[Example]], progress: Progress) -> None:
        if not self.options.prepare:
            return
        for done, examples in enumerate(batches):
            progress("growing trees", done, len(batches))
            batch = Batch.of(examples)
            texts = texts_of(batch)
            self.store.trees(texts, self._sample_roots(texts, counted_roots(batch)))
        progress("growing trees", len(batches), len(batches))

    def _sample_roots(self, texts: Texts, roots: Texts) -> list[list[int]]:
        if not self.options.roots:
            return [list(own) for own in roots]
        pairs = zip(texts, roots, strict=True)
        return [sample_roots(own, self.options.roots, text, self.seed) for text, own in pairs]

    def losses(self, batch: Batch, signals: Signals) -> Losses:
        head = cast(DraftHead, self.head)
        device = batch.token_ids.device
        texts, counted_places = texts_of(batch), counted_roots(batch)
        num_counted = [len(own) for own in counted_places]
        roots = self._sample_roots(texts, counted_places)
        trees = _copy_to_device(joined(self.store.trees(texts, roots)), device)  # of M roots
        positions, is_root = padded(roots, 1, device)  # [B, R]
        where = is_root.flatten().nonzero()[:, 0]  # [M]
        noise = None
        if self.options.noise and self.head.training:
            noise = feature_noise(batch, head.config.hidden_size, self.options.noise, self.seed, self.step)
        run = HeadRun(
            head, batch, signals, positions, detach=self.options.detach, checkpoints=self.checkpoints, noise=noise
        )
        hidden = self._follow(run, trees, where, is_root.shape)  # [B, R, nodes, H]
        num_nodes = hidden.shape[2]
        counts = trees.counts.clone()  # [M, nodes]
        counts[:, 0] &= not self.options.text
        counted = counts.flatten().nonzero()[:, 0]  # [N] among all nodes of the M roots
        nodes = where[counted // num_nodes] * num_nodes + counted % num_nodes
        labels = Labels(*(part.flatten(0, 1)[counted] for part in (trees.ids, trees.probs, trees.rest, trees.counts)))
        losses = node_losses(head, hidden.flatten(0, 2).index_select(0, nodes), labels, self.block)
        num_roots = is_root.sum().float()
        weighted = losses.cross_entropy
        if self.options.weights == "path":
            weighted = weighted * self._path_probs(trees).flatten()[counted]
        loss = weighted.sum() if len(weighted) else zero_of(head)
        parts = self._parts(losses.cross_entropy, losses.is_right, counted % num_nodes)
        if self.options.text:
            shares = [len(own) / max(count, 1) for own, count in zip(roots, num_counted, strict=True)]
            of_text, its_parts = self._text_loss(run, batch, signals, torch.tensor(shares, device=device))
            loss, parts = loss + of_text, parts | its_parts
        total = loss / num_roots.clamp(min=1.0)
        return Losses(total, {"loss": total.detach(), **parts}, num_roots)

    def _text_loss(
        self, run: HeadRun, batch: Batch, signals: Signals, shares: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the predictions after the text at all positions, weighted per text by ``shares [B]``."""
        positions = Positions.of(batch)
        evaluator = Evaluator(self.head, self.frozen, lambda hidden, _: cast(DraftHead, self.head).logits(hidden))
        hidden = run.along_text()[positions.text, positions.last - 1]  # [P, H]
        evaluation = evaluator.evaluate(hidden[None], positions, batch, signals.hidden, self.block)
        cross_entropy, right = evaluation.cross_entropy[0], evaluation.right[0]  # [P]
        means = {"cross_entropy": cross_entropy.detach(), "accuracy": right.float()}
        number = max(positions.number, 1)
        return (cross_entropy * shares[positions.text]).sum(), {name: x.sum() / number for name, x in means.items()}

    def _follow(self, run: HeadRun, trees: TextTrees, where: Tensor, shape: torch.Size) -> Tensor:
        """Return the head's outputs at all nodes, [B, R, nodes, H]. The roots are at ``where`` of B x R."""
        outputs = [run.at_roots()]
        for level in zip(trees.tokens.long().unbind(1), trees.parents.long().unbind(1), strict=True):  # [M, k] each
            outputs.append(run.step(*(scatter(each, where, shape) for each in level)))
        return torch.cat(outputs, dim=2)

    def _path_probs(self, trees: TextTrees) -> Tensor:
        """Return the target's probability of reaching each node, [M, nodes], over the draft vocabulary."""
        reached = torch.ones_like(trees.rest[:, :1])
        rows, above = [reached], 0  # index of the first node of the previous level
        for tokens, parents in zip(trees.tokens.unbind(1), trees.parents.long().unbind(1), strict=True):  # [M, k]
            ids, probs = (
                torch.take_along_dim(part, above + parents[..., None], 1) for part in (trees.ids, trees.probs)
            )
            edge_probs = (probs.float() * (ids == self.head.draft_ids(tokens.long())[..., None])).sum(dim=-1)
            above += reached.shape[1]
            reached = reached.gather(1, parents) * edge_probs
            rows.append(reached)
        return torch.cat(rows, dim=1)

    def _parts(self, cross_entropy: Tensor, is_right: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        """Average by depth. ``numbers [N]`` are the indices of the nodes in their trees."""
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

    def _store_key(self) -> str:
        """Return a key of everything that trees depend on besides the text: target, beam and draft vocabulary."""
        target, own = self.frozen.target, self._vocabulary
        tokens = "all" if own is None else hashlib.sha256(own.cpu().numpy().tobytes()).hexdigest()
        return f"{identify_target(target)} {target.info.name} {target.info.dtype} {tuple(self._beam)} {tokens}"


def _copy_to_device(trees: TextTrees, device: torch.device) -> TextTrees:
    """Copy trees to the device, asynchronously to a GPU."""
    if device.type != "cuda":
        return TextTrees(*(part.to(device) for part in trees))
    return TextTrees(*(part.pin_memory().to(device, non_blocking=True) for part in trees))
