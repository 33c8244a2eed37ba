"""As batches.py, on a simulated GPU: texts, drafts and the host's work are real, passes only take time.

    python benchmarks/simulated_batches.py --data PROMPTS --tasks humaneval,gsm8k --batches 8,32 plain goose blend
    python benchmarks/simulated_batches.py --pass-ms 0.55 --row-ms 0.003 --host 0.6 --data PROMPTS ... plain blend

The model runs on this CPU, but its time does not count. A pass takes ``--pass-ms`` and ``--row-ms`` more for each
position, from its launch or the end of the pass before, while the host goes on; by default about those of a model with
1.5 billion parameters on an H200. Time is simulated: the CPU time of the host, times ``--host``, and what it waits for
passes. So other processes hardly matter. All other options are those of batches.py. ``simulated_gpu.py`` does the same
without a model.
"""

from __future__ import annotations

from simulated import NOW, SIZES, Gpu  # before anything that reads the clock

# isort: split
import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import batches
from draftwood.engine import engine
from draftwood.sizing import live
from draftwood.targets import ForwardOutput, PendingPass, Segment, TopRows
from draftwood.targets.load import Loaded
from draftwood.targets.native.cuda.inputs import Inputs, new_moves
from draftwood.targets.native.decoder import pack


class SimulatedGpu:
    """Makes a target on the CPU behave like one on a GPU."""

    def __init__(self, target: Any, args: argparse.Namespace) -> None:
        self._target, self._decoder, self._gpu = target, target._decoder, Gpu(args.pass_ms, args.row_ms)
        self._inputs: dict[tuple[int, int], Inputs] = {}
        self._decoder.move_rows = NOW.leave_out(self._decoder.move_rows)
        self._run = NOW.leave_out(self._answer)
        target.info = replace(target.info, pass_sizes=SIZES, backend="simulated")
        target.num_lanes = 2
        target.launch, target.forward = self.launch, lambda segments: self.launch(segments).wait()
        target.ready_sizes = lambda _: SIZES

    def launch(self, segments: Sequence[Segment], lane: int = 0) -> PendingPass:
        batch = pack(segments, self._target.cache)
        rows, sequences = -(-len(batch.token_ids) // 64) * 64, -(-len(segments) // 64) * 64
        if (rows, sequences) not in self._inputs:
            self._inputs[rows, sequences] = Inputs(rows, rows + sequences, 16, torch.device("cpu"))
        self._inputs[rows, sequences].fill(batch, new_moves())
        return self._gpu.start(self._run(batch), len(batch.token_ids))

    def _answer(self, batch: Any) -> ForwardOutput:
        output: ForwardOutput = self._decoder.forward(batch, ())
        top = output.top and TopRows(output.top.ids.copy(), output.top.logits.copy(), output.top.log_total.copy())
        return output._replace(top=top, greedy_ids=output.greedy_ids.clone(), logits=output.logits.clone())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pass-ms", type=float, default=1.25)
    parser.add_argument("--row-ms", type=float, default=0.008)
    parser.add_argument("--host", type=float, default=1.0, help="time of the host, relative to the CPU time here")
    args, rest = parser.parse_known_args(argv)
    NOW.host = args.host
    load_target, set_threads = batches.load_target, engine.set_threads

    def load(*given: Any, **options: Any) -> Loaded:
        loaded = load_target(*given, **options)
        SimulatedGpu(loaded.target, args)
        return loaded

    batches.load_target = load  # type: ignore[assignment]
    engine.set_threads = lambda _: set_threads(1)  # type: ignore[assignment]  # the clock sees one thread
    live.load_profile, live.save_profile = lambda _: None, lambda *_: Path()  # costs that are only simulated
    return batches.main(rest)


if __name__ == "__main__":
    sys.exit(main())
