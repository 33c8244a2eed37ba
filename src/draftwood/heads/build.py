"""Build the module of a head from its configuration."""

import torch

from draftwood.heads.config import HeadConfig
from draftwood.heads.eagle import EagleHead
from draftwood.heads.eagle3 import Eagle3Head
from draftwood.heads.hydra import HydraHead
from draftwood.heads.medusa import MedusaHead

HeadModule = EagleHead | Eagle3Head | MedusaHead | HydraHead

_KINDS: dict[str, type[HeadModule]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "medusa": MedusaHead,
    "hydra": HydraHead,
}


def build_head(
    config: HeadConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> HeadModule:
    """Build the module with parameters not yet set: load them, or call ``reset_parameters``."""
    with torch.device(device):
        return _KINDS[config.kind](config).to(dtype)
