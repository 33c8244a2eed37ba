"""Reads GGUF files and converts them to folders in Hugging Face layout."""

from draftwood.models.gguf.conversion import CONVERTER_VERSION, convert, converted_size
from draftwood.models.gguf.reader import MAGIC, GgufFile
