"""Model folders by name (known names, folders, hub ids, GGUF files), and model configurations."""

from draftwood.models.catalog import ModelDescription, add_model, describe, list_models, model_path, remove_model
from draftwood.models.config import ModelConfig, Rope, architecture_of, is_native, parse_config, read_count
from draftwood.models.fetch import HUB_TIMEOUT, hub_errors, hub_is_installed, hub_is_off, is_offline, wheel_gguf
from draftwood.models.find import (
    BUILT_IN,
    KNOWN,
    KnownModel,
    ModelFolder,
    expand,
    is_entry_name,
    read_json_config,
    resolve,
    short_name,
    stored_file,
)
from draftwood.models.gguf import GgufFile, StoredTensor, stored_tensors
from draftwood.models.look import find_local, is_gguf, read_configs, read_configs_of, read_final_norm
from draftwood.models.tensors import tensor_shapes
