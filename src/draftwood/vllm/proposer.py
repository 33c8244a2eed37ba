"""The drafter class that vLLM loads.

    vllm serve MODEL --speculative-config \\
        '{"method": "custom_class", "model": "draftwood.vllm.Proposer", "num_speculative_tokens": 16}'
"""

import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.sources import Datastore
from draftwood.vllm.chains import Follower
from draftwood.vllm.memory import Memory
from draftwood.vllm.options import VllmOptions, read_options
from draftwood.vllm.pace import Pace
from draftwood.vllm.requests import Requests, Row


class Step(NamedTuple):
    """What the last call returned."""

    ended: float
    rows: int
    guesses: int
    expected: float  # accepted guesses


class Proposer:
    """Guesses a chain of tokens for each running request: from its own text, and from other answers."""

    def __init__(self, vllm_config: Any) -> None:
        options = read_options()
        self._max_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._fixed_chance = None if options.min_chance == "auto" else float(options.min_chance)
        memory = open_memory(options, int(vllm_config.model_config.get_vocab_size()))
        self._follower = Follower([memory] if memory is not None else [])
        self._requests = Requests(self._follower, memory)
        self._pace = Pace()
        self._last: Step | None = None

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],  # [rows]
        token_ids_cpu: npt.NDArray[np.int32],  # [rows, longest]
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The chain for each row of the batch; empty for rows that are still in their prompt."""
        began = time.perf_counter()
        rows = self._requests.read(
            (number, len(sampled), token_ids_cpu[number, : num_tokens_no_spec[number]])
            for number, sampled in enumerate(sampled_token_ids)
            if sampled
        )
        self._measure(began, sampled_token_ids, rows)
        least = self._pace.min_chance if self._fixed_chance is None else self._fixed_chance
        chains = self._follower.follow(
            [row.request.text for row in rows], [row.added for row in rows], self._max_tokens, least
        )
        result: list[list[int]] = [[] for _ in sampled_token_ids]
        expected = 0.0  # accepted guesses
        for row, chain in zip(rows, chains, strict=True):
            room = max(self._max_length - row.request.length - 1, 0)
            result[row.number] = chain.tokens[:room]
            expected += sum(chain.values[:room])
        guesses = sum(map(len, result))
        if guesses and self._fixed_chance is None and not self._pace.pays(len(rows), guesses, expected):
            result, guesses, expected = [[] for _ in sampled_token_ids], 0, 0.0
        self._last = Step(time.perf_counter(), len(rows), guesses, expected)
        return result

    def load_model(self, *args: object, **kwargs: object) -> None:
        """There is no model to load."""

    def _measure(self, began: float, sampled: list[list[int]], rows: list[Row]) -> None:
        """Take the time since the last call, if nothing but its rows has run meanwhile."""
        tokens = sum(map(len, sampled))
        if self._last is not None and all(sampled):
            ended, num_rows, guesses, expected = self._last
            if num_rows == len(rows) and all(row.added.size == len(sampled[row.number]) for row in rows):
                self._pace.note(num_rows, guesses, expected, began - ended, tokens)


def open_memory(options: VllmOptions, vocab_size: int) -> Memory | None:
    if not options.memory_tokens:
        return None
    memory = Memory(options.memory_tokens)
    if options.datastore is not None:
        store = Datastore.open(options.datastore, vocab_size=vocab_size)
        memory.add(store.tokens[-options.memory_tokens :].tolist())
    return memory
