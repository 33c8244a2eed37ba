"""Static trees by the name a user gives: a built-in one, or a file that ``draftwood tune`` wrote."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from draftwood.errors import OptionError
from draftwood.tree import TreeShape, recycling_tree

TREES = Path(__file__).parent / "trees"  # measured ones that come with the package


def static_tree(tree: object) -> TreeShape:
    """``heuristic``: wide under good ranks; the name of a packaged tree; or the path of a JSON file, which has a dot or
    a slash in it."""
    if not isinstance(tree, str) or not tree:
        raise OptionError("tree is no name and no file", got=repr(tree), allowed=_names())
    if Path(tree).suffix or "/" in tree:
        return TreeShape.load(Path(tree).expanduser())[0]
    if tree == "heuristic":
        return _heuristic()
    packaged = TREES / f"{tree}.json"
    if packaged.is_file():
        return TreeShape.load(packaged)[0]
    raise OptionError("There is no tree of that name", got=repr(tree), allowed=_names())


@lru_cache(maxsize=64)
def truncate_shape(shape: TreeShape, size: int) -> TreeShape:
    """The first ``size`` nodes; a drafter asks for the same few sizes again and again."""
    return shape.first(size)


@lru_cache(maxsize=1)
def _heuristic() -> TreeShape:
    return recycling_tree()


def _names() -> list[str]:
    return ["heuristic", *sorted(path.stem for path in TREES.glob("*.json")), "a JSON file of `draftwood tune`"]
