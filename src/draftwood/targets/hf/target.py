"""Any causal language model of transformers as a target, without a copy of its modelling file.

The segments of all sequences run as one row of N tokens (a batch of one, no padding). Three things make that exact:
explicit position ids, a 4-D mask that lets each node see its own prefix and its ancestors, and our own cache behind the
interface that the model expects. Prompt chunks and trees run in the same way.

Cost: linear layers run exactly N rows. Attention computes N x K scores, where K counts the cached positions of *all*
packed sequences, and discards those across sequences: with B sequences that is B times the necessary attention work,
plus one copy of the keys and values per layer (none for a single sequence). The native target has neither cost.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftwood.errors import CapabilityError, MissingExtraError, ModelError
from draftwood.models import read_json_config
from draftwood.targets.base import ForwardOutput, Segment, Target, TargetParts
from draftwood.targets.hf.cache import CacheView, PackedRow, SlotCache, pack
from draftwood.targets.hf.info import describe
from draftwood.targets.hf.masks import (
    Reach,
    build_masks,
    find_obstacles,
    mask_styles,
    reach_by_layer_type,
    shrink_windows,
)
from draftwood.targets.hf.plain import PlainTarget
from draftwood.targets.hf.probe import PROBE_WINDOW, find_tree_mismatch
from draftwood.targets.hf.taps import LayerTaps
from draftwood.targets.room import default_cache_tokens
from draftwood.targets.slots import SlotTarget


class HFTarget(SlotTarget):
    """Runs trees through a transformers model. Changes the model: it is put into eval mode, and an attention
    implementation that takes no masks (flash, flex) is replaced by "sdpa" or "eager".

    ``cache_tokens`` limits the cached positions of all sequences together (default: ``max_batch`` full contexts, each
    with a draft tree, at most 65,536); memory grows with use. Raises for models that cannot run trees; ``from_model``
    can fall back to plain decoding.
    """

    _cache: SlotCache

    def __init__(
        self, model: Any, *, name: str | None = None, max_batch: int = 8, cache_tokens: int | None = None
    ) -> None:
        self._model = model.eval()
        self._config = model.config.get_text_config(decoder=True)
        self.info = describe(model, self._config, name, backend="transformers")
        self._taps = LayerTaps(model, self.info.num_layers, self.info.hidden_size)
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._reaches: dict[str, Reach] = {}
        self._cache = SlotCache(cache_tokens or default_cache_tokens(max_batch, self.info.context_length))
        self._choose_masks()

    @classmethod
    def from_model(
        cls,
        model: Any,
        *,
        name: str | None = None,
        max_batch: int = 8,
        cache_tokens: int | None = None,
        allow_plain: bool = False,
    ) -> Target:
        """A tree target; with ``allow_plain`` ("hf-plain") a ``PlainTarget`` if the model cannot run trees."""
        try:
            return cls(model, name=name, max_batch=max_batch, cache_tokens=cache_tokens)
        except CapabilityError:
            if not allow_plain or getattr(model.config, "is_encoder_decoder", False):
                raise
        info = describe(model, model.config.get_text_config(decoder=True), name, backend="transformers-plain")
        room = cache_tokens or default_cache_tokens(max_batch, info.context_length)
        return PlainTarget(model, replace(info, can_tree=False), room)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        name: str | None = None,
        max_batch: int = 8,
        cache_tokens: int | None = None,
        allow_plain: bool = False,
    ) -> Target:
        """Load a model folder of transformers. Code in the folder is never run."""
        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise MissingExtraError("The transformers target", "transformers", "hf") from None
        _check_kernels(folder)
        try:
            # None would make transformers ask on standard input, where a piped "y" is consent.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            model, report = loaded
        # Damaged weights and invalid configurations can raise any error anywhere in transformers.
        except Exception as error:
            _refuse_own_code(folder, error)
            raise ModelError(
                "transformers cannot load this folder as a causal language model",
                got=f"{folder}: {_summarize_error(error)}",
                next_step="Check the folder, or install the transformers release that the model requires.",
            ) from error
        _check_complete(folder, report)
        return cls.from_model(
            model.to(device),
            name=name or folder.name,
            max_batch=max_batch,
            cache_tokens=cache_tokens,
            allow_plain=allow_plain,
        )

    @torch.no_grad()
    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        row = pack(segments, self._cache)
        self._check_positions(row)
        device = self.info.device
        wanted = torch.tensor(row.wanted, dtype=torch.long, device=device)
        output = self._model(
            input_ids=torch.tensor([row.token_ids], device=device),  # [1, N]
            position_ids=torch.from_numpy(row.positions)[None].to(device),
            attention_mask=build_masks(self._reaches, row, self.info.dtype, device),
            past_key_values=CacheView(self._cache, row, device),
            use_cache=True,
            return_dict=True,
            **({"logits_to_keep": wanted} if self._selects_logits else {}),
        )
        logits = output.logits[0] if self._selects_logits else output.logits[0, wanted]
        logits = logits.float()  # [R, V]
        return ForwardOutput(logits, logits.argmax(dim=-1), self._taps.take(len(row.token_ids)))

    @torch.no_grad()
    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        self._cache.keep(sequence, nodes)

    @torch.no_grad()
    def resize(self, sequence: int, capacity: int) -> bool:
        return self._cache.resize(sequence, capacity)

    def fork(self, sequence: int, capacity: int, length: int | None = None) -> int:
        return self._cache.fork(sequence, capacity, length)

    def set_taps(self, layers: Sequence[int]) -> None:
        self._taps.set(layers)

    def parts(self) -> TargetParts:
        names = ("get_input_embeddings", "get_output_embeddings")
        embed, head = (getattr(getattr(self._model, name)(), "weight", None) for name in names)
        decoder = getattr(self._model, "model", None)
        norm = getattr(decoder, "norm", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if embed is None or head is None or eps is None or getattr(norm, "bias", None) is not None:
            return super().parts()
        return TargetParts(embed.detach(), norm.weight.detach(), head.detach(), float(eps))  # type: ignore[union-attr]

    def _check_positions(self, row: PackedRow) -> None:
        """Learned positions end at the context length: on a GPU, an index beyond it would crash the process."""
        if row.positions.max() >= self.info.context_length:
            raise CapabilityError(
                f"A node lies beyond the context of {self.info.name}",
                got=f"position {row.positions.max()}",
                allowed=f"0 to {self.info.context_length - 1}",
                next_step="Shorten the prompt or max_tokens, or reduce the depth of the draft tree.",
            )

    def _choose_masks(self) -> None:
        """Find an attention implementation and a style of masks that make this model's trees exact; raise if none."""
        found = find_obstacles(self._config, self.info.context_length)
        if not found:
            for implementation in _list_attentions(self._model, self._config):
                if not _set_attention(self._model, implementation):
                    continue
                for style in mask_styles(self._config):
                    problem = self._probe_style(style)
                    if problem is None:
                        self._measure()
                        return
                    found.append(f"{problem} (with {implementation} attention and {style})")
        raise CapabilityError(
            f"{self.info.architecture} cannot run draft trees through transformers",
            got="; ".join(found) or "no attention that takes masks",
            next_step="Use another model, or target=hf-plain for plain decoding without drafts.",
        )

    def _probe_style(self, style: str) -> str | None:
        """Set a style of masks and run the probe. Returns what went wrong, or None."""
        self._cache.rows.clear()
        try:
            with shrink_windows(self._model, self._config, PROBE_WINDOW):
                self._reaches = reach_by_layer_type(style, self._config)
                problem = find_tree_mismatch(self, self._model, self.info.vocab_size)
        except Exception as error:  # noqa: BLE001 - the model's code may fail in any way, which fails the probe
            return f"{type(error).__name__}: {error}"
        self._reaches = reach_by_layer_type(style, self._config)
        return problem or self._find_missing_layers()

    def _find_missing_layers(self) -> str | None:
        """Report layers that cache no keys and values: they have another kind of state, even if the probe passes."""
        expected = self.info.num_layers - int(getattr(self._config, "num_kv_shared_layers", None) or 0)
        if len(self._cache.rows) >= expected:
            return None
        return f"only {len(self._cache.rows)} of {expected} layers keep keys and values in the cache"

    def _measure(self) -> None:
        """Replace values of the configuration by what the model actually does."""
        sequence = self.open(1)
        probe = [Segment(sequence, [0], [-1], 1)]
        try:
            vocab_size = self.forward(probe).logits.shape[-1]
            can_tap = self._can_tap(probe)
        finally:
            self.close(sequence)
        size = self._cache.bytes_per_token
        self.info = replace(self.info, vocab_size=vocab_size, cache_bytes_per_token=size, can_tap=can_tap)

    def _can_tap(self, probe: Sequence[Segment]) -> bool:
        try:
            self._taps.set(range(self.info.num_layers + 1))
            self.forward(probe)
        except CapabilityError:
            return False
        finally:
            self._taps.set(())
        return True


def _summarize_error(error: Exception) -> str:
    """The type of an error and the first non-empty line of its message, since libraries append pages of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _check_kernels(folder: Path) -> None:
    """Raise if the folder names code on the hub: transformers would fetch and run it as the attention of the model."""
    config, _ = read_json_config(folder)
    for field, value in config.items():
        if field.endswith("_implementation") and "/" in str(value):
            raise ModelError(
                "The model needs code that does not belong to transformers, which is never run",
                got=f"{field}: {str(value)[:80]} in {folder / 'config.json'}",
                next_step=f"Remove {field} from config.json, or use another model.",
            )


def _refuse_own_code(folder: Path, error: Exception) -> None:
    """Raise an error that names the code which this folder needs, if that is why transformers refused it."""
    if "trust_remote_code" in str(error):
        own = read_json_config(folder)[0].get("auto_map")
        raise ModelError(
            "The model needs code from its own folder, which is never run",
            got=f"{folder}: {json.dumps(own)[:200]}",
            next_step="Use a model whose architecture transformers knows, or a newer release of transformers.",
        ) from error


def _check_complete(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise if weights are missing: transformers initializes them at random, with only a warning."""
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise ModelError(
            "The model folder lacks weights",
            got=f"{folder}: {', '.join(missing[:6])}{' ...' if len(missing) > 6 else ''}",
            next_step="Download the model again.",
        )


def _list_attentions(model: Any, config: Any) -> list[str]:
    """The implementations that take masks: the model's own choice first, since it can affect the output."""
    if getattr(config, "attn_logit_softcapping", None):
        return ["eager"]  # transformers' "sdpa" omits the capping, in some releases silently
    return sorted(("sdpa", "eager"), key=lambda name: name != model.config._attn_implementation)


def _set_attention(model: Any, implementation: str) -> bool:
    if model.config._attn_implementation != implementation:
        try:
            model.set_attn_implementation(implementation)
        except (ValueError, ImportError):  # the model does not support it
            return False
    return bool(model.config._attn_implementation == implementation)
