"""Checkpoints of heads: one file per layout, for the layouts of several engines."""

from draftwood.heads.formats.draftwood import DraftwoodLayout
from draftwood.heads.formats.files import CONFIG, read_config_file
from draftwood.heads.formats.load import FORMATS, LoadedHead, load_head, save_head
