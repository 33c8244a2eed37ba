"""Compiling: what is refused and how, what is kept, what matches."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from draftwood import LLM, SamplingParams, Structured
from draftwood.errors import CapabilityError, MissingExtraError, OptionError
from draftwood.structured import StructureCompiler
from draftwood.structured import compiler as compiler_module
from draftwood.text.bytes import BOS, EOS, ByteTokenizer
from tests.tools.engine import make_llm
from tests.tools.structured import LetterTokenizer, compile_for

CODEC = ByteTokenizer()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"llguidance.*\n.*draftwood\[structured\]"):
        compile_for(CODEC, Structured(regex="a"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got: nothing"),
        ({"regex": "a", "grammar": "start: /a/"}, "got: regex, grammar"),
        ({"regex": 3}, "regex must be text"),
        ({"json_schema": 3}, "json_schema must be text"),
        ({"json_schema": {"a": {1}}}, "cannot be written as JSON"),
        ({"regex": "a" * 300_000}, "too long"),
        ({"regex": "\ud83d"}, "not valid Unicode"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        Structured(**given)  # type: ignore[arg-type]
    assert caught.value.param == "structured"


def test_params_accept_nothing_else() -> None:
    with pytest.raises(OptionError, match="structured must say"):
        SamplingParams(structured={"type": "object"})  # type: ignore[arg-type]


def test_a_schema_may_be_text_an_object_or_a_class() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, str]:
            return {"type": "integer"}

    texts = [Structured(json_schema=each).text for each in ('{"type": "integer"}', {"type": "integer"}, Model)]
    assert texts == ['{"type": "integer"}'] * 3
    assert len({Structured(json_schema={"type": "integer"}), Structured(json_schema='{"type": "integer"}')}) == 1


needs_library = pytest.mark.usefixtures("_library")


@pytest.fixture
def _library() -> None:
    pytest.importorskip("llguidance")


@needs_library
@pytest.mark.parametrize(
    ("structured", "message"),
    [
        (Structured(json_schema="{"), "not valid JSON"),
        (Structured(json_schema="[1]"), "must be an object"),
        (Structured(json_schema="true"), "must be an object"),
        (Structured(json_schema={"type": "objct"}), "Invalid type: objct"),
        (Structured(json_schema={"type": "array", "uniqueItems": True}), r"uniqueItems(.|\n)*strict to false"),
        (Structured(json_schema={"$ref": "https://example.org/schema"}), "not present in a registry"),
        (Structured(json_schema={"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (Structured(json_schema='{"items": ' * 200 + "{}" + "}" * 200), "recursion limit"),
        (Structured(regex="("), "regular expression cannot be used"),
        (Structured(regex="(?=a)b"), "look-around"),
        (Structured(grammar="start: nothing"), "grammar cannot be used"),
        (Structured(grammar='start: "a" word\nword[max_tokens=3]: /[a-z]+/'), "max_tokens= or stop="),
        (Structured(regex="[^\\s\\S]"), "cannot"),
    ],
)
def test_what_cannot_be_matched_is_the_users_error(structured: Structured, message: str) -> None:
    with pytest.raises((OptionError, CapabilityError), match=message) as caught:
        compile_for(CODEC, structured)
    assert caught.value.param == "structured"
    assert len(str(caught.value)) < 600


@needs_library
def test_hostile_structures_end_in_bounded_work() -> None:
    """They compile or are refused; what is too much later ends its request with an error."""
    patterns = ["(a{1,1000}){1,1000}b", "(.*a){12}[^a]{500}", "|".join(f"{n:x}+(a|b{n})*" for n in range(2000))]
    with make_llm() as llm:
        for pattern in patterns:
            try:
                llm.generate("hi", SamplingParams(max_tokens=3, structured=Structured(regex=pattern)))
            except (OptionError, CapabilityError) as error:
                assert error.param == "structured"  # noqa: PT017 - either is fine


@needs_library
def test_keywords_that_are_not_supported_can_be_ignored() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    matcher = compile_for(CODEC, Structured(json_schema=schema, strict=False)).start()
    assert matcher.take(CODEC.encode("[1, 1]", add_special=False)) == 6


@needs_library
def test_structures_are_compiled_once_and_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_COMPILED", 2)
    compiler = StructureCompiler(CODEC, CODEC.vocab_size, (EOS,))
    a, b, c = (Structured(regex=letter) for letter in "abc")
    first = compiler.compile(a)
    compiler.compile(b)
    assert compiler.compile(Structured(regex="a")) is first
    compiler.compile(c)  # b was used longest ago
    assert compiler.compile(a) is first
    assert len(compiler._compiled) == 2


@needs_library
def test_json_is_written_on_one_line() -> None:
    structure = compile_for(CODEC, Structured(json_schema={"type": "object"}))
    for text, ends in [
        ('{"a": [1, {"b": null}], "c": "x\\ny"}', True),
        ("{ }", False),
        ('{"a":1}', False),
        ("{\n", False),
    ]:
        matcher = structure.start()
        matches = matcher.take(CODEC.encode(text, add_special=False)) == len(text)
        assert (matches and matcher.is_complete) is ends, text


@needs_library
def test_special_tokens_and_entries_without_a_token_are_not_text() -> None:
    compiler = StructureCompiler(CODEC, CODEC.vocab_size + 30, (EOS,))
    matcher = compiler.compile(Structured(regex="(?s).*")).start()
    allowed = torch.nonzero(matcher.allowed()).flatten().tolist()
    assert BOS not in allowed
    assert EOS in allowed
    assert max(allowed) == EOS


@needs_library
def test_a_model_without_an_end_token() -> None:
    codec = LetterTokenizer()
    matcher = compile_for(codec, Structured(regex="(ab)+c"), ends=()).start()
    assert matcher.take(codec.encode("ab")) == 1
    assert matcher.allowed().tolist() == [True, False, True, True, False]
    assert matcher.take(codec.encode("c")) == 1
    assert matcher.is_complete


@needs_library
def test_forced_text_is_found() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    matcher = compile_for(CODEC, Structured(json_schema=json.dumps(schema))).start()
    assert CODEC.decode(matcher.forced()) == '{"name": "'
    matcher.take(matcher.forced())
    assert matcher.forced() == ()


@needs_library
def test_the_output_ends_where_nothing_can_follow() -> None:
    """Without an end token, at the length limit too, and also if the end token is ignored."""
    with make_llm() as llm:
        for limit, ignore_eos in ((20, False), (3, False), (20, True)):
            params = SamplingParams(max_tokens=limit, structured=Structured(regex="(aaa|bbb)"), ignore_eos=ignore_eos)
            for drafter in ("plain", "goose"):
                (completion,) = llm.generate("hi", params, drafter=drafter)
                assert completion.text in ("aaa", "bbb")
                assert completion.finish_reason == "stop"
                assert len(completion.token_ids) == 3
        params = SamplingParams(max_tokens=2, structured=Structured(regex="(aaa|bbb)"))
        assert llm.generate("hi", params)[0].finish_reason == "length"


@needs_library
def test_the_end_token_ends_an_output_that_could_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm() as llm:
        params = SamplingParams(max_tokens=200, temperature=1.5, seed=4, structured=Structured(regex="[ab]*"))
        found = [llm.generate("hi", params, drafter=drafter)[0] for drafter in ("plain", "goose", "stand")]
        assert {completion.finish_reason for completion in found} == {"stop"}
        assert all(set(completion.text) <= {"a", "b"} and completion.token_ids[-1] == EOS for completion in found)


@needs_library
def test_forced_spans_save_passes_and_forbidden_guesses_are_cut() -> None:
    structured = Structured(regex="x(the quick brown fox|the lazy dog)!")
    params = SamplingParams(max_tokens=40, structured=structured)
    with make_llm() as llm:
        plain, drafted = (llm.generate("hi", params, drafter=drafter)[0] for drafter in ("plain", "goose"))
        assert drafted.text == plain.text
        assert drafted.stats.cycles <= plain.stats.cycles // 3
        assert drafted.sources.count("grammar") > 8


def test_library_is_used_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a structure needs no package."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with make_llm() as llm:
        assert isinstance(llm, LLM)
        assert llm.generate("hi", SamplingParams(max_tokens=2))[0].token_ids
        with pytest.raises(MissingExtraError):
            llm.generate("hi", SamplingParams(structured=Structured(regex="a")))
