"""Hidden states of a transformers model, read with hooks on its decoder layers.

``output_hidden_states`` is not used: it keeps the states of all layers, and its last entry is after the final norm.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from draftwood.errors import CapabilityError, OptionError


class LayerTaps:
    """Hooks on the chosen layers. ``take`` returns what the last forward recorded."""

    def __init__(self, model: Any, num_layers: int, hidden_size: int) -> None:
        self._model_name = type(model).__name__
        self._layers = _find_decoder_layers(model, num_layers)
        self._hidden_size = hidden_size
        self._chosen: tuple[int, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._seen: dict[int, torch.Tensor] = {}

    def set(self, layers: Sequence[int]) -> None:
        if tuple(layers) == self._chosen:
            return
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen, self._chosen = [], {}, ()
        if not layers:
            return
        if self._layers is None:
            raise CapabilityError(
                f"The decoder layers of {self._model_name} could not be found, so its hidden states cannot be read",
                next_step="Use a drafter that needs no hidden states.",
            )
        last = len(self._layers)
        if any(not 0 <= layer <= last for layer in layers):
            raise OptionError("No such layer to tap", got=list(layers), allowed=f"0 to {last}")
        self._chosen = tuple(layers)
        for layer in set(layers):
            self._handles.append(self._hook(layer))

    def take(self, num_nodes: int) -> torch.Tensor | None:
        """The taps of the forward that just ran, ``[N, T*H]``."""
        if not self._chosen:
            return None
        seen, self._seen = self._seen, {}
        states = [seen[layer] for layer in self._chosen]
        for state in states:
            if state.shape != (1, num_nodes, self._hidden_size):
                raise CapabilityError(
                    f"The layers of {self._model_name} do not output one hidden state per position",
                    got=f"shape {tuple(state.shape)}",
                    allowed=f"(1, {num_nodes}, {self._hidden_size})",
                )
        return torch.cat([state[0] for state in states], dim=-1)

    def _hook(self, layer: int) -> RemovableHandle:
        assert self._layers is not None
        if layer < len(self._layers):

            def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._seen[layer] = args[0] if args else kwargs["hidden_states"]

            return self._layers[layer].register_forward_pre_hook(before, with_kwargs=True)

        # The output of the last layer is the input of the final norm.
        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._seen[layer] = output if isinstance(output, torch.Tensor) else output[0]

        return self._layers[-1].register_forward_hook(after)


def _find_decoder_layers(model: Any, num_layers: int) -> nn.ModuleList | None:
    """The outermost module list with one module per layer."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    return None
