"""What clients can reach and learn: web pages, other clients' texts, logs, a request that would occupy the server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwood.serve.logs import RequestLog
from tests.tools.serve import NAME, Running, eventually, serving, user_message

SECRET = "the password of the other client is swordfish " * 3
KEYS = {"api_keys": ("one", "two")}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "[evil]:8000", "1.2"])
def test_other_host_names_are_refused_without_a_key(server: Running, host: str) -> None:
    """A web page can point its own domain name to this machine (DNS rebinding)."""
    for path in ("/v1/models", "/health", "/metrics", "/nowhere"):
        found = server.request(path, headers={"Host": host})
        assert (found.status, found.error["code"]) == (403, "host_not_allowed")
    assert server.chat(headers={"Host": host}).status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]", "192.168.1.5"])
def test_local_host_names_and_addresses_are_allowed(server: Running, host: str) -> None:
    assert server.request("/v1/models", headers={"Host": host}).status == 200


def test_further_host_names_and_keys() -> None:
    with serving({"allow_hosts": ("Models.example",)}) as server:
        assert server.request("/v1/models", headers={"Host": "models.example:9000"}).status == 200
        assert server.request("/v1/models", headers={"Host": "evil.example"}).status == 403
    with serving(KEYS) as server:  # no web page knows the key
        headers = {"Host": "any.example", "Authorization": "Bearer two", "Content-Type": "text/plain"}
        assert server.request("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_bodies_that_any_web_page_can_send_are_refused_without_a_key(server: Running, kind: str) -> None:
    found = server.chat(headers={"Content-Type": kind}, max_tokens=1)
    assert (found.status, found.error["code"]) == (415, "unsupported_media_type")
    assert server.chat(headers={"Content-Type": "Application/JSON; charset=utf-8"}, max_tokens=1).status == 200


def ask(server: Running, key: str, text: str, **fields: Any) -> Any:
    return server.chat({"Authorization": f"Bearer {key}"}, messages=user_message(text), temperature=0, **fields).body


@pytest.mark.parametrize("shared", [False, True])
def test_the_cache_is_reused_within_one_key(shared: bool) -> None:
    with serving({**KEYS, "share_cache": shared}) as server:

        def count_cached(key: str) -> int:
            usage = ask(server, key, SECRET, max_tokens=4)["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert count_cached("one") == 0
        assert (count_cached("two") > 0) is shared
        assert count_cached("one") > 0
        assert count_cached("two") > 0


@pytest.mark.parametrize("shared", [False, True])
def test_drafts_are_learned_within_one_key(shared: bool) -> None:
    """Else the number of passes would tell what others have generated."""
    with serving({**KEYS, "share_cache": shared}, drafter="recycling", memory="process") as server:

        def count_passes(key: str) -> int:
            return int(ask(server, key, "hello", max_tokens=40, ignore_eos=True)["draftwood"]["passes"])

        first, second = count_passes("one"), count_passes("two")
        assert (second < first) is shared
        assert count_passes("one") < first


def test_without_keys_addresses_are_clients(server: Running) -> None:
    for expected in (0, 1):
        found = server.chat(messages=user_message(SECRET), max_tokens=2).body["usage"]
        assert (found["prompt_tokens_details"]["cached_tokens"] > 0) == bool(expected)
    job = server.llm.request(
        server.llm.tokenizer.apply_chat(user_message(SECRET)), reuse=True, owner="address 10.0.0.1"
    )
    (request_id,) = server.llm.engine.submit(job)
    last = list(server.llm.engine.events([request_id]))[-1]
    assert last.stats.reused_tokens == 0


def test_the_address_of_another_client_cannot_be_claimed(tmp_path: Path) -> None:
    with serving({"request_log": str(tmp_path / "log")}) as server:
        server.request("/health", headers={"X-Forwarded-For": "10.0.0.1"})
    assert json.loads((tmp_path / "log").read_text())["client"] == "127.0.0.1"


def test_the_request_log_has_no_texts(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with serving({"request_log": str(path)}) as server:
        answer = server.chat(messages=user_message("swordfish"), max_tokens=4, swordfish=1, user="swordfish").body
        streamed = server.chat(messages=user_message("swordfish"), max_tokens=4, stream=True, n=2)
        server.chat(stop="swordfish" * 100)
        server.chat(model="swordfish")
        server.request("/swordfish")
        assert eventually(lambda: path.read_text().count("\n") == 5)
        path.rename(tmp_path / "rotated")
        server.request("/health")
    lines = [json.loads(line) for line in (tmp_path / "rotated").read_text().splitlines()]
    assert streamed.status == 200
    assert [line["status"] for line in lines] == [200, 200, 400, 404, 404]
    assert [line["path"] for line in lines] == ["/v1/chat/completions"] * 4 + ["other"]
    assert lines[0]["output_tokens"] == answer["usage"]["completion_tokens"]
    assert lines[0]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert lines[1]["samples"] == 2
    assert all(line["seconds"] >= 0 and line["time"] and line["client"] == "127.0.0.1" for line in lines)
    assert "swordfish" not in (tmp_path / "rotated").read_text()
    assert json.loads(path.read_text())["path"] == "/health"


def test_the_request_log_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog("-")
    log.write({"status": 200})
    log.close()
    assert json.loads(capsys.readouterr().err)["status"] == 200


def test_parsing_does_not_block_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request is being parsed, others are answered."""
    gate = threading.Event()
    monkeypatch.setattr(
        "draftwood.serve.endpoints.generation.parse_body", lambda body: (gate.wait(20), json.loads(body))[1]
    )
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(server.chat(max_tokens=1).status))
    thread.start()
    time.sleep(0.05)
    assert server.request("/health").status == 200
    assert not found
    gate.set()
    thread.join()
    assert found == [200]


def test_whole_responses_are_built_outside_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.serve.formats import CompletionFormat

    in_loop = []
    build = CompletionFormat.whole

    def note(self: CompletionFormat, *args: Any) -> Any:
        try:
            asyncio.get_running_loop()
            in_loop.append(True)
        except RuntimeError:  # there is none in this thread
            in_loop.append(False)
        return build(self, *args)

    monkeypatch.setattr(CompletionFormat, "whole", note)
    assert server.chat(max_tokens=2, logprobs=True, top_logprobs=20).status == 200
    assert in_loop == [False]


def test_the_server_does_not_name_its_software(server: Running) -> None:
    assert "server" not in server.request("/health").headers


def test_names_of_served_models(server: Running) -> None:
    assert [model["id"] for model in server.request("/v1/models").body["data"]] == [NAME]
    assert server.request("/v1/models/another").status == 404


def test_others_go_on_while_a_drafter_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood import llm as module

    gate, make = threading.Event(), module.make_factory

    def slowly(*args: Any) -> Any:
        assert gate.wait(20)
        return make(*args)

    with serving() as server:
        monkeypatch.setattr(module, "make_factory", slowly)
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(server.chat(max_tokens=1, drafter="goose").status))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        assert server.chat(max_tokens=4).status == 200
        assert not found
        gate.set()
        for thread in threads:
            thread.join()
        assert found == [200, 200]
        assert len(server.llm._factories) == 2
