"""Tree shapes that only tests use."""

from draftwood.tree.shapes import TreeShape


def uniform_tree(arity: int, budget: int) -> TreeShape:
    """``budget`` nodes with ``arity`` children each, breadth first."""
    below = range(budget - 1)
    return TreeShape((-1, *(i // arity for i in below)), (0, *(i % arity for i in below)))
