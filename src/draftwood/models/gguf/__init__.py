"""Reads GGUF files and converts them to folders in Hugging Face layout."""

from draftwood.models.gguf.config import config_of, generation_config_of
from draftwood.models.gguf.conversion import CONVERTER_VERSION, convert, converted_size, describe_conversion
from draftwood.models.gguf.reader import MAGIC, GgufFile
