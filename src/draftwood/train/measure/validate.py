"""What counts, measured on texts that were held out: how many tokens a pass yields with real draft trees.

The head is saved and loaded as a user would do it, and prompts are answered with each growth policy. Beside tau, of the
trees of ``beam``: how often the head's greedy path to full depth was pruned from the tree, and how often what was
accepted lies on that path (of cycles that accepted anything).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from draftwood.config import SamplingParams
from draftwood.drafters import DraftRequest, NeuralDrafter, Verified, drafter_class
from draftwood.errors import DraftwoodError
from draftwood.growth.neural import BEAM_DEPTH
from draftwood.heads import HeadModule, save_head
from draftwood.llm import LLM
from draftwood.progress import Progress, report
from draftwood.targets import Target
from draftwood.text import TextCodec
from draftwood.train.base import Example
from draftwood.train.config import ValidateSection
from draftwood.train.measure.calibration import measure_ranks
from draftwood.tree import DraftTree

DRAFTERS = {"eagle": "eagle2", "eagle3": "eagle3", "medusa": "medusa", "hydra": "hydra"}  # by kind of head
BATCH = 8  # prompts that are answered together


class TreeNotes:
    """Greedy paths in the trees of a run."""

    def __init__(self) -> None:
        self.trees = self.pruned = self.accepting = self.along = 0

    def add(self, tree: DraftTree, accepted: Sequence[int], depth: int) -> None:
        """``accepted``: the nodes of the path, root first. ``depth``: that of a whole greedy path."""
        if len(tree) == 1:
            return
        greedy = greedy_path(tree)
        self.trees += 1
        self.pruned += len(greedy) - 1 < depth
        if len(accepted) > 1:
            self.accepting += 1
            self.along += set(accepted) <= set(greedy)

    def summary(self) -> dict[str, float]:
        return {
            "greedy_pruned": self.pruned / max(1, self.trees),
            "accepted_greedy": self.along / max(1, self.accepting),
        }


def greedy_path(tree: DraftTree) -> list[int]:
    """The head's best child of the best child ..., as far as the tree has it; root first."""
    path = [0]
    while children := tree.children_of(path[-1]):
        path.append(max(children, key=lambda child: tree.probs[child]))
    return path


def extract_prompts(texts: Sequence[Example], most: int) -> list[list[int]]:
    """What stands before the target's first word, of so many texts."""
    found = [text.token_ids[: int(text.answered.argmax())].tolist() for text in texts if text.answered.any()]
    return [prompt for prompt in found if prompt][:most]


def measure_trees(
    folder: Path,
    kind: str,
    target: Target,
    codec: TextCodec,
    prompts: Sequence[Sequence[int]],
    section: ValidateSection,
    progress: Progress | None = None,
) -> dict[str, dict[str, float]]:
    """tau under each growth policy, greedy, with the head in ``folder``."""
    found = {}
    for growth in section.growths:
        notes, written = TreeNotes(), _counted(progress, f"drafting with {growth}", len(prompts) * section.max_tokens)
        llm = LLM.from_target(
            target,
            codec,
            drafter=_watched(DRAFTERS[kind], notes, written),
            drafter_options={"head": str(folder), "growth": growth},
            budget=section.budget,
            max_batch=BATCH,
        )
        with llm:
            done = llm.generate(prompts, SamplingParams(max_tokens=section.max_tokens))
        cycles = max(1, sum(each.stats.cycles for each in done))
        tau = sum(each.stats.output_tokens for each in done) / cycles
        size = 1 + sum(each.stats.drafted_nodes for each in done) / cycles
        found[growth] = {"tau": tau, "mean_tree_size": size, **(notes.summary() if growth == "beam" else {})}
    return found


def validate_head(
    head: HeadModule,
    target: Target,
    codec: TextCodec,
    texts: Sequence[Example],
    section: ValidateSection,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Everything that needs no method: trees, accuracy, calibration by rank. ``head`` is a whole one on the host."""
    result: dict[str, Any] = {}
    prompts = extract_prompts(texts, section.prompts)
    info = target.info
    if prompts and section.growths:
        with _saved(head) as folder:
            trees = measure_trees(folder, head.config.kind, target, codec, prompts, section, progress)
        _free_memory()
        result |= {"tau": sum(each["tau"] for each in trees.values()) / len(trees), "trees": trees}
    if section.positions and texts:
        with torch.no_grad():
            ready = deepcopy(head).to(info.device, info.dtype)
            result |= measure_ranks(ready, target, texts[: section.texts], section.positions, progress)
    return result


@contextmanager
def _saved(head: HeadModule) -> Iterator[Path]:
    """A folder with the head, for as long as the block lasts."""
    with ExitStack() as stack:
        try:
            place = stack.enter_context(TemporaryDirectory(prefix="draftwood-head-"))
            folder = save_head(head, Path(place) / "head")
        except (OSError, DraftwoodError) as error:
            raise DraftwoodError(
                "There is no room for the head among temporary files",
                got=getattr(error, "got", None) or error,
                next_step="Free some space there, or set TMPDIR to another folder.",
            ) from error
        yield folder


def _free_memory() -> None:
    """Drafters hold caches and captured graphs; training wants their memory back at once."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def score(result: dict[str, Any]) -> float:
    """What the best head is chosen by: tau, or the loss where no prompts were answered."""
    tau = result.get("tau")
    return float(tau) if tau is not None else -float(result["loss"])


def _counted(progress: Progress | None, label: str, total: int) -> Callable[[int], None]:
    """Told of tokens that were written, it tells how many there are of ``total``, the most there can be."""
    done = 0

    def add(tokens: int) -> None:
        nonlocal done
        done += tokens
        report(progress, label, done, total)

    add(0)
    return add


def _watched(name: str, notes: TreeNotes, written: Callable[[int], None] = lambda tokens: None) -> type[NeuralDrafter]:
    base = drafter_class(name)
    assert issubclass(base, NeuralDrafter)

    class Watched(base):  # type: ignore[valid-type, misc]
        """The drafter as it is, whose trees are counted by the way."""

        def begin(self, request: DraftRequest) -> None:
            self._left = request.params.max_tokens
            super().begin(request)

        def observe(self, verified: Verified) -> None:
            depth = self.shared.growth.depth or BEAM_DEPTH  # what a head cannot see below is left out there
            if self._left > depth:  # else the tree was cut at the end of the answer
                notes.add(verified.tree, verified.path, depth)
            self._left -= len(verified.emitted)
            written(len(verified.emitted))
            super().observe(verified)

    Watched.name = base.name
    return Watched
