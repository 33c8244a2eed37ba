"""What is said to a peer and what it answers, in the terms of our own engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.config import SamplingParams
from draftwood.errors import CapabilityError


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerModel:
    """The model that peers load, and how."""

    folder: Path  # in Hugging Face layout
    gguf: Path | None = None  # for llama.cpp
    dtype: str = "float32"  # float32, bfloat16 or float16; a peer's option dtype goes before it
    device: str = "cpu"
    threads: int | None = None  # None: as many as torch takes here, which is what we take
    max_context: int = 4096  # positions of prompt and output together
    assistant: Path | None = None  # a folder; None: the peer's option model is looked up
    seed: int = 0  # for requests that have none


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerResult:
    """One finished request."""

    token_ids: list[int]
    first_token_seconds: float | None
    total_seconds: float
    finish_reason: str  # stop or length
    stats: dict[str, Any] | None = None  # names as in RequestStats.as_dict(), as far as the engine tells
    peak_bytes: int | None = None  # of memory, while it ran
    first_tokens: int = 1  # that came with the first: more where the first pass had guesses

    @property
    def decode_tokens(self) -> int:
        """Tokens that decode_seconds were spent on."""
        return len(self.token_ids) - (0 if self.first_token_seconds is None else self.first_tokens)

    @property
    def decode_seconds(self) -> float:
        return self.total_seconds - (self.first_token_seconds or 0.0)


def encode_request(prompt_ids: list[int], params: SamplingParams, seed: int) -> dict[str, Any]:
    """The request as a worker reads it. Refuses what not every engine means the same by."""
    if params.has_penalties or params.stop or params.stop_token_ids or params.logprobs is not None or params.n != 1:
        raise CapabilityError(
            "Peers know temperature, top_p, top_k, min_p, max_tokens, seed and ignore_eos only",
            got=params,
            next_step="Leave penalties, stops, logprobs and several samples out, or leave peers out.",
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
    """A worker's answer, checked. Raises ValueError, TypeError or KeyError for one that makes no sense."""
    token_ids = content["token_ids"]
    if not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
        raise ValueError("token_ids is no list of token ids")
    first = content.get("first_token_seconds")
    peak = content.get("peak_bytes")
    answer = PeerResult(
        token_ids=token_ids,
        first_token_seconds=None if first is None else float(first),
        total_seconds=float(content["total_seconds"]),
        finish_reason=str(content["finish_reason"]),
        stats=_stats(content.get("counts"), num_prompt, len(token_ids)),
        peak_bytes=None if peak is None else int(peak),
        first_tokens=int(content.get("first_tokens", 1)),
    )
    if not 0.0 <= (answer.first_token_seconds or 0.0) <= answer.total_seconds:
        raise ValueError("the first token came after the last")
    return answer


def _stats(counts: Mapping[str, Any] | None, num_prompt: int, num_output: int) -> dict[str, Any] | None:
    """Counts under the names of RequestStats, and accepted_nodes; what the engine does not tell is left out."""
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
