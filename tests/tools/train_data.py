"""Shared by tests of training data: messages, codecs with chat templates, tiny targets, small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from draftwood.disk.store import models_home
from draftwood.progress import Progress
from draftwood.targets.load import Loaded
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import BOS, EOS, ByteTokenizer
from draftwood.text.chat import Message
from draftwood.text.tokenizer import TextCodec, Tokenizer
from draftwood.train.data.answers import OnTokens
from draftwood.train.data.dialogue import Rules
from draftwood.train.data.make import Part, make_data, prepare
from draftwood.train.data.manifest import Manifest
from draftwood.train.data.transcript import find_opening
from draftwood.train.data_settings import DataSettings

HAS_SMOLLM2 = (models_home() / "smollm2" / "tokenizer.json").is_file()

START, END = "<|start|>", "<|end|>"

# A default preamble, trimmed answers, and a line break after every end token, which no model generates.
PREAMBLE = """\
{%- if messages[0]['role'] != 'system' %}{{ '<|start|>system\nBe brief.<|end|>\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|start|>' + message['role'] + '\n' + message['content'] | trim + '<|end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif -%}
"""
# Keeps only the part of earlier answers after their thoughts.
FORGETFUL = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if message['role'] == 'assistant' and not loop.last %}{% set content = content.split('</t>')[-1] %}{% endif -%}
{{ '<|start|>' + message['role'] + ':' + content + '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant:' }}{% endif -%}
"""
# No token for the end of a turn.
BARE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


CHAT = (user("How are you?"), assistant("Fine. And you?"), user("Me too."), assistant("Good!"))


def template_codec(template: str) -> Tokenizer:
    """One token per byte, as in the tiny model, and two named ones."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([START, END])
    codec = Tokenizer(backend, eos_token_ids=[EOS], chat_template=template)
    assert codec.encode(START + END) == [BOS, EOS]
    return codec


def loaded(codec: TextCodec | None = None, **options: Any) -> Loaded:
    return Loaded(tiny_target(**options), codec or ByteTokenizer())


def rules_of(codec: TextCodec, max_length: int = 1000, **options: Any) -> Rules:
    opening = find_opening(codec) if options.get("self_made") else []
    return Rules(DataSettings(files=("a",), **options), codec, max_length, opening)


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make(
    folder: Path,
    files: tuple[str, ...] = (),
    model: Loaded | None = None,
    progress: Progress | None = None,
    heard: OnTokens | None = None,
    part: Part | None = None,
    **options: Any,
) -> Manifest:
    small = {"max_tokens": 12, "prompt_tokens": 8, "batch": 4, "shard_size": 2, **options}
    settings = DataSettings(files=files, **small)
    return make_data(prepare(settings, folder, part), model or loaded(), progress, heard)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
