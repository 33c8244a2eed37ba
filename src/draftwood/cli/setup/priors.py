"""``draftwood tune --priors``: measure what `blend` believes about its sources at first."""

import argparse
from functools import partial
from pathlib import Path

from draftwood.cli.console import Screen, show
from draftwood.cli.measuring import measured_prompts
from draftwood.cli.options import drafter_options, model_options, sampling_params
from draftwood.drafters import check_drafter
from draftwood.errors import OptionError
from draftwood.growth import priors_path, save_priors
from draftwood.llm import LLM
from draftwood.prompts import prompt_ids
from draftwood.targets import load_target
from draftwood.tune import measure_priors

BUDGET = 40  # nodes per tree: alternatives are seen, and passes stay quick


def run(args: argparse.Namespace) -> int:
    screen = Screen(args.color)
    params = sampling_params(args)
    options = drafter_options(args.drafter_option)
    check_drafter("blend", options)
    output = Path(args.priors).expanduser() if args.priors else None
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise OptionError("Invalid output file", got=output, allowed="a file in an existing folder")

    prompts = measured_prompts(args.prompts, args.limit)
    loaded = load_target(model_options(args, max_batch=1), screen.progress)
    measured = measure_priors(
        partial(LLM.from_target, loaded.target, loaded.codec, budget=BUDGET, max_batch=1),
        [prompt_ids(loaded.codec, prompt) for prompt in prompts],
        params,
        drafter_options=options,
        progress=screen.progress,
    )
    path = output or priors_path(loaded.target.info)
    save_priors(measured.priors, path)
    about = {"guesses": measured.num_guesses, "log_loss": measured.loss, "log_loss_before": measured.loss_before}
    line = (
        f"{len(prompts)} prompts, {measured.num_guesses} guesses; log loss {measured.loss:.4f} on prompts that were "
        f"left out, {measured.loss_before:.4f} with the priors before"
    )
    return show(args, {"priors": path, "prompts": len(prompts), **about}, [line, f"written to {path}"])
