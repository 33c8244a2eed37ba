"""The plan of a comparison of heads: texts, training runs, and the commands of each stage."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from compare_steps import Step
from compare_tables import Entry
from draftwood.bench.tasks.load import load_tasks
from draftwood.errors import OptionError
from draftwood.heads import find_head
from draftwood.train.config import load_config
from draftwood.train.data.manifest import read_manifest
from draftwood.train.loop.logs import read_log
from draftwood.train.loop.setup import check_method

STAGES = ("data", "train", "bench", "ranks", "table")
LENGTHS = ("optim.minutes", "optim.steps", "optim.epochs")  # one of them sets the length of a run
START = "start"  # the head that all other runs start from
CACHE_PER_ANSWER = 1024  # tokens
USUAL = {  # bench and ranks replace validation
    "data.max_length": "768",
    "data.held_out": "256",
    "validate.prompts": "0",
    "validate.positions": "0",
    "run.max_tokens": "16384",
    "run.log_every": "50",
    "run.tensorboard": "off",
}


class Texts(NamedTuple):
    """A folder of texts: prompts and batch size."""

    files: tuple[str, ...] = ()  # empty: the model generates the prompts
    batch: int = 256
    more: tuple[str, ...] = ()


TEXTS = {  # in the order of training, which affects what is held out
    "code": Texts(("mbpp_train.jsonl", "vicuna.jsonl")),
    "code_drawn": Texts(
        ("mbpp_train.jsonl",) * 4 + ("vicuna.jsonl",) * 4, more=("--temperature", "0.7", "--seed", "6")
    ),
    "dolly": Texts(("dolly.jsonl",), 128),
    "gsm": Texts(("gsm8k_train.jsonl",), 128),
    **{f"self_{seed}": Texts(more=("--seed", str(seed))) for seed in (11, 12, 13, 14)},
}


class Training(NamedTuple):
    method: str
    settings: dict[str, str]
    as_many_steps_as: str = ""  # instead of the common length


class Comparison(NamedTuple):
    drafter: str
    head: str  # initial head; empty: it is trained
    texts: tuple[str, ...]
    minutes: str
    runs: dict[str, Training]
    pairs: tuple[tuple[str, str], ...]  # compared prompt by prompt


FROM_EAGLE = {"optim.lr": "3e-4", "optim.warmup_steps": "20"}
FROM_SHIPPED = {"optim.lr": "1e-4", "optim.warmup_steps": "20"}
NEW_EAGLE = {
    "head.kind": "eagle",
    "head.changes.intermediate_size": "2560",
    "optim.lr": "1e-3",
    "optim.warmup_steps": "40",
    "optim.steps": "1500",
}
COMPARISONS = {
    "talf": Comparison(
        drafter="eagle2",
        head="",
        texts=("code", "dolly", "self_11"),
        minutes="1.4",
        runs={
            START: Training("eagle", NEW_EAGLE),
            "eagle": Training("eagle", FROM_EAGLE),
            "hass": Training("hass", FROM_EAGLE),
            "talf": Training("talf", FROM_EAGLE | {"method.roots": "64"}),
        },
        pairs=(("eagle", START), ("hass", "eagle"), ("talf", "hass")),
    ),
    "gto": Comparison(
        drafter="eagle3",
        head="smollm2-eagle3",
        texts=tuple(TEXTS),
        minutes="1.25",
        runs={
            "more": Training("eagle3", FROM_SHIPPED | {"method.steps": "5"}),
            "gto": Training("gto", FROM_SHIPPED | {"method.token.steps": "5", "method.groups": "4"}),
            "as_many": Training("eagle3", FROM_SHIPPED | {"method.steps": "5"}, as_many_steps_as="gto"),
        },
        pairs=(("more", START), ("gto", "more"), ("gto", "as_many")),
    ),
}


class Plan:
    """The commands of a comparison, by stage."""

    def __init__(self, args: argparse.Namespace) -> None:
        chosen = COMPARISONS[args.comparison]
        self._args, self._chosen = args, chosen
        self.given_head = args.head or chosen.head
        self.out: Path = args.out / args.comparison
        self.logs: Path = args.out / "logs"
        self._made = {} if args.texts else {name: args.out / "texts" / name for name in chosen.texts}
        self.folders = args.texts or list(self._made.values())
        asked = zip(LENGTHS, (args.minutes, args.steps, args.epochs), strict=True)
        self._length = next(((place, str(length)) for place, length in asked if length), (LENGTHS[0], chosen.minutes))
        equal_steps = self._length[0] != LENGTHS[0]  # then all runs have equal steps
        self.runs = {
            name: run
            for name, run in chosen.runs.items()
            if not (name == START and self.given_head) and not (run.as_many_steps_as and equal_steps)
        }
        self.pairs = list(chosen.pairs)
        for text in args.also:
            name, _, like = text.partition("=")
            if like not in self.runs or not re.fullmatch(r"\w+", name) or name in (START, *self.runs):
                allowed = f"NAME=RUN with a new name and one of {', '.join(self.runs)}"
                raise OptionError("--also makes another run like one there is", got=text, allowed=allowed)
            self.runs[name] = self.runs[like]
            self.pairs.append((name, like))
        self.heads = list(dict.fromkeys([START, *self.runs]))
        self.pairs = [pair for pair in self.pairs if set(pair) <= set(self.heads)]
        self._changes = [self._change(text) for text in args.set]

    def _change(self, text: str) -> tuple[str, str, str]:
        """Parse into run (empty: all), key and value."""
        place, equals, value = text.partition("=")
        name, colon, key = place.rpartition(":")
        if not equals or (colon and name not in self.runs):
            allowed = f"[NAME:]SECTION.KEY=VALUE with NAME one of {', '.join(self.runs)}"
            raise OptionError("--set changes a setting of the training", got=text, allowed=allowed)
        return name, key, value

    def settings(self, name: str) -> dict[str, str]:
        """Of a training run; of the head that is given as well, for what it is measured on."""
        run = self.runs.get(name, Training("", {}))
        found = {"model.name": self._args.model, "data.folder": json.dumps([str(folder) for folder in self.folders])}
        found |= {**USUAL, **run.settings}
        if name != START:
            found["head.start"] = self.head(START)
            place, length = self._length
            if run.as_many_steps_as:
                place, length = LENGTHS[1], self._steps_of(run.as_many_steps_as)
            found[place] = length
        for own, key, value in self._changes:
            if own in ("", name):
                if key in LENGTHS:
                    found = {other: kept for other, kept in found.items() if other not in LENGTHS}
                found[key] = value
        return found

    def _steps_of(self, name: str) -> str:
        trained = [line for line in read_log(self.folder(name) / "log.jsonl") if line["kind"] == "train"]
        return str(len(trained)) if (self.folder(name) / "head").exists() else f"STEPS_OF_{name}"

    def folder(self, name: str) -> Path:
        return self.out / "runs" / name

    def head(self, name: str) -> str:
        return self.given_head if name == START and self.given_head else str(self.folder(name) / "head")

    def bench(self, name: str, temperature: str) -> Path:
        return self.out / "bench" / f"{name}_{temperature}"

    def ranks(self, name: str) -> Path:
        return self.out / "ranks" / f"{name}.json"

    def data_steps(self) -> Iterator[Step]:
        args = self._args
        for name, folder in self._made.items():
            texts = TEXTS[name]
            batch = args.text_batch or texts.batch
            words = [str(args.prompts / file) for file in texts.files] or ["--self", str(args.self)]
            words += ["--limit", str(args.text_limit)] if texts.files and args.text_limit else []
            words += [*texts.more, "--max-tokens", str(args.text_tokens), "--batch", str(batch)]
            words += ["--cache-tokens", str(CACHE_PER_ANSWER * batch), "--model", args.model, "--out", str(folder)]
            yield Step(f"data_{name}", ("train", "data", *words), folder / "manifest.json")

    def train_steps(self) -> Iterator[Step]:
        for name, run in self.runs.items():
            folder = self.folder(name)
            settings = [f"{key}={value}" for key, value in self.settings(name).items()]
            words = ("train", "head", "--method", run.method, *settings, f"run.out={folder}")
            again = ("--resume",) if (folder / "config.toml").exists() else ()
            yield Step(self._named("train", name), words, folder / "head" / "config.json", again=again)

    def bench_steps(self) -> Iterator[Step]:
        args = self._args
        for name in self.heads:
            drafter = f"{self._chosen.drafter}:head={self.head(name)},growth="
            drafters = ",".join(["plain", *(f"{drafter}{growth},budget={args.budget}" for growth in args.growths)])
            for temperature in args.temperatures:
                folder = self.bench(name, temperature)
                words = ["--model", args.model, "--data", args.data, "--tasks", ",".join(args.tasks)]
                words += ["--limit", str(args.bench_limit), "--max-tokens", str(args.bench_tokens)]
                words += ["--batch", str(args.bench_batch), "--temperature", temperature, "--drafters", drafters]
                # 1: a request failed or an output differed, which the table shows.
                step = Step(self._named("bench", f"{name}_{temperature}"), ("bench", *words, "--out", str(folder)))
                yield step._replace(result=folder / "summary.json", codes=(0, 1))

    def rank_steps(self) -> Iterator[Step]:
        for name in self.heads:
            own = self.settings(name)
            words = ["inspect", "head", self.head(name), "--model", self._args.model]
            words += ["--texts", *map(str, self.folders), "--limit", own["data.held_out"], "--prompts", "0"]
            words += ["--max-length", own["data.max_length"], "--seed", own.get("run.seed", "0"), "--json"]
            yield Step(self._named("ranks", name), tuple(words), self.ranks(name), prints_result=True)

    def stages(self) -> dict[str, Callable[[], Iterator[Step]]]:
        """Those that were asked for and take commands, in their order. Commands may depend on what came before."""
        made = (self.data_steps, self.train_steps, self.bench_steps, self.rank_steps)
        return {name: steps for name, steps in zip(STAGES, made, strict=False) if name in self._args.stages}

    def entries(self) -> list[Entry]:
        """The heads in the tables."""
        by_temperature = {name: {t: self.bench(name, t) for t in self._args.temperatures} for name in self.heads}
        return [Entry(name, self.folder(name), by_temperature[name], self.ranks(name)) for name in self.heads]

    def _named(self, stage: str, name: str) -> str:
        return f"{self._args.comparison}_{stage}_{name}"

    def check(self) -> None:
        """Check everything now that would fail after hours."""
        args = self._args
        if "," in str(args.out):
            raise OptionError("A comma in --out would be taken for the end of a head's folder", got=str(args.out))
        files = sorted({file for name in self._made for file in TEXTS[name].files})
        if "data" in args.stages and files:
            missing = [file for file in files if args.prompts is None or not (args.prompts / file).is_file()]
            if missing:
                raise OptionError(
                    "The prompts of the texts are not all there",
                    got=f"--prompts {args.prompts} without {', '.join(missing)}" if args.prompts else "no --prompts",
                    allowed=f"a folder with {', '.join(files)}",
                    next_step="Or name texts that draftwood train data made: --texts FOLDER...",
                )
        if args.texts or ("data" not in args.stages and {"train", "ranks"} & set(args.stages)):
            for folder in self.folders:
                if not read_manifest(Path(folder)).complete:
                    raise OptionError("Texts are not complete", got=str(folder), next_step="Finish making them first.")
        if "bench" in args.stages:
            if args.data is None or not Path(args.data).is_dir():
                allowed = f"a folder with prompts of {', '.join(args.tasks)}"
                raise OptionError("There are no prompts to bench on", got=f"--data {args.data}", allowed=allowed)
            load_tasks(args.tasks, args.data, args.bench_limit)
        if self.given_head:
            find_head(self.given_head)
        for name, run in self.runs.items():
            settings = {key: re.sub("STEPS_OF_.*", "1", value) for key, value in self.settings(name).items()}
            changes = [f"{key}={value}" for key, value in settings.items()]
            config = load_config(None, [*changes, "run.out=nowhere"], run.method)
            check_method(config)
            if "ranks" in args.stages and (type(config.data.held_out) is not int or not config.data.held_out):
                got = f"{name}: data.held_out={config.data.held_out}"
                raise OptionError("Ranks are measured on texts that were held out", got=got, allowed="1 text or more")
