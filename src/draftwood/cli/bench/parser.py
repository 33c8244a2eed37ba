"""Parsers of the commands in this folder. Light to import: the commands themselves are loaded when they run."""

from __future__ import annotations

import argparse
from typing import Any

from draftwood.bench import split_methods
from draftwood.cli.bench.options import DEFAULTS, add_prompt_settings, add_setting, budgets, numbers
from draftwood.cli.options import Subparsers, add_command, add_model_options

_BENCH_DETAILS = """\
A method is a drafter name (see: draftwood drafters), followed by a colon and
its options, which may include memory and budget. Keep plain in the list:
speed-ups are relative to it, and outputs are compared with its outputs.

Prompts are the bundled ones (tasks chat, code, edit, math, summary), those of
a folder with one file per task, published (mt_bench, humaneval, mbpp, gsm8k,
classeval, alpaca, cnn_dm, aime24, livecodebench, spec_bench) or your own, or
those of the hub. Recipes use tasks of papers: they need --data.

Results in the --out folder: run.json, requests.jsonl, report.md, report.html
and summary.json. The same command with the same --out resumes an interrupted
run. The exit code is 1 if an output differs from plain decoding or a request
failed."""


_BENCH_EXAMPLES = (
    "draftwood bench --limit 2",
    "draftwood bench --drafters plain,pld,goose:bypass=copied,goose --budget 60 --data prompts --limit 5",
    "draftwood bench --peers transformers,llamacpp --out runs/peers",
    "draftwood bench --drafters plain,stand,recycling --temperature 0.6 --trajectories 1,4,8,16",
    "draftwood bench --recipe goose-table1 --data hub --limit 3 --max-tokens 160 --out runs/table1",
    "draftwood bench report runs/a runs/b --out merged",
    "draftwood bench diff runs/before runs/after",
)


def register(commands: Subparsers[Any]) -> None:
    summary = "Benchmark methods on the same prompts, and write a report"
    parser = add_command(commands, "bench", "bench.command:run", summary, *_BENCH_EXAMPLES, details=_BENCH_DETAILS)
    what = parser.add_argument_group("measurement")
    what.add_argument("--recipe", metavar="NAME", help="table or figure of a paper, see: draftwood bench recipes")
    what.add_argument(
        "--param", metavar="KEY=VALUE", action="append", default=[], help="parameter of a recipe; repeatable"
    )
    add_setting(what, "drafters", split_methods, "LIST", "comma-separated methods")
    add_setting(what, "peers", split_methods, "LIST", "other engines, see: draftwood bench peers")
    add_prompt_settings(what)
    add_setting(what, "repeats", int, "N", "runs of each method per prompt")
    add_setting(what, "trajectories", numbers, "LIST", "samples per prompt, as in 1,4,8,16")
    add_setting(what, "budget", budgets, "LIST", "positions per pass; several values give a curve (8,16,60)")
    add_setting(what, "memory", str, "SCOPE", "scope of what drafters learn: request, prompt or process")
    add_setting(what, "batch", int, "N", "prompts per batch")
    what.add_argument(
        "--raw", action="store_true", default=None, help="continue the prompt as text, without a chat template"
    )
    add_model_options(parser)
    sampling = parser.add_argument_group("sampling")
    add_setting(sampling, "max_tokens", int, "N", "maximum number of output tokens")
    add_setting(sampling, "temperature", float, "T", "0 is greedy, higher is more random")
    add_setting(sampling, "top_p", float, "P", "nucleus sampling: smallest set of top tokens with this probability")
    add_setting(sampling, "top_k", int, "K", "sample from the K most likely tokens, 0: all")
    add_setting(sampling, "seed", int, "N", "random seed")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="always generate --max-tokens tokens")
    parser.add_argument("--out", metavar="DIR", help="results folder (default: a new folder bench-DATE-TIME)")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    more = parser.add_subparsers(title="commands", metavar="COMMAND", required=False)
    for register in (register_results, register_recipes, register_peers, register_record, register_replay):
        register(more)


_RESULTS_DIFF_DETAILS = """\
Compares the prompts that both runs have. A change is significant if its 99%
interval excludes 1, it is more than 1%, and there are at least 5 prompts.
Times cannot be compared if the machine differs or other processes used it.
Speed-ups over plain are comparable between days, tokens per second are not.

Methods with the same label in both runs are compared. --pair compares methods
with different labels, such as two heads, or two methods of the same run."""


def register_results(commands: Subparsers[Any]) -> None:
    report = add_command(
        commands,
        "report",
        "bench.results:run_report",
        "Write the report of one or more runs, finished or not",
        "draftwood bench report runs/a",
        "draftwood bench report runs/a runs/b --out merged",
        details="Runs with the same model, machine and sampling are pooled; others get a chapter each.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a folder of runs")
    report.add_argument("--out", metavar="DIR", help="folder of the report (default: the run folder, if there is one)")
    report.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    diff = add_command(
        commands,
        "diff",
        "bench.results:run_diff",
        "Compare two runs: what got faster or slower, and whether it is significant",
        "draftwood bench diff runs/before runs/after",
        "draftwood bench diff runs/a runs/b --pair eagle2:head=r/hass/head,budget=60 eagle2:head=r/talf/head,budget=60",
        "draftwood bench diff runs/a runs/a --pair hass talf --pair pld talf",
        details=_RESULTS_DIFF_DETAILS,
    )
    diff.add_argument("before", metavar="BEFORE", help="a run folder")
    diff.add_argument("after", metavar="AFTER", help="another run folder, or the same to compare two of its methods")
    diff.add_argument(
        "--pair",
        nargs=2,
        metavar=("OLD", "NEW"),
        action="append",
        default=[],
        help="compare only method OLD of BEFORE with method NEW of AFTER: labels, their beginnings, or unique parts; "
        "repeatable",
    )
    diff.add_argument("--json", action="store_true", help="print one JSON object")


def register_recipes(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "recipes",
        "bench.recipes:run",
        "List the recipes (tables and figures of papers), or show one",
        "draftwood bench recipes",
        "draftwood bench recipes goose-table1",
        "draftwood bench --recipe goose-table1 --data hub --limit 3",
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="NAME", help="show this recipe; a name or the path of a .toml file"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def register_peers(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "peers",
        "bench.peers:run",
        "List other engines and whether they are installed, or install one",
        "draftwood bench peers",
        "draftwood bench peers --install llamacpp",
        "draftwood bench --peers transformers:lookup,tokens=10 --limit 2",
        details="Each runs in its own Python: one created by --install, one set by DRAFTWOOD_PEER_ENGINE\n"
        "(DRAFTWOOD_PEER_VLLM=/path/to/python), or the current one if it has the engine.",
    )
    parser.add_argument("--install", metavar="ENGINE", help="install this engine into its own environment")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


BUDGET, DRAFTERS, WIDTH = 60, "goose,recycling", 16


_REPLAY_RECORD_DETAILS = (
    "Record several drafters: a replay of another drafter then finds more of its draft tokens recorded."
)


_REPLAY_REPLAY_DETAILS = """\
No model runs. A recorded method is reproduced exactly. 'known' is the share of rejected nodes with
recorded rows: if it is small, tau is too low; record more drafters or add --estimate.
Long contexts are synthetic: the texts of other prompts are put before each prompt."""


def register_record(commands: Subparsers[Any]) -> None:
    lines = (
        "draftwood bench record --limit 2 --out own.recording",
        "draftwood bench record --drafters goose,recycling --tasks humaneval --data prompts --out code.recording",
    )
    parser = add_command(
        commands, "record", "bench.replay:run_record", "Record runs for replay", *lines, details=_REPLAY_RECORD_DETAILS
    )
    add = _add_methods(parser)
    add_prompt_settings(parser)
    add("--samples", type=int, metavar="N", default=1, help="samples per prompt (default: 1)")
    add_setting(parser, "batch", int, "N", "samples that run at a time, with --drafters plain", default=1)
    for name, kind, text in (
        ("max_tokens", int, "maximum number of output tokens"),
        ("temperature", float, "0 is greedy"),
        ("seed", int, "random seed"),
    ):
        add_setting(parser, name, kind, "N", text, default=DEFAULTS[name])
    add("--width", type=int, metavar="K", default=WIDTH, help=f"top tokens stored per row of logits (default: {WIDTH})")
    add("--out", metavar="FILE", required=True, help="output file, as in code.recording")
    add("--force", action="store_true", help="replace an existing file")
    add("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)


def register_replay(commands: Subparsers[Any]) -> None:
    line = "draftwood bench replay code.recording --drafters goose,recycling"
    more = (f"{line} --budget 8,16,32,60", f"{line} --context 1024,4096,16384,32768", f"{line} --trajectories 1,4,16")
    add = _add_methods(
        add_command(
            commands,
            "replay",
            "bench.replay:run_replay",
            "Replay drafters on recorded texts",
            *more,
            details=_REPLAY_REPLAY_DETAILS,
        )
    )
    add("recording", metavar="FILE", help="a file written by bench record")
    add("--context", type=numbers, metavar="LIST", default=[], help="study: context lengths in tokens")
    add("--trajectories", type=numbers, metavar="LIST", default=[], help="study: numbers of samples per prompt")
    add("--estimate", action="store_true", help="fill unknown rows from the nearest similar context")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", metavar="FILE", help="write the JSON object to a file")
    add("--force", action="store_true", help="replace an existing file")


def _add_methods(parser: argparse.ArgumentParser) -> Any:
    add = parser.add_argument
    add("--drafters", type=split_methods, metavar="LIST", default=DRAFTERS, help=f"methods (default: {DRAFTERS})")
    add("--budget", type=budgets, metavar="LIST", default=str(BUDGET), help=f"positions per pass (default: {BUDGET})")
    add_setting(parser, "memory", str, "SCOPE", "scope of what drafters learn", default=DEFAULTS["memory"])
    return add
