"""``draftwood datastore``: building from files of every kind, showing, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwood.corpus import CorpusError, documents, find_files, load_codec
from draftwood.sources.datastore import Datastore, tokenizer_fingerprint
from draftwood.text.bytes import ByteTokenizer
from tests.tools.cli import Command, Result, Terminal, _plain_environment, draftwood_command  # noqa: F401 - fixtures


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    (folder / "b.txt").write_text("second text", encoding="utf-8")
    (folder / "a.md").write_text("first\r\ntext", encoding="utf-8-sig")
    (folder / "deep" / "c.py").write_text("third = 3", encoding="utf-8")
    (folder / "deep" / "d.jsonl").write_text('{"text": "fourth"}\n\n"fifth"\n', encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    (folder / ".secret.txt").write_text("hidden", encoding="utf-8")
    (folder / "deep" / ".hidden" / "e.txt").write_text("hidden", encoding="utf-8")
    return folder


def texts_of(store: Datastore) -> list[str]:
    tokens, texts = store.tokens.tolist(), []
    while tokens:
        end = tokens.index(-1)
        texts.append(ByteTokenizer().decode(tokens[:end]))
        tokens = tokens[end + 1 :]
    return texts


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")
    return path


# -- build and show --------------------------------------------------------------------------------------------------


def build(run: Command, output: Path, *argv: object) -> Result:
    return run("datastore", "build", *map(str, argv), "--out", str(output), "--model", "tiny")


def test_build_from_a_folder(draftwood_command: Command, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "my.draftwood-datastore"
    result = build(draftwood_command, output, corpus)
    assert result.code == 0
    assert result.out == f"{output}: 5 documents, 41 tokens\n"
    assert "reading texts" in result.err
    assert "sorting 46 tokens" in result.err
    codec = ByteTokenizer()
    store = Datastore.open(output, vocab_size=codec.vocab_size, tokenizer=tokenizer_fingerprint(codec))
    assert texts_of(store) == ["first\ntext", "second text", "third = 3", "fourth", "fifth"]
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "corpus"] == [output.name]


def test_build_as_json(draftwood_command: Command, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "store"
    content = json.loads(build(draftwood_command, output, corpus, "--json").out)
    assert content == json.loads(draftwood_command("datastore", "show", str(output), "--json").out)
    assert content == {
        "path": str(output),
        "num_bytes": output.stat().st_size,
        "num_documents": 5,
        "num_tokens": 41,
        "vocab_size": 258,
        "tokenizer": tokenizer_fingerprint(ByteTokenizer()),
        "sources": [str(corpus)],
    }


def test_show_describes_the_datastore(draftwood_command: Command, corpus: Path, tmp_path: Path) -> None:
    build(draftwood_command, tmp_path / "store", corpus / "a.md", corpus / "b.txt")
    result = draftwood_command("datastore", "show", str(tmp_path / "store"))
    assert result.code == 0
    rows = dict(line.split("  ", 1) for line in result.out.strip().split("\n"))
    assert {key.strip(): value.strip() for key, value in rows.items()} == {
        "documents": "2",
        "tokens": "21",
        "vocabulary": f"258 tokens, tokenizer {tokenizer_fingerprint(ByteTokenizer())[:12]}",
        "on disk": "1 MB",
        "source": f"{corpus / 'a.md'}, {corpus / 'b.txt'}",
    }


def test_json_field_option(draftwood_command: Command, tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", {"text": "no", "answer": "yes"}, {"answer": ["one", "two"]})
    assert build(draftwood_command, tmp_path / "store", path, "--field", "answer").code == 0
    assert texts_of(Datastore.open(tmp_path / "store")) == ["yes", "one\n\ntwo"]


def test_an_existing_output_needs_force(draftwood_command: Command, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "store"
    output.write_text("precious", encoding="utf-8")
    result = build(draftwood_command, output, corpus)
    assert result.code == 2
    assert "already exists" in result.err
    assert "--force" in result.err
    assert output.read_text(encoding="utf-8") == "precious"
    assert build(draftwood_command, output, corpus, "--force").code == 0
    assert Datastore.open(output).info.num_documents == 5


def test_output_that_is_also_an_input_is_refused(draftwood_command: Command, corpus: Path) -> None:
    result = build(draftwood_command, corpus / "b.txt", corpus, "--force")
    assert result.code == 2
    assert "also an input" in result.err
    assert (corpus / "b.txt").read_text(encoding="utf-8") == "second text"


@pytest.mark.parametrize("name", ["corpus", "nowhere/store"])
def test_invalid_output_is_refused(name: str, draftwood_command: Command, corpus: Path) -> None:
    result = build(draftwood_command, corpus.parent / name, corpus)
    assert result.code == 2
    assert "must be a file in an existing folder" in result.err


def test_interrupt_leaves_no_files(
    draftwood_command: Command, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object, label: str, *__: int) -> None:
        if label.startswith("writing"):
            assert list(tmp_path.glob(".store.partial-*"))  # there is something to clean up
            raise KeyboardInterrupt

    monkeypatch.setattr("draftwood.cli.console.terminal.ProgressBar.__call__", interrupt)
    assert build(draftwood_command, tmp_path / "store", corpus).code == 130
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus"]


def test_progress_is_a_bar_on_a_terminal(
    draftwood_command: Command, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    assert build(draftwood_command, tmp_path / "store", corpus).code == 0
    assert "━" in screen.getvalue()


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "The corpus is empty"), (b" \n\n", "The corpus is empty"), (b"caf\xe9", "is not valid UTF-8")],
)
def test_bad_texts_are_refused(content: bytes, expected: str, draftwood_command: Command, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    result = build(draftwood_command, tmp_path / "store", tmp_path / "x.txt")
    assert result.code == 2
    assert expected in result.err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        (b"{", None, "line 2 is not valid JSON"),
        (b"[" * 100_000, None, "line 2 is not valid JSON"),
        (b"\xff", None, "line 2 is not valid UTF-8"),
        (b'{"title": "a", "n": 2}', None, "the fields title, n"),
        (b'{"text": 5}', None, "line 2 has no text"),
        (b'{"turns": ["a", 5]}', None, "line 2 has no text"),
        (b'{"turns": []}', None, "line 2 has no text"),
        (b"[1]", None, "got: [1]"),
        (b'{"text": "a"}', "body", "line 2 has no text in the field 'body'"),
        (b'"half a letter \\ud83d"', None, "line 2 is not valid Unicode"),
    ],
)
def test_bad_lines_are_refused_with_line_number(
    line: bytes, field: str | None, expected: str, draftwood_command: Command, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine", "body": "fine"}\n' + line)
    options = ("--field", field) if field else ()
    result = build(draftwood_command, tmp_path / "store", tmp_path / "x.jsonl", *options)
    assert result.code == 2
    assert expected in result.err


def test_missing_files_and_empty_folders_are_refused(draftwood_command: Command, tmp_path: Path) -> None:
    result = build(draftwood_command, tmp_path / "store", tmp_path / "none.txt")
    assert result.code == 2
    assert "none.txt cannot be read" in result.err
    (tmp_path / "folder").mkdir()
    result = build(draftwood_command, tmp_path / "store", tmp_path / "folder")
    assert result.code == 2
    assert "contains no text files" in result.err
    assert "*.jsonl" in result.err
    assert draftwood_command("datastore", "build", "--out", "x").code == 2  # no files at all


def test_show_refuses_other_files(draftwood_command: Command, corpus: Path) -> None:
    result = draftwood_command("datastore", "show", str(corpus / "b.txt"))
    assert result.code == 2
    assert "This file is not a datastore" in result.err


# -- reading texts ---------------------------------------------------------------------------------------------------


def test_every_kind_of_json_line(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = lines(
        tmp_path / "x.jsonl",
        "a line",
        {"text": "t", "content": "c"},
        {"content": "c"},
        {"prompt": "p", "completion": "answer"},
        {"turns": ["one", "two"]},
        {"messages": messages},
        {"text": ""},
        {"text": None, "messages": messages},
    )
    assert list(documents([path])) == ["a line", "t", "c", "answer", "one\n\ntwo", "hi\n\nhello", "hi\n\nhello"]


def test_files_are_read_once_in_order(corpus: Path) -> None:
    names = [file.name for file in find_files([corpus / "b.txt", corpus, corpus / "image.png"])]
    assert names == ["b.txt", "a.md", "c.py", "d.jsonl", "image.png"]
    with pytest.raises(CorpusError, match="no files"):
        find_files([])


def test_reading_reports_all_bytes(corpus: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    assert len(list(documents(find_files([corpus]), None, lambda *step: steps.append(step)))) == 5
    total = sum(file.stat().st_size for file in find_files([corpus]))
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
    assert steps[-1] == ("reading texts", total, total)
    assert steps[-2][1] == total - len(b'"fifth"\n')


def test_only_the_tokenizer_of_a_model_is_loaded(tmp_path: Path) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    assert load_codec(str(tmp_path)).encode("a c b") == [0, 2, 1]
