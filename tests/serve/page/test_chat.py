"""Chats on the page with keyboard and mouse, checked by what the page shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import browser
import fake_core
import tiny_models
from browser import ENTER, ESCAPE, SHIFT, Open, Page
from runtime.errors import Overloaded
from runtime.tokenizer.tokenizer import Tokenizer
from serve import Engine
from serve.server.app import build_app

IDLE = '!document.body.classList.contains("running")'
ANSWERED = f'document.querySelector(".answer") && {IDLE}'
ANSWER = '(document.querySelector(".answer .text")?.textContent ?? "")'
KEY = "open-sesame-ü"


async def until(state: Callable[[], bool]) -> None:
    """Let the server run until the condition is true."""
    while not state():
        await asyncio.sleep(0.002)


async def figure(page: Page, name: str) -> str:
    return await page.text(f".answer:last-child [data-figure={name}] dd")


async def ask(page: Page, text: str = "Hello") -> None:
    """Send a message and wait for the complete answer."""
    await page.type("#prompt", text + ENTER)
    await page.until(ANSWERED)


async def test_message_sent_with_the_keyboard_streams_its_answer(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer, held=True, cache_report=True)
    core.num_cached = 3
    page = await chat(core)
    await page.type("#prompt", "Hello, engine" + ENTER)
    await until(lambda: core.num_open == 1)
    core.step()
    lengths = [await page.until(f"{ANSWER}.length")]
    for _ in range(3):
        core.step()
        lengths.append(await page.until(f"{ANSWER}.length > {lengths[-1]} && {ANSWER}.length"))
    assert lengths == sorted(set(lengths))
    while core.num_open:
        core.step()
    await page.until(ANSWERED)
    assert await page.text(".answer .text") == fake_core.TEXT
    assert "Hello, engine" in str(core.submitted[0].text)
    num_prompt, num_answer = (
        len(tokenizer.encode_batch([text], add_special_tokens=False)[0])
        for text in (str(core.submitted[0].text), fake_core.TEXT)
    )
    shown = [await figure(page, name) for name in ("prompt", "cached", "answer", "finish")]
    assert shown == [str(num_prompt), "3", str(num_answer + 1), "stop"]
    assert (await figure(page, "first")).endswith("s")
    assert (await figure(page, "speed")).endswith(" tokens/s")


async def test_last_answer_is_copied_with_a_click(chat: Open, tokenizer: Tokenizer) -> None:
    page = await chat(fake_core.FakeCore(tokenizer, text="Some **bold** text."))
    await page.value("""Object.defineProperty(navigator, "clipboard",
        { value: { writeText: async (text) => { window.copied = text; } } }) && 0""")
    await ask(page, "What is this?")
    await page.click(".answer .actions button:last-child")
    await page.until("window.copied")
    assert await page.value("window.copied") == "Some **bold** text."
    assert await page.text(".answer .actions button:last-child") == "Copied"


async def test_what_the_user_writes_is_shown_as_an_answer_is(chat: Open, tokenizer: Tokenizer) -> None:
    page = await chat(fake_core.FakeCore(tokenizer))
    await ask(page, f"What does `--page-size`{SHIFT}{ENTER}{SHIFT}do?")
    assert await page.text(".user .text code") == "--page-size"
    assert await page.value('document.querySelector(".user .text").textContent') == "What does --page-size\ndo?"
    figures = await page.value('[...document.querySelectorAll("[data-figure]")].map((row) => row.dataset.figure)')
    assert "cached" not in figures  # the server does not report cached tokens


async def test_shift_enter_starts_a_line_and_enter_sends_both(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer)
    page = await chat(core)
    await page.type("#prompt", f"one{SHIFT}{ENTER}{SHIFT}two")
    assert core.submitted == []
    await page.type("#prompt", ENTER)
    await page.until(ANSWERED)
    assert "one\ntwo" in str(core.submitted[0].text)


@pytest.mark.parametrize("way", ["Escape", "button"])
async def test_stopping_frees_the_request_and_keeps_the_text(chat: Open, tokenizer: Tokenizer, way: str) -> None:
    core = fake_core.FakeCore(tokenizer, held=True)
    page = await chat(core)
    await page.type("#prompt", "Hello" + ENTER)
    await until(lambda: core.num_open == 1)
    core.step()
    await page.until(ANSWER)
    await (page.press(ESCAPE) if way == "Escape" else page.click("#stop"))
    await until(lambda: core.num_open == 0)
    assert core.aborted == [core.submitted[0].id]
    await page.until(ANSWERED)
    assert fake_core.TEXT.startswith(await page.text(".answer .text"))
    assert await figure(page, "finish") == "stopped"


async def test_answer_of_a_real_engine_streams_and_stops(open_page: Open) -> None:
    never_ends = {"logit_bias": {"2": -100}}  # forbids the EOS token
    async with Engine(tiny_models.cached(), preferred_sampling_params=never_ends) as engine:
        page = await open_page(build_app(engine.core))
        await page.type("#prompt", "Once upon a time" + ENTER)
        short = await page.until(f"{ANSWER}.length")
        await page.until(f"{ANSWER}.length > {short}")
        assert engine.status().num_running == 1
        await page.press(ESCAPE)
        await until(lambda: engine.status().num_running == engine.status().num_waiting == 0)
        await page.until(ANSWERED)
        assert await figure(page, "finish") == "stopped"


async def test_markup_in_an_answer_is_text(chat: Open, tokenizer: Tokenizer) -> None:
    hostile = "<img src=x onerror=alert(1)> **<b>a</b>** `<i>`\n- <script>alert(2)</script>\n```\n<hr>\n```"
    page = await chat(fake_core.FakeCore(tokenizer, text=hostile))
    await ask(page, "<u>me</u>")
    assert await page.value('document.querySelectorAll("#log :is(img, b, i, script, hr, u)").length') == 0
    shown = ["<img src=x onerror=alert(1)> <b>a</b> <i>", "<script>alert(2)</script>", "<hr>"]
    blocks = '[...document.querySelector(".answer .text").children]'
    assert await page.value(f"{blocks}.map((block) => block.textContent)") == shown
    assert await page.text(".user .text") == "<u>me</u>"


async def test_a_little_markdown_is_shown_as_meant(chat: Open, tokenizer: Tokenizer) -> None:
    text = "# Head\nA **bold** `x*y*z` 2 * 3 * 4 _\n1. one\n2. *two*\n\n```py\na = **1**\n\nb\n```\nend ** `"
    page = await chat(fake_core.FakeCore(tokenizer, text=text))
    await ask(page)
    shown = await page.value("""[...document.querySelector(".answer .text").querySelectorAll("*")]
        .map((e) => e.tagName + (e.children.length ? "" : " " + e.textContent))""")
    assert shown == [
        "P", "STRONG Head", "P", "STRONG bold", "CODE x*y*z", "OL", "LI one", "LI", "EM two",
        "PRE", "CODE a = **1**\n\nb", "P end ** `",
    ]  # fmt: skip


async def test_long_hostile_markdown_does_not_freeze_the_page(chat: Open, tokenizer: Tokenizer) -> None:
    page = await chat(fake_core.FakeCore(tokenizer))
    took_ms = await page.value("""import("/page/markdown.js").then(({ render }) => {
        const started = performance.now();
        for (const piece of ["**a ", "`a ``b ", "*a", "- a\\n", "```\\n", "1. a\\n- b\\n", "# ", "a\\n"])
            render(document.createElement("div"), piece.repeat(20000));
        return performance.now() - started; })""")
    assert took_ms < 10_000


async def test_thought_is_folded_away(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer, text="<think>\nLet me see.\n</think>\n\nYes.")
    page = await chat(core)
    await ask(page)
    assert await page.text(".answer .text") == "Yes."
    assert await page.value('document.querySelector(".thought").open') is False
    await page.click(".thought summary")
    assert await page.text(".thought-text") == "Let me see."
    await page.type("#prompt", "Sure?" + ENTER)
    await page.until(f'document.querySelectorAll(".answer").length === 2 && {IDLE}')
    assert "<think>" not in str(core.submitted[1].text)
    assert "Yes." in str(core.submitted[1].text)


async def test_refused_request_says_why_and_can_be_tried_again(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer)
    core.refusal = Overloaded("The queue is full.", retry_after_s=3)
    page = await chat(core)
    await ask(page)
    assert await page.text(".answer .error") == "The queue is full."
    core.refusal = None
    await page.click(".answer .actions button")
    await page.until(f"{ANSWERED} && !document.querySelector('.answer .error')")
    assert await page.text(".answer .text") == fake_core.TEXT
    assert await page.value('document.querySelectorAll(".message").length') == 2


async def test_failure_in_the_middle_is_said_below_the_text(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer, held=True)
    page = await chat(core)
    await page.type("#prompt", "Hello" + ENTER)
    await until(lambda: core.num_open == 1)
    core.step()
    await page.until(ANSWER)
    core.failure = fake_core.broken_step()
    core.step()
    await page.until(ANSWERED)
    assert await page.text(".answer .error") == "A step failed."
    assert await page.text(".answer .text") != ""


async def test_failed_question_is_not_asked_again_with_the_next(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer)
    core.refusal = Overloaded("The queue is full.", retry_after_s=3)
    page = await chat(core)
    await ask(page, "first")
    core.refusal = None
    await page.type("#prompt", "second" + ENTER)
    await page.until(f'document.querySelectorAll(".answer").length === 2 && {IDLE}')
    assert "second" in str(core.submitted[0].text)
    assert "first" not in str(core.submitted[0].text)


async def test_missing_key_is_asked_for_and_kept_for_the_tab_only(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer, api_key=KEY)
    page = await chat(core)
    shown = '!document.querySelector("#key-form").hidden'
    await page.until(shown)
    await ask(page)
    assert await page.text(".answer .error") == "Unauthorized"
    await page.type("#key", "wrong" + ENTER)
    await page.until(f'{shown} && document.querySelector("#key-label").textContent.includes("not accept")')
    assert core.submitted == []
    await page.type("#key", KEY + ENTER)
    await page.until(f"{ANSWERED} && {ANSWER}")
    assert await page.text(".answer .text") == fake_core.TEXT
    assert await page.value("[Object.keys(sessionStorage).sort(), localStorage.length, document.cookie]") == [
        ["penstock-chat", "penstock-key"],
        0,
        "",
    ]


async def test_edited_message_replaces_the_last(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer)
    page = await chat(core)
    await ask(page, "river")
    await page.click(".user .actions button")
    assert await page.value('document.querySelector("#prompt").value') == "river"
    await page.press(ESCAPE)
    assert await page.value('document.querySelector("#prompt").value') == ""
    await page.click(".user .actions button")
    await page.type("#prompt", " bank" + ENTER)
    await page.until(f'document.querySelector(".user .text").textContent === "river bank" && {ANSWERED}')
    assert await page.value('document.querySelectorAll(".message").length') == 2
    assert str(core.submitted[1].text).count("river") == 1


async def test_new_chat_forgets_and_frees(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer, held=True)
    page = await chat(core)
    await page.type("#prompt", "forget me" + ENTER)
    await until(lambda: core.num_open == 1)
    await page.click("#new-chat")
    await until(lambda: core.num_open == 0)
    assert await page.value('document.querySelectorAll(".message").length') == 0
    core.held = False
    await ask(page, "again")
    assert "forget me" not in str(core.submitted[1].text)


async def test_example_is_asked_with_a_click(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer)
    page = await chat(core)
    question = await page.text(".example")
    await page.click(".example")
    await page.until(ANSWERED)
    assert question in str(core.submitted[0].text)


async def test_phone_never_scrolls_sideways(chat: Open, tokenizer: Tokenizer) -> None:
    wide = f"{'x' * 300}\n\n```\n{'y ' * 200}\n```\n\n- {'z' * 300} `{'w' * 200}`"
    page = await chat(fake_core.FakeCore(tokenizer, text=wide, served_model_name="/models/" + "m" * 200))
    await page.resize(360, 740, mobile=True, scale=2)
    too_wide = """["html", "main", "header", "footer", ".answer"].filter((name) => {
        const element = document.querySelector(name);
        return element && element.scrollWidth > Math.min(element.clientWidth, 360); })"""
    assert await page.value(too_wide) == []
    await ask(page, "q" * 300)
    assert await page.value(too_wide) == []
    await page.click("#show-settings")
    assert await page.value('document.querySelector("#settings").getBoundingClientRect().width <= 360')
    assert await page.value(too_wide) == []
    await page.press(ESCAPE)
    assert await page.value('document.querySelector("#settings").hidden')


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_stands_out_in_either_scheme(chat: Open, tokenizer: Tokenizer, scheme: str) -> None:
    page = await chat(fake_core.FakeCore(tokenizer))
    await page.prefer(scheme)
    colours = "(({ color, backgroundColor }) => [color, backgroundColor])(getComputedStyle(document.body))"
    ink, ground = (luminance(colour) for colour in await page.value(colours))
    assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) > 7
    assert (ground > ink) is (scheme == "light")


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(r, g, b)` by WCAG 2."""
    parts = [int(part) / 255 for part in colour.strip("rgb()").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


async def test_every_control_has_a_name_and_shows_its_focus(chat: Open, tokenizer: Tokenizer) -> None:
    page = await chat(fake_core.FakeCore(tokenizer))
    await ask(page)
    nameless = """[...document.querySelectorAll("button, input, textarea")].filter((element) =>
        !element.textContent.trim() && !element.labels?.length && !element.ariaLabel).length"""
    assert await page.value(nameless) == 0
    await page.press(browser.TAB)
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert await page.value(f"[document.activeElement.id, {outline}]") == ["send", "solid"]
