"""The pages keep the chat over a reload and figures over time, and copy the last request as a program."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import fake_core
import tiny_models
from browser import ENTER, Open, Page
from runtime.tokenizer.tokenizer import Tokenizer
from serve import Engine
from serve.server.app import build_app

ANSWERED = 'document.querySelector(".answer") && !document.body.classList.contains("running")'
QUESTION = 'What\'s "this"?\nBe brief: 猫'


async def ask(page: Page, text: str) -> None:
    await page.value(f"(document.querySelector('#prompt').value = {json.dumps(text)}) && 0")
    await page.type("#prompt", ENTER)
    await page.until(ANSWERED)


async def reload(page: Page) -> None:
    await page.value("(window.old = true, location.reload(), 0)")
    await page.until("window.old === undefined && document.readyState === 'complete'")


async def copied(page: Page, name: str) -> str:
    await page.value(
        """Object.defineProperty(navigator, "clipboard",
            { configurable: true, value: { writeText: async (text) => { window.copied = text; } } }) && 0"""
    )
    await page.value(
        f"""(window.copied = "", [...document.querySelectorAll(".actions button")]
            .find((each) => each.textContent === {json.dumps(name)}).click(), 0)"""
    )
    await page.until("window.copied")
    return await page.value("window.copied")


async def test_a_chat_and_its_settings_stay_over_a_reload(chat: Open, tokenizer: Tokenizer) -> None:
    core = fake_core.FakeCore(tokenizer, text="Some **bold** text.")
    page = await chat(core)
    await page.value("document.querySelector('#show-settings').click() || 0")
    await page.value(
        """(() => { for (const [id, value] of [["top-p", "0.5"], ["seed", "7"], ["system", "Be kind."]]) {
            const field = document.getElementById(id);
            field.value = value;
            field.dispatchEvent(new Event("change")); } return 0; })()"""
    )
    await ask(page, "Hello")
    await reload(page)
    await page.until("document.querySelector('.answer .text strong')")
    assert await page.text(".message.user .text") == "Hello"
    assert await page.value("document.querySelector('#seed').value") == "7"
    await ask(page, "And now?")
    [_, second] = core.submitted
    assert "Be kind." in str(second.text)
    assert "Hello" in str(second.text)
    assert "And now?" in str(second.text)
    assert (second.sampling.top_p, second.sampling.seed) == (0.5, 7)
    await page.click("#new-chat")
    await reload(page)
    assert await page.value("document.querySelectorAll('.message').length") == 0


async def test_the_last_request_is_copied_as_a_program(chat: Open, tokenizer: Tokenizer, tmp_path: Path) -> None:
    page = await chat(fake_core.FakeCore(tokenizer))
    await page.value(
        """Object.defineProperty(navigator, "clipboard",
            { configurable: true, value: { writeText: async () => {} } }) && 0"""
    )
    await ask(page, QUESTION)
    curl = await copied(page, "Copy as curl")
    program = tmp_path / "curl"  # a stand-in that prints its last argument
    program.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[-1])")
    program.chmod(0o700)
    shell = subprocess.run(
        ["/bin/sh", "-c", curl], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    body = json.loads(shell.stdout)
    assert body["messages"] == [{"role": "user", "content": QUESTION}]
    tree = ast.parse(await copied(page, "Copy as Python"))
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and len(each.keywords) > 3]
    [messages] = [each.value for each in calls[0].keywords if each.arg == "messages"]
    assert ast.literal_eval(messages) == body["messages"]


async def test_the_live_page_draws_figures_over_time_and_pages_link_to_each_other(open_page: Open) -> None:
    async with Engine(tiny_models.cached()) as engine:
        page = await open_page(build_app(engine.core))
        assert await page.value("document.querySelector('nav a[href=docs]') !== null")
        await page.click("nav a[href=live]")
        await page.until("document.querySelectorAll('.history polyline').length === 3")
        line = "document.querySelector('[data-chart=\"Tokens/s\"] polyline').getAttribute('points')"
        await page.until(f"{line}.split(' ').length >= 2")
