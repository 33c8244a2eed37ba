"""Store of grown trees for all epochs: in memory, and in a folder if given.

The key of a text's trees is a hash of its tokens, its roots, and the setting that they were grown with.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftwood.disk import new_file
from draftwood.errors import DraftwoodError
from draftwood.train.trees.target_trees import TextTrees
from draftwood.train.trees.walk import Texts

Grow = Callable[[Texts, Texts], list[TextTrees]]  # (texts, roots of each) -> their trees


class TreeStore:
    """``setting`` identifies target and beam. At most ``max_bytes`` are kept in memory."""

    def __init__(self, setting: str, grow: Grow, folder: Path | None, max_bytes: int) -> None:
        self._setting = setting
        self._grow = grow
        self._folder = folder
        self._max_bytes = max_bytes
        self._held: dict[str, TextTrees] = {}
        self._num_bytes = 0
        self.num_grown = 0  # texts

    def trees(self, texts: Texts, roots: Texts) -> list[TextTrees]:
        """Return the trees of each text. Missing ones are grown in one call."""
        names = [self._name(text, own) for text, own in zip(texts, roots, strict=True)]
        found = {name: trees for name in names if (trees := self._look_up(name)) is not None}
        missing = {name: index for index, name in enumerate(names) if name not in found}
        if missing:
            self.num_grown += len(missing)
            grown = self._grow(*([each[index] for index in missing.values()] for each in (texts, roots)))
            for name, trees in zip(missing, grown, strict=True):
                found[name] = trees
                self._write(name, trees)
                self._keep(name, trees)
        return [found[name] for name in names]

    def _name(self, text: Sequence[int], roots: Sequence[int]) -> str:
        content = f"{self._setting}|{','.join(map(str, text))}|{','.join(map(str, roots))}"
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _look_up(self, name: str) -> TextTrees | None:
        if name in self._held:
            return self._held[name]
        trees = self._read(name)
        if trees is not None:
            self._keep(name, trees)
        return trees

    def _keep(self, name: str, trees: TextTrees) -> None:
        """Keep trees while there is room. Nothing is evicted: in epochs the least recently used text is needed next."""
        if self._num_bytes + trees.nbytes <= self._max_bytes:
            self._held[name] = trees
            self._num_bytes += trees.nbytes

    def _path(self, name: str) -> Path | None:
        return None if self._folder is None else self._folder / name[:2] / f"{name}.safetensors"

    def _read(self, name: str) -> TextTrees | None:
        path = self._path(name)
        if path is None or not path.exists():
            return None
        try:
            return TextTrees(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise DraftwoodError(
                f"The trees in {path} cannot be read", got=error, next_step="Delete the file to grow them again."
            ) from error

    def _write(self, name: str, trees: TextTrees) -> None:
        path = self._path(name)
        if path is not None:
            with new_file(path) as temporary:
                save_file({field: part.contiguous() for field, part in trees._asdict().items()}, temporary)
