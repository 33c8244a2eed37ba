"""Reads GGUF files, as they are or converted to folders in Hugging Face layout."""

from draftwood.models.gguf.config import config_of, generation_config_of
from draftwood.models.gguf.conversion import (
    CONVERTER_VERSION,
    converted_size,
    describe_conversion,
    description_size,
    write_description,
    write_weights,
)
from draftwood.models.gguf.reader import MAGIC, GgufFile
from draftwood.models.gguf.stored import StoredTensor, stored_tensors
