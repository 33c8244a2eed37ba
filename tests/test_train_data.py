"""Training data: prompts out of files, which tokens count, and answers that are the target's own."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.errors import CapabilityError, OptionError, PromptError
from draftwood.target.build import load_target
from draftwood.target.chat import Message
from draftwood.target.load import resolve
from draftwood.target.store import models_home
from draftwood.target.tiny import BOS, EOS, ByteTokenizer, tiny_target
from draftwood.target.tokenizer import TextCodec, Tokenizer
from draftwood.train.data.dialogue import Ask, Dialogue, Kept, Rules, SelfMade
from draftwood.train.data.prompts import Prompt, read_sources
from draftwood.train.data.read import TrainingData
from draftwood.train.data.settings import DataSettings
from draftwood.train.data.shards import DataError
from draftwood.train.data.transcript import Transcript, answer_of, empty_user_turn

from .train_data_tools import BARE, END, FORGETFUL, PREAMBLE, contents, lines, loaded, make, template_codec

HAS_SMOLLM2 = (models_home() / "smollm2" / "tokenizer.json").is_file()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


CHAT = (user("How are you?"), assistant("Fine. And you?"), user("Me too."), assistant("Good!"))

# -- prompts out of files --------------------------------------------------------------------------------------------


def test_every_layout_says_the_same(tmp_path: Path) -> None:
    said = [("user", "human", "one"), ("assistant", "gpt", "no"), ("user", "human", "two")]
    rows = [
        {"turns": ["one", "two"], "id": 7},
        {"messages": [{"role": role, "content": text} for role, _, text in said]},
        {"conversations": [{"from": name, "value": text} for _, name, text in said]},
    ]
    path = lines(tmp_path / "a.jsonl", *rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.txt").write_bytes("\ufeffone\r\n\n  two \x85 three\n".encode())
    prompts, sources = read_sources([path, str(tmp_path / "b.json"), str(tmp_path / "c.txt")])
    assert [list(prompt.messages) for prompt in prompts[:6]] == [[user("one"), user("two")]] * 6
    assert [list(prompt.messages) for prompt in prompts[6:]] == [[user("one")], [user("two \x85 three")]]
    assert [prompt.place for prompt in prompts[2:4]] == [f"{path}, line 3", f"{tmp_path / 'b.json'}, entry 1"]
    assert [(source.name, source.prompts) for source in sources] == [("a.jsonl", 3), ("b.json", 3), ("c.txt", 2)]
    assert len({source.sha256 for source in sources}) == 3


def test_a_system_message_stays_in_front(tmp_path: Path) -> None:
    rules = {"role": "system", "content": "Rhyme."}
    path = lines(tmp_path / "a.jsonl", {"messages": [rules, assistant("Hi."), user("Go.")]})
    assert read_sources([path])[0][0].messages == (rules, user("Go."))


def test_conversations_of_no_use_are_skipped_and_counted(tmp_path: Path) -> None:
    rows: list[Any] = [{"turns": turns} for turns in (["fine"], [], [" "], ["fine", ""])]
    path = lines(tmp_path / "a.jsonl", *rows, {"messages": [assistant("I say.")]}, {"messages": [*CHAT[:3]]})
    prompts, (source,) = read_sources([path])
    assert (len(prompts), source.prompts, source.skipped) == (2, 2, 4)
    kept, (source,) = read_sources([path], keep_answers=True)
    assert [prompt.messages for prompt in kept] == [CHAT[:2]]  # up to the last answer
    assert source.skipped == 5


def test_a_limit_counts_over_all_files(tmp_path: Path) -> None:
    paths = [lines(tmp_path / name, {"turns": ["a"]}, {"turns": ["b"]}) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    prompts, sources = read_sources(paths, limit=3)
    assert len(prompts) == 3
    assert [source.prompts for source in sources] == [2, 1, 0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "line 2 is not valid JSON"),
        (b"[" * 100_000, "line 2 is not valid JSON"),
        (b"\xff", "line 2 is no UTF-8 text"),
        (b'{"title": "a"}', "line 2 has no prompt"),
        (b"[1]", "line 2 has no prompt"),
        (b'{"turns": ["a", 5]}', "line 2 has no prompt"),
        (b'{"turns": "a"}', "line 2 has no prompt"),
        (b'{"messages": ["a"]}', "line 2 has a message without 'role' and 'content'"),
        (b'{"conversations": [{"from": "human"}]}', "line 2 has a message without 'from' and 'value'"),
        (b'{"messages": [{"role": "tool", "content": "a"}]}', "line 2 has a message of an unknown speaker"),
        (b'{"turns": ["half a letter \\ud83d"]}', "line 2 is not valid Unicode"),
    ],
)
def test_malformed_lines_are_refused_with_their_place(line: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"turns": ["fine"]}\n' + line)
    with pytest.raises(PromptError, match=expected) as refusal:
        read_sources([str(path)])
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", ""), ("a.txt", " \n\n"), ("a.json", "[]")])
def test_files_without_prompts_are_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match="has no prompts"):
        read_sources([str(tmp_path / name)])


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"none\.txt cannot be read"):
        read_sources([str(tmp_path / "none.txt")])
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(PromptError, match="is no list"):
        read_sources([str(tmp_path / "a.json")])


@pytest.mark.parametrize(
    "options",
    [
        {"files": ()},
        {"keep_answers": True, "files": (), "self_made": 1},
        {"limit": 0},
        {"max_length": 0},
        {"batch": 0},
        {"shard_size": 1.5},
        {"seed": -1},
        {"self_made": -1},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"prompt_temperature": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        DataSettings(**{"files": ("a",), **options})


# -- which tokens count ----------------------------------------------------------------------------------------------


def smollm2_codec() -> Tokenizer:
    return Tokenizer.from_folder(resolve("smollm2").path)


CODECS: list[Any] = [
    pytest.param(ByteTokenizer, "\n", id="tiny"),
    pytest.param(lambda: template_codec(PREAMBLE), END, id="preamble"),
    pytest.param(lambda: template_codec(BARE), "\n", id="bare"),
    pytest.param(
        smollm2_codec,
        "<|im_end|>",
        id="smollm2",
        marks=pytest.mark.skipif(not HAS_SMOLLM2, reason="the default model is not in the cache"),
    ),
]


def kept_texts(
    codec: TextCodec, messages: tuple[Message, ...], max_length: int = 10_000
) -> list[list[tuple[int, bool]]]:
    rules = Rules(DataSettings(files=("a",)), codec, max_length)
    dialogue = Kept(0, Prompt("here", messages), rules)
    assert dialogue.ask() is None
    return [list(zip(ids.tolist(), mask.tolist(), strict=True)) for ids, mask in dialogue.transcript.examples()]


@pytest.mark.parametrize(("new_codec", "end"), CODECS)
def test_answers_count_with_their_ends_and_nothing_else(new_codec: Callable[[], TextCodec], end: str) -> None:
    codec = new_codec()
    (text,) = kept_texts(codec, CHAT)
    ids = [token for token, _ in text]
    counting = [token for token, counts in text if counts]
    assert codec.decode(counting, skip_special=False) == f"Fine. And you?{end}Good!{end}"
    whole = codec.apply_chat(CHAT, add_generation_prompt=False)
    assert ids == whole[: len(ids)]
    assert codec.decode(whole[len(ids) :], skip_special=False).strip() == ""  # a line break behind the end at most
    assert text[-1][1]


@pytest.mark.parametrize(("new_codec", "end"), CODECS)
def test_an_answer_stands_behind_the_prompt_that_asks_for_it(new_codec: Callable[[], TextCodec], end: str) -> None:
    codec = new_codec()
    for size in (2, 4):
        prompt, answer = answer_of(codec, CHAT[:size], "here")
        assert prompt == codec.apply_chat(CHAT[: size - 1])
        assert codec.decode(answer, skip_special=False) == CHAT[size - 1]["content"] + end


def test_a_template_that_forgets_gives_a_text_for_each_answer() -> None:
    codec = template_codec(FORGETFUL)
    chat = (user("Hm?"), assistant("<t>long</t>yes"), user("Ok."), assistant("<t></t>no"))
    texts = kept_texts(codec, chat)
    said = [codec.decode([token for token, counts in text if counts], skip_special=False) for text in texts]
    assert said == [f"<t>long</t>yes{END}", f"<t></t>no{END}"]
    assert "long" not in codec.decode([token for token, _ in texts[1]])
    plain = (user("Hm?"), assistant("yes"), user("Ok."), assistant("no"))
    assert len(kept_texts(codec, plain)) == 1  # nothing to forget


def test_kept_answers_are_cut_to_the_length() -> None:
    codec = template_codec(PREAMBLE)
    prompt, answer = answer_of(codec, CHAT[:2], "here")
    (text,) = kept_texts(codec, CHAT, len(prompt) + 3)
    assert text == [*((token, False) for token in prompt), *((token, True) for token in answer[:3])]
    assert kept_texts(codec, CHAT, len(prompt)) == []


def test_a_template_that_refuses_says_whom() -> None:
    codec = template_codec("{{ raise_exception('no system here') if messages[0]['role'] == 'system' }}x")
    dialogue = Dialogue(0, Prompt("a.jsonl, line 3", ({"role": "system", "content": "s"}, user("u"))), rules_of(codec))
    with pytest.raises(PromptError, match=r"a\.jsonl, line 3: .*refuses") as refusal:
        dialogue.ask()
    assert "no system here" in str(refusal.value)


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(TOKENS, TOKENS, st.booleans()), min_size=1, max_size=6))
def test_counting_tokens_stand_behind_what_the_target_saw(turns: list[tuple[list[int], list[int], bool]]) -> None:
    """Whatever templates do: prompts that go on, and prompts that begin anew."""
    transcript = Transcript()
    said: list[int] = []
    expected = []
    for new, answer, goes_on in turns:
        prompt = [*said, *new] if goes_on else new
        transcript.add(prompt, answer)
        expected += [([*prompt, *answer[:place]], token) for place, token in enumerate(answer)]
        said = [*prompt, *answer]
    found = [
        (ids[:place].tolist(), int(ids[place]))
        for ids, answered in transcript.examples()
        for place in np.flatnonzero(answered)
    ]
    assert found == expected
    if all(goes_on for *_, goes_on in turns):
        assert len(transcript.examples()) == 1


# -- conversations ---------------------------------------------------------------------------------------------------


def rules_of(codec: TextCodec, max_length: int = 1000, **options: Any) -> Rules:
    opening = empty_user_turn(codec) if options.get("self_made") else []
    return Rules(DataSettings(files=("a",), **options), codec, max_length, opening)


def next_ask(dialogue: Dialogue) -> Ask:
    ask = dialogue.ask()
    assert ask is not None
    return ask


def test_every_turn_is_asked_in_what_was_said() -> None:
    codec = template_codec(PREAMBLE)
    dialogue = Dialogue(3, Prompt("here", (user("Hi."), user("Bye."))), rules_of(codec, temperature=1.0))
    first = next_ask(dialogue)
    assert first.prompt_ids == codec.apply_chat([user("Hi.")])
    answer = [*codec.encode("Oh"), EOS]
    dialogue.take(answer, "Oh")
    second = next_ask(dialogue)
    assert second.prompt_ids == codec.apply_chat([user("Hi."), assistant("Oh"), user("Bye.")])
    dialogue.take([65], "A")  # cut at the limit: it wrote no end, so none counts
    assert dialogue.ask() is None
    ((ids, answered),) = dialogue.transcript.examples()
    assert ids.tolist() == [*second.prompt_ids, 65]
    assert ids[answered].tolist() == [*answer, 65]
    seeds = [ask.params.seed for ask in (first, second)]
    other = next_ask(Dialogue(4, Prompt("here", (user("Hi."),)), rules_of(codec, temperature=1.0)))
    assert len({*seeds, other.params.seed}) == 3
    again = next_ask(Dialogue(3, Prompt("elsewhere", (user("Ho."),)), rules_of(codec, temperature=1.0)))
    assert again.params.seed == seeds[0]


def test_no_text_grows_beyond_its_length() -> None:
    codec = template_codec(PREAMBLE)
    size = len(codec.apply_chat([user("Hi.")]))
    messages = (user("Hi."), user("x" * 50))
    too_long = Dialogue(0, Prompt("here", messages), rules_of(codec, size))
    assert (too_long.ask(), too_long.lost, too_long.transcript.examples()) == (None, "too_long", [])
    cut = Dialogue(0, Prompt("here", messages), rules_of(codec, size + 9, max_tokens=40))
    assert next_ask(cut).params.max_tokens == 9
    cut.take([65] * 9, "A" * 9)
    assert (cut.ask(), cut.lost, len(cut.transcript.examples())) == (None, "cut_short", 1)


@pytest.mark.parametrize(("new_codec", "end"), CODECS)
def test_an_empty_user_turn_is_all_that_stands_before_one(new_codec: Callable[[], TextCodec], end: str) -> None:
    codec = new_codec()
    before = codec.decode(empty_user_turn(codec), skip_special=False)
    whole = codec.decode(codec.apply_chat([user("Why?")]), skip_special=False)
    assert whole.startswith(f"{before}Why?")


def test_self_made_prompts_need_a_way_to_begin() -> None:
    with pytest.raises(CapabilityError, match="nothing before a user's turn"):
        empty_user_turn(template_codec("{{ messages[0]['content'] }}"))
    codec = template_codec(PREAMBLE)
    codec.chat_template = None
    with pytest.raises(CapabilityError, match="without a chat template"):
        empty_user_turn(codec)


def test_self_made_prompts_are_sampled_and_then_answered() -> None:
    codec = template_codec(PREAMBLE)
    rules = rules_of(codec, self_made=2, prompt_temperature=0.7, prompt_tokens=5)
    dialogue = SelfMade(0, 0, rules)
    ask = next_ask(dialogue)
    assert ask.prompt_ids == rules.opening
    assert (ask.params.temperature, ask.params.max_tokens) == (0.7, 5)
    dialogue.take([*codec.encode(" Why? "), EOS], " Why? ")
    ask = next_ask(dialogue)
    assert ask.prompt_ids == codec.apply_chat([user("Why?")])
    assert ask.params.is_greedy
    dialogue.take([65, EOS], "A")
    assert dialogue.ask() is None
    ((ids, answered),) = dialogue.transcript.examples()
    assert ids[answered].tolist() == [65, EOS]
    silent = SelfMade(1, 1, rules)
    assert next_ask(silent).params.seed != ask.params.seed
    silent.take([EOS], " ")
    assert (silent.ask(), silent.lost) == (None, "empty")


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [{"turns": [f"question {number}", "and then?"][: 1 + number % 2]} for number in range(5)]
    return lines(tmp_path / "prompts.jsonl", *rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_what_the_model_says(temperature: float, prompts: str, tmp_path: Path) -> None:
    codec = template_codec(PREAMBLE)
    make(tmp_path / "data", (prompts,), loaded(codec), temperature=temperature, seed=5)
    data = TrainingData.open(tmp_path / "data")
    assert sorted(set(data.prompts.tolist())) == [0, 1, 2, 3, 4]
    rules = rules_of(codec, 1024, max_tokens=12, temperature=temperature, seed=5)
    read, _ = read_sources([prompts])
    with LLM.from_target(tiny_target(), codec, drafter="plain", budget=1) as llm:
        for index, prompt in enumerate(read):
            dialogue = Dialogue(index, prompt, rules)
            while (ask := dialogue.ask()) is not None:
                (answer,) = llm.generate(ask.prompt_ids, ask.params)
                dialogue.take(answer.token_ids, answer.text)
            made = [data[place] for place in np.flatnonzero(data.prompts == index)]
            for (ids, mask), (other_ids, other_mask) in zip(made, dialogue.transcript.examples(), strict=True):
                assert ids.tolist() == other_ids.tolist()
                assert mask.tolist() == other_mask.tolist()


def test_batches_and_drafters_do_not_change_the_texts(prompts: str, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"batch": 1}, {"batch": 8}, {"drafter": "pld"}, {"shard_size": 100}]
    texts = []
    for number, option in enumerate(options):
        make(tmp_path / str(number), (prompts,), self_made=3, **option)
        data = TrainingData.open(tmp_path / str(number))
        texts.append([(ids.tolist(), answered.tolist()) for ids, answered in map(data.__getitem__, range(len(data)))])
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_self_made_data_depends_on_its_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(tmp_path / name, self_made=4, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    ids = [TrainingData.open(tmp_path / name)[0].token_ids.tolist() for name in ("a", "c")]
    assert ids[0] != ids[1]
    assert ids[0][0] == BOS


def test_the_manifest_tells_what_was_made(prompts: str, tmp_path: Path) -> None:
    manifest = make(tmp_path / "data", (prompts,), self_made=2, seed=9, licence="CC-BY", max_length=60)
    content = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert content["model"]["fingerprint"] == "tiny (LlamaForCausalLM 258x48x2, 71088 parameters)"
    assert (content["settings"]["seed"], content["settings"]["max_length"]) == (9, 60)
    assert content["sources"][0]["name"] == "prompts.jsonl"
    assert (content["licence"], content["prompts"], content["complete"]) == ("CC-BY", 7, True)
    data = TrainingData.open(tmp_path / "data")
    assert len(data) == manifest.counts["examples"] == sum(shard["examples"] for shard in content["shards"])
    assert data.lengths.sum() == manifest.counts["tokens"]
    answered = sum(int(data[place].answered.sum()) for place in range(len(data)))
    assert answered == manifest.counts["answered_tokens"]
    assert data.lengths.max() <= 60
    assert str(tmp_path) not in json.dumps(content)


def test_prompts_without_room_are_left_out_and_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"turns": ["x" * 100]}, {"turns": ["y"]}, {"turns": ["y", "x" * 100]})
    manifest = make(tmp_path / "data", (path,), max_length=40)
    counts = {name: manifest.counts[name] for name in ("examples", "too_long", "cut_short", "empty")}
    assert counts == {"examples": 2, "too_long": 1, "cut_short": 1, "empty": 0}
    with pytest.raises(PromptError, match="No prompt leaves room"):
        make(tmp_path / "none", (path,), max_length=3)
    with pytest.raises(OptionError, match="longer than the context"):
        make(tmp_path / "never", (path,), max_length=2000)


@pytest.mark.parametrize("stop_at", [1, 40, 90])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(stop_at: int, prompts: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"self_made": 2, "temperature": 0.8}
    make(tmp_path / "whole", (prompts,), **options)
    heard = 0

    def stop(tokens: int) -> None:
        nonlocal heard
        heard += tokens
        if heard >= stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "stopped", (prompts,), heard=stop, **options)
    before = contents(tmp_path / "stopped")
    whole = contents(tmp_path / "whole")
    assert all(whole[name] == content for name, content in before.items() if name != "manifest.json")
    assert len(before) < len(whole)
    with pytest.raises(DataError, match="not complete"):
        TrainingData.open(tmp_path / "stopped")
    (tmp_path / "stopped" / ".part-00003.safetensors.partial-abc").write_bytes(b"left by a kill")
    told: list[int] = []
    make(tmp_path / "stopped", (prompts,), heard=told.append, **options)
    assert contents(tmp_path / "stopped") == whole
    assert told
    told.clear()
    make(tmp_path / "stopped", (prompts,), heard=told.append, **options)
    assert not told  # nothing was left to do
    (tmp_path / "stopped" / "part-00001.safetensors").unlink()
    make(tmp_path / "stopped", (prompts,), **options)
    assert contents(tmp_path / "stopped") == whole


def test_an_interrupted_engine_can_be_used_again(prompts: str, tmp_path: Path) -> None:
    model = loaded()
    free = model.target.can_open(model.target.num_slots)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "data", (prompts,), model, heard=stop)
    assert free
    assert model.target.can_open(model.target.num_slots)


def test_a_folder_is_gone_on_with_by_the_same_run_only(prompts: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make(folder, (prompts,))
    before = contents(folder)
    with pytest.raises(OptionError, match=r"other settings[\s\S]*settings.seed 1[\s\S]*settings.seed 0"):
        make(folder, (prompts,), seed=1)
    other = lines(tmp_path / "other.jsonl", {"turns": ["else"]})
    with pytest.raises(OptionError, match="sources"):
        make(folder, (other,))
    with pytest.raises(OptionError, match="dtype"):
        make(folder, (prompts,), load_target("tiny", dtype="bfloat16", device="cpu"))
    assert contents(folder) == before
    make(folder, (prompts,), licence="MIT", batch=1)  # these change no answer
    make(folder, (prompts,))
    assert json.loads((folder / "manifest.json").read_text())["licence"] == "MIT"


def test_places_that_are_taken_are_refused(prompts: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="other things in it"):
        make(tmp_path, (prompts,))
    with pytest.raises(OptionError, match="this is a file"):
        make(Path(prompts), (prompts,))
    with pytest.raises(OptionError, match="no drafter"):
        make(tmp_path / "data", (prompts,), drafter="gose")
    assert not (tmp_path / "data").exists()


def test_a_full_disk_is_told_and_costs_one_part(prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "whole", (prompts,))
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "part-00001" in path.name:
            write(path, content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DataError, match="No space left on device") as refusal:
            make(tmp_path / "data", (prompts,))
    assert "same command again" in str(refusal.value)
    assert sorted(contents(tmp_path / "data")) == ["manifest.json", "part-00000.safetensors"]
    make(tmp_path / "data", (prompts,))
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_a_damaged_part_is_not_gone_on_from(prompts: str, tmp_path: Path) -> None:
    make(tmp_path / "data", (prompts,))
    part = tmp_path / "data" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(DataError, match="damaged"):
        make(tmp_path / "data", (prompts,))


def test_progress_counts_prompts_up_to_the_last(prompts: str, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    make(tmp_path / "data", (prompts,), progress=lambda *step: steps.append(step))
    counted = [done for label, done, total in steps if (label, total) == ("answering prompts", 5)]
    assert counted == sorted(counted)
    assert {0, 5} <= set(counted)
    assert len(set(counted)) > 3


@pytest.mark.model
@pytest.mark.skipif(not HAS_SMOLLM2, reason="the default model is not in the cache")
def test_the_default_model_answers_and_asks(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"turns": ["Say only the word yes.", "Once more."]})
    model = load_target("smollm2", dtype="float32", device="cpu", cache_tokens=2048)
    make(tmp_path / "data", (path,), model, self_made=1, max_tokens=16)
    data = TrainingData.open(tmp_path / "data")
    data.check_model(model.target.info)
    assert data.prompts.tolist() == [0, 1]  # two turns, one text
    ids, answered = data[0]
    edges = np.flatnonzero(np.diff(answered.astype(int)) == 1)
    assert len(edges) == 2
    with LLM.from_target(model.target, model.codec, drafter="plain", budget=1) as llm:
        (answer,) = llm.generate(data.prompt_ids(0), SamplingParams(max_tokens=16))
    begin = int(edges[0]) + 1
    assert ids[begin : begin + len(answer.token_ids)].tolist() == answer.token_ids
    text = model.codec.decode(ids.tolist(), skip_special=False)
    assert "<|im_start|>user\nOnce more.<|im_end|>\n<|im_start|>assistant\n" in text
