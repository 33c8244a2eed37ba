"""Training methods by name, imported on first use."""

from importlib import import_module

from draftwood.errors import DraftwoodError, OptionError, did_you_mean
from draftwood.train.methods.base import Method

METHODS: dict[str, str] = {
    "eagle": "draftwood.train.methods.eagle:EagleMethod",
    "eagle3": "draftwood.train.methods.eagle3:Eagle3Method",
    "griffin": "draftwood.train.methods.griffin:GriffinMethod",
    "gto": "draftwood.train.methods.gto:GtoMethod",
    "hass": "draftwood.train.methods.hass:HassMethod",
    "hydra": "draftwood.train.methods.ahead:HydraMethod",
    "medusa": "draftwood.train.methods.ahead:MedusaMethod",
    "reach": "draftwood.train.methods.reach:ReachMethod",
    "talf": "draftwood.train.methods.talf:TalfMethod",
}


def method_class(name: str) -> type[Method]:
    if name not in METHODS:
        raise OptionError(
            "Unknown training method", got=repr(name), allowed=sorted(METHODS), next_step=did_you_mean(name, METHODS)
        )
    module, attribute = METHODS[name].split(":")
    try:
        cls: type[Method] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DraftwoodError(f"The method {name!r} cannot be loaded", got=f"{METHODS[name]}: {error}") from error
    return cls
