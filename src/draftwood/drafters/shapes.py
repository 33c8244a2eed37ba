"""Static trees by name: a built-in tree, or a file written by ``draftwood tune``."""

from functools import lru_cache
from pathlib import Path

from draftwood.errors import OptionError
from draftwood.tree import TreeShape, recycling_tree

TREES = Path(__file__).parent / "trees"  # measured trees in the package


def static_tree(tree: object) -> TreeShape:
    """Load a tree: ``heuristic`` (wider under better ranks), a packaged tree by name, or a JSON file. A file name must
    contain a dot or a slash."""
    if not isinstance(tree, str) or not tree:
        raise OptionError("tree is not a name or a file", got=repr(tree), allowed=_names())
    if Path(tree).suffix or "/" in tree:
        return TreeShape.load(Path(tree).expanduser())[0]
    if tree == "heuristic":
        return _heuristic()
    packaged = TREES / f"{tree}.json"
    if packaged.is_file():
        return TreeShape.load(packaged)[0]
    raise OptionError("Unknown tree", got=repr(tree), allowed=_names())


@lru_cache(maxsize=64)
def truncate_shape(shape: TreeShape, size: int) -> TreeShape:
    """The first ``size`` nodes; cached, since drafters request the same few sizes repeatedly."""
    return shape.first(size)


@lru_cache(maxsize=1)
def _heuristic() -> TreeShape:
    return recycling_tree()


def _names() -> list[str]:
    return ["heuristic", *sorted(path.stem for path in TREES.glob("*.json")), "a JSON file of `draftwood tune`"]
