"""Messages to and from a peer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.config import SamplingParams
from draftwood.errors import CapabilityError


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerModel:
    """The model that a peer loads, and how."""

    folder: Path  # in Hugging Face layout
    gguf: Path | None = None  # for llama.cpp
    dtype: str = "float32"  # float32, bfloat16 or float16; overridden by the peer's option dtype
    device: str = "cpu"
    threads: int | None = None  # None: torch's number of threads in this process
    max_context: int = 4096  # prompt and output together
    assistant: Path | None = None  # a folder; None: use the peer's option model
    seed: int = 0  # for requests without a seed


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerResult:
    """One finished request."""

    token_ids: list[int]
    first_token_seconds: float | None
    total_seconds: float
    finish_reason: str  # stop or length
    stats: dict[str, Any] | None = None  # named as in RequestStats.as_dict(), as far as reported
    peak_bytes: int | None = None  # peak memory during the request
    first_tokens: int = 1  # emitted by the first pass: more than one if it verified draft tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens generated during decode_seconds."""
        return len(self.token_ids) - (0 if self.first_token_seconds is None else self.first_tokens)

    @property
    def decode_seconds(self) -> float:
        return self.total_seconds - (self.first_token_seconds or 0.0)


def encode_request(prompt_ids: list[int], params: SamplingParams, seed: int) -> dict[str, Any]:
    """Encode a request for a worker. Rejects options that engines interpret differently."""
    if params.has_penalties or params.stop or params.stop_token_ids or params.logprobs is not None or params.n != 1:
        raise CapabilityError(
            "Peers support only temperature, top_p, top_k, min_p, max_tokens, seed and ignore_eos",
            got=params,
            next_step="Remove penalties, stop conditions, logprobs and multiple samples, or the peers.",
        )
    return {
        "prompt_ids": list(prompt_ids),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "ignore_eos": params.ignore_eos,
        "seed": seed if params.seed is None else params.seed,
    }


def decode_result(content: Mapping[str, Any], num_prompt: int) -> PeerResult:
    """Decode and check a worker's reply. Raises ValueError, TypeError or KeyError if it is invalid."""
    token_ids = content["token_ids"]
    if not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
        raise ValueError("token_ids is not a list of token ids")
    first = content.get("first_token_seconds")
    peak = content.get("peak_bytes")
    result = PeerResult(
        token_ids=token_ids,
        first_token_seconds=None if first is None else float(first),
        total_seconds=float(content["total_seconds"]),
        finish_reason=str(content["finish_reason"]),
        stats=_convert_counts(content.get("counts"), num_prompt, len(token_ids)),
        peak_bytes=None if peak is None else int(peak),
        first_tokens=int(content.get("first_tokens", 1)),
    )
    if not 0.0 <= (result.first_token_seconds or 0.0) <= result.total_seconds:
        raise ValueError("the first token is later than the last")
    return result


def _convert_counts(counts: Mapping[str, Any] | None, num_prompt: int, num_output: int) -> dict[str, Any] | None:
    """Convert counts to the names of RequestStats, plus accepted_nodes; unreported counts are omitted."""
    if not counts or not counts.get("cycles"):
        return None
    cycles = int(counts["cycles"])
    stats: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "cycles": cycles,
        "acceptance_length": round(num_output / cycles, 4),
    }
    if counts.get("drafted") is not None:
        stats["drafted_nodes"] = int(counts["drafted"])
        stats["mean_tree_size"] = round((stats["drafted_nodes"] + cycles) / cycles, 4)
    if counts.get("accepted") is not None:
        stats["accepted_nodes"] = int(counts["accepted"])
    if counts.get("tried_by_depth") and counts.get("accepted_by_depth") is not None:
        stats["tried_by_depth"] = list(map(int, counts["tried_by_depth"]))
        stats["accepted_by_depth"] = list(map(int, counts["accepted_by_depth"]))
    return stats
