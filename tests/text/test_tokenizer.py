"""Text to tokens and back, and chat templates with all errors in messages."""

from __future__ import annotations

import json
import os
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import ModelError, PromptError
from draftwood.models.find import ModelFolder
from draftwood.models.gguf.tokenizer import build_tokenizer, ending_ids, save_tokenizer, tokenizer_config
from draftwood.text import chat
from draftwood.text.chat import render_chat
from draftwood.text.tokenizer import TextCodec, Tokenizer
from tests.tools.gguf_writer import CHATML, tokenizer_metadata, vocabulary

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
USER = [{"role": "user", "content": "hello"}]


def folder_of(tmp_path: Path, pre: str = "smollm", **changes: Any) -> Path:
    metadata = tokenizer_metadata(pre, **changes)
    save_tokenizer(metadata, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(metadata)))
    return tmp_path


@pytest.mark.parametrize("pre", ["default", "smollm", "llama-bpe"])
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_any_text_round_trips(pre: str, text: str) -> None:
    tokenizer = Tokenizer(TOKENIZERS[pre])
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_sentencepiece_byte_tokens() -> None:
    pieces = {"\u2581the": 0, "<0xF0>": 1, "a": 2, "<unk>": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback()])
    backend.add_special_tokens(["<0x41>"])
    found = [Tokenizer(backend).token_bytes(token_id) for token_id in (0, 1, 2, 4, 99)]
    assert found == [b" the", b"\xf0", b"a", b"<0x41>", b""]


@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_qwen_text_round_trips_up_to_nfc(text: str) -> None:
    tokenizer = Tokenizer(TOKENIZERS["qwen2"])
    back = tokenizer.decode(tokenizer.encode(text), skip_special=False)
    assert unicodedata.normalize("NFC", back) == unicodedata.normalize("NFC", text)


TOKENIZERS = {pre: build_tokenizer(tokenizer_metadata(pre)) for pre in ("default", "smollm", "llama-bpe", "qwen2")}


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("default", ["hello", "Ġ", "123"]),  # digits stay together, with their space before the merges
        ("smollm", ["hello", "Ġ", "1", "2", "3"]),
        ("qwen2", ["hello", "Ġ", "1", "2", "3"]),
        ("llama-bpe", ["hello", "Ġ", "123"]),
    ],
)
def test_digit_splitting_per_tokenizer(pre: str, expected: list[str]) -> None:
    assert TOKENIZERS[pre].encode("hello 123", add_special_tokens=False).tokens == expected


def test_ids_match_the_file() -> None:
    tokens, kinds, _ = vocabulary()
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        assert TOKENIZERS["smollm"].token_to_id(token) == (None if kind == 5 else index)


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path))
    ids = tokenizer.encode("<|im_start|>hello<|im_end|><tool>")
    assert ids[0] == 1
    assert ids[-2] == 2
    assert tokenizer.decode(ids) == "hello<tool>"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|><tool>"
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == len(vocabulary()[0]) - 1


def test_bos_token_is_added_if_configured(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("hello")[-1] == 2
    assert len(tokenizer.encode("hello", add_special=False)) == 1
    assert tokenizer.apply_chat(USER).count(2) == 1  # only the one of the template


def test_llama_3_adds_bos_without_flag() -> None:
    metadata = tokenizer_metadata("llama-bpe")
    del metadata["tokenizer.ggml.add_bos_token"]
    assert build_tokenizer(metadata).encode("hello").ids[0] == 1


def test_both_eos_tokens_of_qwen_are_kept() -> None:
    assert ending_ids(tokenizer_metadata("qwen2")) == [2, 0]
    assert ending_ids(tokenizer_metadata("smollm", eot_token_id=0)) == [2, 0]
    assert ending_ids(tokenizer_metadata("smollm", eos_token_id=4_000_000)) == []


def test_tokens_are_shown_on_one_line(tmp_path: Path) -> None:
    tokenizer: TextCodec = Tokenizer.from_folder(folder_of(tmp_path))
    for index in range(tokenizer.vocab_size + 3):
        shown = tokenizer.token_text(index)
        assert shown
        assert shown.isprintable()
    assert tokenizer.token_text(tokenizer.encode("\n")[0]) == "\\n"
    assert tokenizer.token_text(tokenizer.encode(" hello")[0]) == " hello"


def test_rejects_non_text_input(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path))
    with pytest.raises(PromptError, match="Only text"):
        tokenizer.encode(b"hello")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="not valid Unicode"):
        tokenizer.encode("half a letter: \ud83d")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    folder_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ '\xff\xfe' }}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = build_tokenizer(tokenizer_metadata())
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("xyz")) == 3


def test_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path))
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer.chat_template == CHATML
    assert tokenizer.decode(tokenizer.apply_chat(USER, add_generation_prompt=False), skip_special=False) == text
    assert tokenizer.apply_chat(USER) == tokenizer.encode(text + "<|im_start|>assistant\n", add_special=False)


def test_missing_chat_template_is_reported(tmp_path: Path) -> None:
    save_tokenizer(tokenizer_metadata(), tmp_path)
    with pytest.raises(PromptError, match=r"no chat template.*\n.*Generate"):
        Tokenizer.from_folder(tmp_path).apply_chat(USER)


def test_template_locations(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config["bos_token"] = {"content": "<|im_start|>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}!")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.apply_chat(USER), skip_special=False) == "<|im_start|>!"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if true %}\nx\n{% endif %}\n", "x\n"),  # blocks leave no empty lines
        ("a\n   {% if true %}\nb\n   {% endif %}\n", "a\nb\n"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}", "hello"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{{ messages[0].role }}{{ tools is none }}{{ eos_token }}", "userTrue</s>"),
    ],
)
def test_template_conventions(template: str, expected: str) -> None:
    assert render_chat(template, USER, {"eos_token": "</s>"}, True) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system, please') }}", "no system, please"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_failing_templates_are_reported(template: str, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        render_chat(template, USER, {}, True)


GROWING = "{% set ns = namespace(x='12345678') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.skipif(os.name != "posix", reason="needs a limit of memory")
@pytest.mark.parametrize(
    "template", [GROWING, "{{ 'a' * 10**10 }}", "{{ '%10000000000d' % 1 }}", "{{ 'a' | center(10**10) }}"]
)
def test_templates_that_take_too_much_memory(template: str) -> None:
    with pytest.raises(PromptError, match=r"MemoryError|OverflowError|stopped"):
        render_chat(template, USER, {}, True)
    assert render_chat("fine", USER, {}, True) == "fine"


def test_templates_that_render_too_much() -> None:
    with pytest.raises(PromptError, match="40000000 characters"):
        render_chat("{{ 'a' * 40000000 }}", USER, {}, True)


def test_templates_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert render_chat("fine", USER, {}, True) == "fine"
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    with pytest.raises(PromptError, match=r"stopped\n  got: more than 0\.5 seconds"):
        render_chat(ENDLESS, USER, {}, True)
    monkeypatch.undo()
    assert render_chat("fine", USER, {}, True) == "fine"


def test_an_interrupted_rendering_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert render_chat("first", USER, {}, True) == "first"
    process = chat._WORKER._process
    assert process is not None
    output = process.stdout

    class Interrupted:
        def readline(self) -> bytes:
            raise KeyboardInterrupt

    process.stdout = Interrupted()  # type: ignore[assignment]
    monkeypatch.setattr(process, "communicate", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        render_chat("second", USER, {}, True)
    process.stdout = output
    monkeypatch.undo()
    process.communicate()
    assert render_chat("third", USER, {}, True) == "third"


def test_templates_render_in_threads() -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = [f"text {number}" for number in range(50)]
        assert list(pool.map(lambda text: render_chat(text, USER, {}, True), texts)) == texts


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ("hello", "needs a list of messages"),
        ({"role": "user"}, "needs a list of messages"),
        (["hello"], "Message 0 must be an object"),
        ([*USER, {"role": "user"}], "Message 1 needs a text as its content"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": [{"type": "text"}]}], "list"),
        ([{"role": "", "content": "x"}], "empty role"),
    ],
)
def test_invalid_messages_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        render_chat(CHATML, messages, {}, True)


@pytest.mark.model
def test_tokenizer_of_the_default_model(smollm2: ModelFolder) -> None:
    tokenizer = Tokenizer.from_folder(smollm2.path)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("Year 2024")] == ["Year", " ", "2", "0", "2", "4"]
    tree = "\U0001f333\n"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(tree, add_special=False))) == tree.encode()
    prompt = tokenizer.decode(tokenizer.apply_chat([{"role": "user", "content": "Hi"}]), skip_special=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
