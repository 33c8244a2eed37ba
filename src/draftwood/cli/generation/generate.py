"""``draftwood generate``: answer one prompt."""

import argparse
import json
from typing import Any

from draftwood.cli.console import (
    Answer,
    Screen,
    budget_text,
    comparison_line,
    generate_answers,
    load_llm,
    logprob_lines,
    read_prompt,
    run_info,
    show_summary,
)
from draftwood.cli.options import sampling_params
from draftwood.compare import Comparison, TimedRun, check_params, compare, warm_up
from draftwood.config import SamplingParams, Structured
from draftwood.errors import OptionError
from draftwood.llm import LLM
from draftwood.prompts import prompt_ids, read_text

INTERRUPTED = 130  # exit code after Ctrl-C


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, structured=_structured(args))
    _check_options(args, params)
    prompt = read_prompt(args.prompt, args.file)
    prediction = None if args.prediction is None else read_text(args.prediction)
    screen = Screen(args.color, quiet=args.quiet)
    with load_llm(args, screen, max_batch=params.n) as llm:
        ids = prompt_ids(llm.tokenizer, prompt, raw=args.raw, system=args.system)
        if args.compare:
            warm_up(llm, ids, params)
        streams = not args.json and params.n == 1 and (screen.out.is_terminal if args.stream is None else args.stream)
        answers = generate_answers(llm, ids, params, screen if streams else None, prediction)
        interrupted = any(answer.finish_reason == "cancelled" for answer in answers)
        comparison = None
        if args.compare and not interrupted:
            first = TimedRun(answers[0].token_ids, answers[0].stats)
            comparison = compare(llm, ids, params, first, screen.progress, prediction=prediction)
            answers[0].stats = comparison.speculative.stats  # the figures of one run, beside those it is compared with
        if args.json:
            print(json.dumps(_as_dict(args, llm, answers, comparison), ensure_ascii=False))
        else:
            for answer in answers:
                _show(args, screen, llm, answer, streamed=streams)
            if comparison is not None:
                screen.note(comparison_line(comparison))
    return INTERRUPTED if interrupted else 0


def _structured(args: argparse.Namespace) -> Structured | None:
    if args.json_schema is not None:
        return Structured(json_schema=read_text(args.json_schema))
    if args.grammar is not None:
        return Structured(grammar=read_text(args.grammar))
    return None if args.regex is None else Structured(regex=args.regex)


def _check_options(args: argparse.Namespace, params: SamplingParams) -> None:
    """Reject conflicting options before the model is loaded."""
    if args.stream and (args.json or params.n > 1):
        other = "--json" if args.json else f"--n {params.n}"
        raise OptionError("--stream needs a single answer in plain text", got=f"--stream {other}")
    if args.compare:
        check_params(params)
        if args.quiet:
            raise OptionError("--quiet hides the comparison", got="--quiet --compare", next_step="Use one of them.")


def _as_dict(
    args: argparse.Namespace, llm: LLM, answers: list[Answer], comparison: Comparison | None
) -> dict[str, Any]:
    """Return the fields of a single answer, or a list of answers under ``samples``."""
    content = answers[0].as_dict() if len(answers) == 1 else {"samples": [answer.as_dict() for answer in answers]}
    compared = {} if comparison is None else {"compare": comparison.as_dict()}
    return {**content, **compared, **run_info(args, llm)}


def _show(args: argparse.Namespace, screen: Screen, llm: LLM, answer: Answer, *, streamed: bool) -> None:
    if not streamed:
        answer.show(screen)
    screen.out.write("\n")
    show_summary(screen, answer, *([budget_text(args), llm.drafter] if args.stats else []), full=args.stats)
    for line in logprob_lines(llm, answer.logprobs):
        screen.note(line)
