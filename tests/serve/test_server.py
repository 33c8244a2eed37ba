"""The server on a real port: the same output as the library, streams, errors, cancellation, shutdown, API keys."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from draftwood import SamplingParams
from draftwood.drafters.plain import PlainDrafter
from draftwood.engine import RequestStats
from draftwood.serve.metrics import GAUGES, Metrics
from draftwood.tree import DraftTree
from tests.tools.engine import PROMPTS
from tests.tools.serve import NAME, Reply, Running, eventually, raw_request, serving, user_message

openai = pytest.importorskip("openai")

TOKENS = 24
GREEDY = SamplingParams(max_tokens=TOKENS)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(drafter="goose") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_a_chat_has_the_output_of_the_library(server: Running, client: Any) -> None:
    messages = user_message("hello hello hello")
    server.llm.engine.clear()  # of what other tests left in the cache
    expected = server.llm.chat(messages, GREEDY)[0]
    found = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_completion_tokens=TOKENS)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.prompt_tokens == expected.stats.prompt_tokens
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.prompt_tokens_details.cached_tokens == 0  # the library is another client
    assert found.draftwood["tokens_per_pass"] >= 1.0


@pytest.mark.parametrize("number", [1, 3])
def test_a_stream_has_the_output_of_a_whole_response(client: Any, number: int) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "messages": user_message("the cat sat on"),
        "max_tokens": TOKENS,
        "seed": 5,
    }
    whole = client.chat.completions.create(**fields, n=number)
    chunks = list(
        client.chat.completions.create(**fields, n=number, stream=True, stream_options={"include_usage": True})
    )
    texts, roles, ends = [""] * number, [""] * number, [None] * number
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert ends[choice.index] is None
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role or ""
        ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert roles == ["assistant"] * number
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_has_no_usage_by_default(client: Any) -> None:
    chunks = client.chat.completions.create(model=NAME, messages=user_message("a"), max_tokens=4, stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_completions_of_several_prompts(server: Running, client: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, n=2)
    expected = server.llm.generate(PROMPTS[:3], params)
    found = client.completions.create(model=NAME, prompt=PROMPTS[:3], max_tokens=8, temperature=0.8, seed=3, n=2)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert [choice.text for choice in found.choices] == [each.text for each in expected]
    assert found.usage.prompt_tokens == sum(each.stats.prompt_tokens for each in expected[::2])


def test_prompts_as_token_ids(server: Running, client: Any) -> None:
    ids = server.llm.tokenizer.encode("xyz")
    by_ids = client.completions.create(model=NAME, prompt=ids, temperature=0)
    by_rows = client.completions.create(model=NAME, prompt=[ids, ids], temperature=0)
    by_text = client.completions.create(model=NAME, prompt="xyz", temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text == by_rows.choices[1].text
    assert by_text.usage.completion_tokens == 16  # OpenAI's default


def test_logprobs_of_chats(server: Running, client: Any) -> None:
    messages = user_message("hello")
    (expected,) = server.llm.chat(messages, SamplingParams(max_tokens=6, logprobs=2))
    fields: dict[str, Any] = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 6}
    found = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert expected.logprobs is not None
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected.logprobs])
    assert all(len(each.top_logprobs) == 2 and each.top_logprobs[0].logprob >= each.logprob - 1e-9 for each in found)
    chunks = client.chat.completions.create(**fields, logprobs=True, stream=True)
    parts = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [each.token for each in parts] == [each.token for each in found]


def test_logprobs_of_completions(client: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "prompt": "abc", "max_tokens": 12, "temperature": 0, "logprobs": 1}
    choice = client.completions.create(**fields).choices[0]
    logprobs = choice.logprobs
    assert (
        len(logprobs.tokens)
        == len(logprobs.token_logprobs)
        == len(logprobs.top_logprobs)
        == len(logprobs.text_offset)
        == 12
    )
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[-1] <= len(choice.text)
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**fields, stream=True)]
    assert [offset for part in parts if part for offset in part.text_offset] == logprobs.text_offset


def test_concurrent_requests_have_their_own_output(server: Running, client: Any) -> None:
    expected = {prompt: server.llm.generate(prompt, GREEDY)[0].text for prompt in PROMPTS}
    gate = threading.Barrier(len(PROMPTS))

    def ask(prompt: str) -> str:
        gate.wait()
        found = client.completions.create(model=NAME, prompt=prompt, max_tokens=TOKENS, temperature=0)
        return str(found.choices[0].text)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert dict(zip(PROMPTS, pool.map(ask, PROMPTS), strict=True)) == expected


def test_stop_strings_with_another_drafter(server: Running, client: Any) -> None:
    whole = server.llm.generate("one two", GREEDY)[0].text
    stop = whole[5:7]
    expected = server.llm.generate("one two", SamplingParams(max_tokens=TOKENS, stop=(stop,)))[0]
    found = client.completions.create(
        model=NAME, prompt="one two", max_tokens=TOKENS, temperature=0, stop=stop, extra_body={"drafter": "sam"}
    )
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected.text, "stop")


def test_a_correct_prediction_takes_fewer_passes(server: Running, client: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "messages": user_message("q w e"), "temperature": 0, "max_tokens": TOKENS}
    plain = client.chat.completions.create(**fields, extra_body={"drafter": "pld"})
    text = plain.choices[0].message.content
    found = {
        content: client.chat.completions.create(
            **fields, prediction={"type": "content", "content": content}, extra_body={"drafter": "pld"}
        )
        for content in (text, "nothing like it")
    }
    assert {each.choices[0].message.content for each in found.values()} == {text}
    assert found[text].draftwood["passes"] < plain.draftwood["passes"]


def test_requests_of_disconnected_clients_are_cancelled(server: Running, client: Any) -> None:
    engine = server.llm.engine
    fields: dict[str, Any] = {
        "model": NAME,
        "messages": user_message("z"),
        "max_tokens": 3000,
        "extra_body": {"ignore_eos": True},
    }
    before = count_disconnected(server)
    stream = client.chat.completions.create(**fields, stream=True)
    next(iter(stream))
    assert engine.has_work
    stream.close()
    assert eventually(lambda: not engine.has_work)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(**fields)
    assert eventually(lambda: not engine.has_work)
    assert "draftwood_open_samples 0.0\n" in server.request("/metrics").text
    assert count_disconnected(server) == before + 2


def count_disconnected(server: Running) -> float:
    """Chats that their clients left, by the metrics."""
    found = re.search(r'requests_total{path="/v1/chat/completions",status="499"} (.*)', server.request("/metrics").text)
    return float(found[1]) if found else 0.0


def test_models_health_and_metrics(server: Running, client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    assert server.request("/health").body["status"] == "ok"

    def outputs() -> float:
        lines = server.request("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("draftwood_output_tokens_total "))

    before = outputs()
    found = client.completions.create(model=NAME, prompt="abc", max_tokens=7, temperature=0)
    assert outputs() - before == found.usage.completion_tokens


def test_metrics_have_expected_and_real_acceptance_by_source() -> None:
    metrics = Metrics(dict.fromkeys(GAUGES, lambda: 0))
    tree = DraftTree((1, 2, 3), (-1, 0, 0), (0, 1, 1), ("root", "context", "transition"), (1.0, 0.75, 0.125))
    stats = RequestStats()
    stats.note_tree(tree, [1], 2)
    metrics.count_sample(stats)
    found = {
        name: metrics.registry.get_sample_value(f"draftwood_{name}_guesses_total", {"source": "context"})
        for name in ("tried", "expected", "accepted")
    }
    assert found == {"tried": 1.0, "expected": 0.75, "accepted": 1.0}


def test_the_server_survives_a_failed_cycle(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets no internal details."""

    def broken(*args: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("a secret")

    monkeypatch.setattr(server.llm.engine, "step", broken)
    failed = server.chat(max_tokens=4)
    assert failed.status == 500
    assert "secret" not in failed.text
    assert server.chat(max_tokens=4).status == 200
    assert "draftwood_open_samples 0.0\n" in server.request("/metrics").text


def test_an_error_during_a_stream_is_its_last_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = server.llm.engine.step, []

    def broken(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            monkeypatch.undo()
            raise RuntimeError
        step(*args)

    monkeypatch.setattr(server.llm.engine, "step", broken)
    found = server.chat(stream=True, max_tokens=200, ignore_eos=True, drafter="plain")
    events = found.text.split("\n\n")
    assert found.status == 200
    assert '"error"' in events[-3]
    assert events[-2:] == ["data: [DONE]", ""]


def test_an_api_key() -> None:
    with serving({"api_keys": ("wrong too", "right")}) as server:
        assert server.request("/health").status == 200
        assert server.request("/v1/models").status == 401
        assert (
            server.request("/v1/models", headers={"Authorization": "Bearer wrong"}).error["code"] == "invalid_api_key"
        )
        assert server.request("/v1/models", headers={"Authorization": "right"}).status == 401
        assert server.request("/v1/models", headers={"Authorization": "bearer right"}).status == 200
    with serving({"api_keys": ("schlüssel",)}) as server:
        key = "schlüssel".encode().decode("latin-1")  # the bytes of headers are sent as latin-1
        assert server.request("/v1/models", headers={"Authorization": f"Bearer {key}"}).status == 200


def test_requests_beyond_the_queue_get_status_503(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"max_samples": 2}) as server:
        gate, step = threading.Event(), server.llm.engine.step

        def waiting(*args: Any) -> None:
            gate.wait()
            step(*args)

        monkeypatch.setattr(server.llm.engine, "step", waiting)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.chat, max_tokens=4)
            assert eventually(lambda: server.llm.engine.has_work)
            refused = server.chat(n=2, max_tokens=4)
            gate.set()
            assert first.result().status == 200
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.error["code"] == "server_busy"
        assert eventually(lambda: "draftwood_open_samples 0.0\n" in server.request("/metrics").text)
        assert server.chat(n=2, max_tokens=4).status == 200


def test_requests_larger_than_the_queue_get_status_400() -> None:
    with serving({"max_samples": 2}) as server:
        assert (server.chat(n=3).status, server.chat(n=3).error["param"]) == (400, "n")
        prompts = server.request("/v1/completions", {"model": NAME, "prompt": ["a"] * 1000})
        assert (prompts.status, prompts.error["param"]) == (400, "prompt")


class FailingEnd(PlainDrafter):
    """Fails when its request ends."""

    name = "failing_end"

    def end(self) -> None:
        raise RuntimeError("a secret")


class FailingPropose(PlainDrafter):
    name = "failing_propose"

    def propose(self, budget: int) -> DraftTree:
        raise ZeroDivisionError("a secret")


@pytest.mark.parametrize(("drafter", "status"), [(FailingEnd, 200), (FailingPropose, 500)])
def test_drafters_that_fail(drafter: type[PlainDrafter], status: int, caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged, and other requests are not affected."""
    with serving(drafter=drafter) as server:
        for _ in range(3):
            found = server.chat(max_tokens=4)
            assert found.status == status
            assert "secret" not in found.text
        assert server.chat(max_tokens=4, drafter="pld").status == 200
        assert server.request("/health").status == 200
        assert "draftwood_open_samples 0.0\n" in server.request("/metrics").text
    assert "a secret" in caplog.text


def test_health_reports_a_dead_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setattr("draftwood.serve.runner.Runner.is_alive", False)
        assert server.request("/health").status == 503


def test_the_runner_survives_a_failed_command(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise RuntimeError

    monkeypatch.setattr(server.llm.engine, "cancel", broken)
    _disconnect_during_stream(server)
    assert eventually(lambda: "draftwood_open_samples 0.0\n" in server.request("/metrics").text)
    assert server.chat(max_tokens=4).status == 200


def _disconnect_during_stream(server: Running) -> None:
    fields = {"model": NAME, "messages": user_message("a"), "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with server.connect(raw_request(json.dumps(fields).encode())) as connection:
        connection.recv(100)


def test_an_incomplete_body_does_not_block_the_shutdown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("draftwood.serve.server.GRACE_SECONDS", 1)
    with serving() as server:
        connection = server.connect(raw_request(b"{", length=100))
        time.sleep(0.2)
    with connection:
        assert b"503" in connection.recv(1000)
    assert "Traceback" not in caplog.text


def test_cors_headers() -> None:
    with serving() as server:
        assert server.request("/v1/models", method="OPTIONS").status == 405
        assert "access-control-allow-origin" not in server.request("/v1/models").headers
    with serving({"allow_origin": "https://page"}) as server:
        assert server.request("/v1/models", method="OPTIONS").status == 204
        for reply in (server.request("/v1/models"), server.chat(n=0), server.chat(max_tokens=2, stream=True)):
            assert reply.headers["access-control-allow-origin"] == "https://page"


def test_shutdown_cancels_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.serve.server.GRACE_SECONDS", 1)
    answers: list[Reply] = []
    with serving() as server:
        step = server.llm.engine.step

        def slowly(*args: Any) -> None:
            time.sleep(0.01)
            step(*args)

        monkeypatch.setattr(server.llm.engine, "step", slowly)
        asking = threading.Thread(
            target=lambda: answers.append(server.chat(max_tokens=3500, ignore_eos=True, stream=True))
        )
        asking.start()
        assert eventually(lambda: server.llm.engine.has_work)
    asking.join()
    assert not server.llm.engine.has_work
    (answer,) = answers
    assert answer.status == 200
    assert "The server is shutting down" in answer.text.split("\n\n")[-3]
