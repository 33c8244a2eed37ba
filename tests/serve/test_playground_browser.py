"""The playground in a browser: ask, watch, scrub, replay, compare, switch the drafter, small screens, keys only."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tools.serve import NAME, Running, eventually, serving

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
TOKENS = 40


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        try:
            found = running.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        except playwright.Error:
            pytest.skip("Chromium is not installed")
        yield found
        found.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(drafter="goose") as running:
        yield running


def open_page(browser: Any, server: Running, viewport: Any = DESKTOP, **options: Any) -> Any:
    page = browser.new_page(viewport=viewport, reduced_motion="reduce", **options)
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(server.url)
    return page


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    found = open_page(browser, server)
    playwright.expect(found.locator("#model")).to_have_text(NAME)
    found.evaluate(f"document.getElementById('max-tokens').value = {TOKENS}")
    yield found
    assert found.problems == []
    found.close()


def ask(page: Any, text: str = "hello hello hello") -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".assistant[aria-busy=false]")


def read_title(page: Any) -> tuple[int, int]:
    words = page.inner_text("#cycle-title").split()
    return int(words[1]), int(words[3])


def answer_text(page: Any, column: int = 0) -> str:
    return str(page.locator(".tokens").nth(column).evaluate("element => element.textContent"))


def test_an_answer_is_coloured_by_source_and_has_a_tree(page: Any, server: Running) -> None:
    ask(page)
    from draftwood import SamplingParams

    expected = server.llm.chat([{"role": "user", "content": "hello hello hello"}], SamplingParams(max_tokens=TOKENS))[0]
    assert answer_text(page) == expected.text
    now, total = read_title(page)
    assert now == total == expected.stats.cycles
    assert int(page.inner_text("#f-passes")) == total
    assert page.locator("#tree .node").count() >= 2
    assert page.locator(".legend li").count() >= 2
    styles = {
        each.evaluate("e => getComputedStyle(e).textDecorationStyle") for each in page.locator(".legend .token").all()
    }
    assert len(styles) == page.locator(".legend li").count()  # not only colours
    assert "guess" in page.locator("#tree svg").get_attribute("aria-label")


def test_scrubbing_by_slider_keys_text_and_chart(page: Any) -> None:
    ask(page)
    total = read_title(page)[1]
    page.locator("#scrub").focus()
    page.keyboard.press("Home")
    assert read_title(page)[0] == 1
    assert page.locator(".cycle.future").count() == total - 1
    page.keyboard.press("Escape")  # leaves the slider
    page.keyboard.press("ArrowRight")
    assert read_title(page)[0] == 2
    page.keyboard.press("End")
    assert read_title(page)[0] == total
    assert page.locator(".cycle.future").count() == 0
    page.locator(".cycle").nth(2).dispatch_event("click")
    assert read_title(page)[0] == 3
    page.locator("#chart-pass .pick").nth(0).dispatch_event("click")
    assert read_title(page)[0] == 1
    assert "Cycle 1." in page.inner_text("#status")


def test_the_tree_agrees_with_the_text(page: Any) -> None:
    ask(page)
    page.click("#nodes summary")
    for _ in range(read_title(page)[1]):
        accepted = page.locator("#tree .node.accepted").count()
        own = page.locator("#tree .node.own").count()
        tokens = page.locator("#chart-pass .pick.current .part").count()
        assert accepted + own == tokens
        assert page.locator("#node-rows tr").count() == page.locator("#tree .node").count()
        page.click("#back")


def test_a_replay_ends_at_the_last_cycle(page: Any) -> None:
    ask(page)
    page.select_option("#speed", "1")
    page.click("#play")
    playwright.expect(page.locator("#play")).to_have_text("Replay")
    now, total = read_title(page)
    assert now == total
    page.select_option("#speed", "step")
    page.click("#play")
    assert read_title(page)[0] == 1
    page.click("#play")  # pauses


def test_the_plain_run_beside_it(page: Any) -> None:
    ask(page)
    page.click(".compare")
    verdict = page.locator(".verdict")
    playwright.expect(verdict).to_contain_text("identical text")
    assert answer_text(page, 0) == answer_text(page, 1)
    assert f"instead of {TOKENS}" in verdict.inner_text()
    assert page.locator(".line.plain").count() == 1


def test_another_drafter_and_budget(page: Any) -> None:
    page.click("#settings summary")
    page.select_option("#drafter", "recycling")
    page.fill("#budget", "4")
    assert page.inner_text("#settings-summary") == "recycling, temperature 0, budget 4"
    ask(page)
    for _ in range(5):
        assert page.locator("#tree .node:not(.own)").count() <= 4
        page.click("#back")
    ask(page, "again")  # a second turn
    assert page.locator(".assistant").count() == 2
    page.locator(".assistant").nth(0).get_by_text("Show its trees").click()
    assert page.locator(".assistant").nth(0).evaluate("e => e.classList.contains('selected')")


def test_stopping(page: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step = server.llm.engine.step  # slowly: a random model may end its answer at any time
    monkeypatch.setattr(server.llm.engine, "step", lambda *args: (time.sleep(0.05), step(*args))[1])
    page.evaluate("document.getElementById('max-tokens').value = 3000")
    page.fill("#prompt", "z")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".cycle")
    page.keyboard.press("Escape")
    page.wait_for_selector(".assistant[aria-busy=false]")
    assert eventually(lambda: not server.llm.engine.has_work)
    assert "stopped" in page.inner_text(".figures")


def test_errors_of_the_server_are_shown(browser: Any, server: Running) -> None:
    page = open_page(browser, server)
    playwright.expect(page.locator("#model")).to_have_text(NAME)
    page.evaluate("document.getElementById('budget').value = 5000")
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    playwright.expect(page.locator("#error")).to_contain_text("budget must be an integer")
    assert page.input_value("#prompt") == "hello"  # nothing is lost
    page.close()


def test_only_the_keyboard(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("the cat sat on the mat")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant[aria-busy=false]")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowLeft")
    now, total = read_title(page)
    assert now == total - 1
    page.keyboard.press("c")
    playwright.expect(page.locator(".verdict")).to_contain_text("identical")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Enter")
    assert not page.locator("#help").is_visible()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"prompt", "send", "scrub", "play", "speed", "tree", "theme"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser: Any, server: Running, scheme: str) -> None:
    page = open_page(browser, server, PHONE, color_scheme=scheme)
    playwright.expect(page.locator("#model")).to_have_text(NAME)
    page.evaluate(f"document.getElementById('max-tokens').value = {TOKENS}")
    ask(page)
    page.click("#settings summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for name in ("#send", "#play", "#theme"):
        assert page.locator(name).bounding_box()["height"] >= 32
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")  # light
    page.click("#theme")  # dark
    assert (page.evaluate("getComputedStyle(document.body).backgroundColor") == ground) is (scheme == "dark")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.problems == []
    page.close()


def test_a_key_is_asked_for(browser: Any) -> None:
    with serving({"api_keys": ("right",)}) as server:
        page = open_page(browser, server)
        playwright.expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#key-error")).to_contain_text("The API key is wrong")
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#model")).to_have_text(NAME)
        page.evaluate("document.getElementById('max-tokens').value = 4")
        ask(page)
        page.reload()
        playwright.expect(page.locator("#model")).to_have_text(NAME)
        page.close()


def test_a_hint_where_no_guesses_pay(browser: Any, page: Any) -> None:
    ask(page)
    playwright.expect(page.locator(".assistant > .hint")).to_be_hidden()  # there were guesses
    with serving(drafter="goose", budget=1) as alone:
        found = open_page(browser, alone)
        playwright.expect(found.locator("#model")).to_have_text(NAME)
        ask(found)
        playwright.expect(found.locator(".assistant > .hint")).to_be_visible()
        found.close()
