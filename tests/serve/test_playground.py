"""The playground's files: served with strict headers, complete in the package, without other hosts, and optional."""

from __future__ import annotations

import gzip
import re
import urllib.request
from collections.abc import Iterator

import pytest

from draftwood.serve.endpoints.playground import HEADERS, static_files
from tests.tools.paths import ROOT
from tests.tools.serve import Running, serving

FOLDER = ROOT / "src" / "draftwood" / "serve" / "playground"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def test_the_page_and_its_files(server: Running) -> None:
    page = server.request("/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    named = re.findall(r'(?:href|src)="(playground/[^"]+)"', page.text)
    assert named
    for name in named:
        assert server.request(f"/{name}").status == 200
    for name in static_files():
        found = server.request(f"/playground/{name}")
        assert found.status == 200
        assert {key: found.headers[key] for key in HEADERS} == HEADERS
        assert found.text == (FOLDER / name).read_text()


def test_modules_import_files_that_exist() -> None:
    for name, file in static_files().items():
        for other in re.findall(r'from "\./([^"]+)"', file.content.decode()):
            assert other in static_files(), f"{name} imports {other}"


def test_other_hosts_and_inline_code_are_forbidden_and_not_used() -> None:
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name, file in static_files().items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|innerHTML|eval\(| style=|<style|<script>", text), name


def test_browsers_keep_the_files(server: Running) -> None:
    tag = server.request("/playground/app.js").headers["etag"]
    again = server.request("/playground/app.js", headers={"If-None-Match": tag})
    assert (again.status, again.text) == (304, "")
    assert server.request("/playground/style.css", headers={"If-None-Match": tag}).status == 200
    request = urllib.request.Request(f"{server.url}/playground/app.js", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request) as found:
        assert found.headers["content-encoding"] == "gzip"
        assert gzip.decompress(found.read()) == static_files()["app.js"].content


@pytest.mark.parametrize("name", ["nothing.js", "../app.py", "%2e%2e/app.py", "__init__.py", "a/b"])
def test_other_files_cannot_be_read(server: Running, name: str) -> None:
    assert server.request(f"/playground/{name}").status == 404


def test_the_page_needs_no_key_and_can_be_off() -> None:
    with serving({"api_keys": ("right",)}) as server:
        assert server.request("/").status == 200
        assert server.request("/v1/models").status == 401
    with serving({"playground": False}) as server:
        assert server.request("/").status == server.request("/playground/app.js").status == 404
        assert server.request("/health").status == 200


def test_other_host_names_get_no_page(server: Running) -> None:
    assert server.request("/", headers={"Host": "evil.example"}).status == 403


def test_models_name_the_drafters_that_need_no_options(server: Running) -> None:
    (model,) = server.request("/v1/models").body["data"]
    assert {"goose", "plain", "stand"} <= set(model["drafters"])
    assert "rest" not in model["drafters"]
    assert (model["drafter"], model["max_budget"]) == ("plain", 12)
