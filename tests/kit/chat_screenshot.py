"""Write the picture of the chat page that the documentation shows:

    python tests/kit/chat_screenshot.py                         # the demo model, to docs/images/chat.png
    python tests/kit/chat_screenshot.py --model-path DIR --out chat.png --scheme dark --ask "Hello"

It serves the model in this process and asks greedily, so the picture is the same until the model changes.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import browser
import http_server
from serve import Engine
from serve.server.app import build_app

OUT = Path(__file__).parent.parent.parent / "docs" / "images" / "chat.png"
QUESTIONS = ("What is Penstock?", "What does --chunked-prefill-size do?", "What is the capital of Portugal?")
SIZE = (1200, 800)  # CSS pixels


async def screenshot(model_path: str | None, questions: Sequence[str], scheme: str) -> bytes:
    """Return the page after the answers to the questions, as a PNG."""
    name = {"served_model_name": Path(model_path).name} if model_path else {}
    async with (
        Engine(model_path, enable_cache_report=True, **name) as engine,
        http_server.serving(build_app(engine.core)) as url,
    ):
        with browser.started() as page:
            await page.resize(*SIZE)
            await page.prefer(scheme)
            await page.open(url)
            await page.type("#temperature", "0")
            await page.type("#max-tokens", "256")
            for number, question in enumerate(questions, start=1):
                await page.type("#prompt", question + browser.ENTER)
                await page.until(f"document.querySelectorAll('.answer[aria-busy=false]').length === {number}")
            await page.until("document.getAnimations().length === 0")
            return await page.screenshot()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", help="default: the demo model")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--ask", action="append", help="a question; may be given several times")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    given = parser.parse_args()
    if reason := browser.missing():
        parser.error(reason)
    picture = asyncio.run(screenshot(given.model_path, given.ask or QUESTIONS, given.scheme))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_bytes(picture)


if __name__ == "__main__":
    main()
