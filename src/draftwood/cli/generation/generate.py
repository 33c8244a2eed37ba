"""``draftwood generate``: one prompt, one answer."""

from __future__ import annotations

import argparse
import json
from typing import Any

from draftwood.cli.console import (
    Answer,
    Screen,
    all_answers,
    budget_text,
    closing,
    comparison_line,
    facts,
    load_llm,
    logprob_lines,
    read_prompt,
)
from draftwood.cli.options import sampling_params
from draftwood.compare import Comparison, TimedRun, check_params, compare, warm_up
from draftwood.config import SamplingParams
from draftwood.errors import OptionError
from draftwood.llm import LLM
from draftwood.prompts import prompt_ids, read_text


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    _check(args, params)
    prompt = read_prompt(args.prompt, args.file)
    prediction = _prediction(args.prediction)
    screen = Screen(args.color)
    with load_llm(args, screen, max_batch=params.n) as llm:
        ids = prompt_ids(llm.tokenizer, prompt, raw=args.raw)
        if args.compare:
            warm_up(llm, ids, params)
        streams = not args.json and params.n == 1 and (screen.out.is_terminal if args.stream is None else args.stream)
        answers = all_answers(llm, ids, params, screen if streams else None, prediction)
        first = TimedRun(answers[0].token_ids, answers[0].stats)
        comparison = None
        if args.compare:
            comparison = compare(llm, ids, params, first, screen.progress, prediction=prediction)
        if args.json:
            print(json.dumps(_as_dict(llm, answers, comparison), ensure_ascii=False))
        else:
            for answer in answers:
                _show(screen, llm, answer, budget_text(args, llm), streamed=streams)
            if comparison is not None:
                screen.note(comparison_line(comparison))
    return 0


def _prediction(path: str | None) -> str | None:
    if path is None:
        return None

    return read_text(path)


def _check(args: argparse.Namespace, params: SamplingParams) -> None:
    """What makes no sense together, before a model is loaded for it."""
    if args.stream and (args.json or params.n > 1):
        other = "--json" if args.json else f"--n {params.n}"
        raise OptionError("Only a single answer in plain text can be streamed", got=f"--stream {other}")
    if args.compare:
        check_params(params)


def _as_dict(llm: LLM, answers: list[Answer], comparison: Comparison | None) -> dict[str, Any]:
    """One answer's fields as they are; several under ``samples``."""
    content = answers[0].as_dict() if len(answers) == 1 else {"samples": [answer.as_dict() for answer in answers]}
    compared = {} if comparison is None else {"compare": comparison.as_dict()}
    return {**content, **compared, **facts(llm)}


def _show(screen: Screen, llm: LLM, answer: Answer, budget: str, *, streamed: bool) -> None:
    if not streamed:
        answer.show(screen)
    screen.out.write("\n")
    closing(screen, answer, budget, llm.drafter)
    for line in logprob_lines(llm, answer.logprobs):
        screen.note(line)
