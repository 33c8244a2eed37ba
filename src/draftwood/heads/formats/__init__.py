"""Checkpoints of heads: the layouts of several engines, each in a file of its own."""

from draftwood.heads.formats.load import FORMATS, LoadedHead, load_head, save_head

__all__ = ["FORMATS", "LoadedHead", "load_head", "save_head"]
