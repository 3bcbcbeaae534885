"""Images on the chat page: dropped or pasted, shown, sent and refused."""

from __future__ import annotations

import base64

import fake_core
import tiny_seeing
from browser import ENTER, Open, Page
from runtime.tokenizer.tokenizer import Tokenizer
from serve import Engine
from serve.server.app import build_app

ANSWERED = 'document.querySelector(".answer") && !document.body.classList.contains("running")'
NUM_ATTACHED = 'document.querySelectorAll("#attachments .picture").length'
KNOWS_SERVER = 'document.getElementById("model").textContent !== ""'


async def give(page: Page, way: str) -> None:
    """Paste or drop a PNG."""
    content = base64.b64encode(tiny_seeing.png(tiny_seeing.picture(40, 30, 1))).decode()
    await page.value(f"""(() => {{
      const bytes = Uint8Array.from(atob("{content}"), (letter) => letter.charCodeAt(0));
      const data = new DataTransfer();
      data.items.add(new File([bytes], "a.png", {{ type: "image/png" }}));
      const paste = new ClipboardEvent("paste", {{ clipboardData: data, bubbles: true, cancelable: true }});
      const drop = new DragEvent("drop", {{ dataTransfer: data, bubbles: true, cancelable: true }});
      document.getElementById("prompt").dispatchEvent("{way}" === "paste" ? paste : drop);
      return true;
    }})()""")


async def test_pasted_and_dropped_images_are_sent(open_page: Open) -> None:
    async with Engine(tiny_seeing.cached("llava"), max_total_tokens=4096, random_seed=1) as engine:
        page = await open_page(build_app(engine.core))
        await page.until(KNOWS_SERVER)
        await give(page, "paste")
        await page.until(f"{NUM_ATTACHED} === 1")
        await give(page, "drop")
        await page.until(f"{NUM_ATTACHED} === 2")
        await page.click("#attachments button")
        await page.until(f"{NUM_ATTACHED} === 1")
        await page.click("#show-settings") if await page.value('document.getElementById("settings").hidden') else None
        await page.type("#max-tokens", "4")
        await page.type("#prompt", "What is it?")
        await page.press(ENTER)
        await page.until(ANSWERED)
        assert await page.value('document.querySelectorAll(".message.user .picture").length') == 1
        assert await page.value('document.querySelector(".message.user .picture").naturalWidth') == 40
        assert await page.value(NUM_ATTACHED) == 0
        assert await page.value('document.querySelectorAll(".error:not(:empty)").length') == 0
        assert engine.core.media is not None
        assert engine.core.media.num_images == 1


async def test_a_model_without_eyes_says_so(open_page: Open, chat: Open, tokenizer: Tokenizer) -> None:
    page = await chat(fake_core.FakeCore(tokenizer))  # pyright: ignore
    await page.until(KNOWS_SERVER)
    await give(page, "paste")
    await page.until('document.getElementById("notice").textContent === "This model does not take images."')
    assert await page.value(NUM_ATTACHED) == 0
