"""Validation on held-out texts: tokens per pass (tau) with real draft trees.

The head is saved and loaded as a user would do it, and prompts are answered with each growth policy. For the trees of
``beam`` it also measures how often the head's greedy path to full depth is pruned from the tree, and how often the
accepted path lies on it (in cycles that accept anything).
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from draftwood.config import SamplingParams
from draftwood.drafters import DraftRequest, NeuralDrafter, VerifiedTree, drafter_class
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

DRAFTERS = {"eagle": "eagle2", "eagle3": "eagle3", "medusa": "medusa", "hydra": "hydra"}  # drafter by kind of head
BATCH = 8  # prompts that are answered at once


class TreeStats:
    """Statistics of greedy paths in the trees of a run."""

    def __init__(self) -> None:
        self.trees = self.pruned = self.accepting = self.along = 0

    def add(self, tree: DraftTree, accepted: Sequence[int], depth: int) -> None:
        """Add a tree. ``accepted``: nodes of the accepted path, root first. ``depth``: of a complete greedy path."""
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
    """Return the path of most likely children in the tree, root first."""
    path = [0]
    while children := tree.children_of(path[-1]):
        path.append(max(children, key=lambda child: tree.probs[child]))
    return path


def extract_prompts(texts: Sequence[Example], limit: int) -> list[list[int]]:
    """Return the prompts before the first generated token, at most ``limit``."""
    found = [text.token_ids[: int(text.answered.argmax())].tolist() for text in texts if text.answered.any()]
    return [prompt for prompt in found if prompt][:limit]


def measure_trees(
    folder: Path,
    kind: str,
    target: Target,
    codec: TextCodec,
    prompts: Sequence[Sequence[int]],
    section: ValidateSection,
    progress: Progress | None = None,
) -> dict[str, dict[str, float]]:
    """Measure tau under each growth policy with greedy decoding and the head in ``folder``."""
    found = {}
    for growth in section.growths:
        notes, written = (TreeStats(), _counter(progress, f"drafting with {growth}", len(prompts) * section.max_tokens))
        llm = LLM.from_target(
            target,
            codec,
            drafter=_record_trees(DRAFTERS[kind], notes, written),
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
    """Measure tau, accuracy and calibration by rank. ``head`` is unsharded and on the CPU."""
    result: dict[str, Any] = {}
    prompts = extract_prompts(texts, section.prompts)
    info = target.info
    if prompts and section.growths:
        with _save_temporarily(head) as folder:
            trees = measure_trees(folder, head.config.kind, target, codec, prompts, section, progress)
        _free_memory()
        result |= {"tau": sum(each["tau"] for each in trees.values()) / len(trees), "trees": trees}
    if section.positions and texts:
        with torch.no_grad():
            ready = deepcopy(head).to(info.device, info.dtype)
            result |= measure_ranks(ready, target, texts[: section.texts], section.positions, progress)
    return result


@contextmanager
def _save_temporarily(head: HeadModule) -> Iterator[Path]:
    """Save the head in a temporary folder for the duration of the block."""
    with ExitStack() as stack:
        try:
            place = stack.enter_context(TemporaryDirectory(prefix="draftwood-head-"))
            folder = save_head(head, Path(place) / "head")
        except (OSError, DraftwoodError) as error:
            raise DraftwoodError(
                "The head cannot be saved among temporary files",
                got=getattr(error, "got", None) or error,
                next_step="Free some space there, or set TMPDIR to another folder.",
            ) from error
        yield folder


def _free_memory() -> None:
    """Free the caches and captured graphs of drafters at once, since training needs the memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def score_validation(result: dict[str, Any]) -> float:
    """Return the score_validation that selects the best head: tau, or the negative loss if no prompts were answered."""
    tau = result.get("tau")
    return float(tau) if tau is not None else -float(result["loss"])


def _counter(progress: Progress | None, label: str, total: int) -> Callable[[int], None]:
    """Return a function that adds new tokens and reports progress towards ``total``."""
    done = 0

    def add(tokens: int) -> None:
        nonlocal done
        done += tokens
        report(progress, label, done, total)

    add(0)
    return add


def _record_trees(
    name: str, notes: TreeStats, written: Callable[[int], None] = lambda tokens: None
) -> type[NeuralDrafter]:
    base = drafter_class(name)
    assert issubclass(base, NeuralDrafter)

    class Recorded(base):  # type: ignore[valid-type, misc]
        """The same drafter, with statistics of its trees."""

        def begin(self, request: DraftRequest) -> None:
            self._left = request.params.max_tokens
            super().begin(request)

        def observe(self, verified: VerifiedTree) -> None:
            depth = self.shared.growth.depth or BEAM_DEPTH  # None means the default
            if self._left > depth:  # otherwise the tree was cut at the end of the answer
                notes.add(verified.tree, verified.path, depth)
            self._left -= len(verified.emitted)
            written(len(verified.emitted))
            super().observe(verified)

    Recorded.name = base.name
    return Recorded
