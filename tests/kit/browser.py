"""A headless Chromium, driven over chromedriver's plain HTTP protocol (WebDriver).

    with browser.started() as page:
        await page.open(url)
        await page.type("#prompt", "Hello" + browser.ENTER)
        await page.until('document.querySelector(".answer .text").textContent.includes("river")')

Elements are named by CSS selectors. Nothing waits for time: `until` looks at the page frame by frame.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx

ENTER, ESCAPE, SHIFT, TAB = "\ue007", "\ue00c", "\ue008", "\ue004"
TIMEOUT_S = 30.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # key of an element's id in the protocol
_FLAGS = (
    "--headless",
    "--no-sandbox",  # needed in containers, which run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,800",
)


def missing() -> str:
    """Return the reason why no browser can be started here, or ""."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found; Debian: chromium, chromium-driver" if lacking else ""


@contextlib.contextmanager
def started() -> Iterator[Page]:
    """Start a browser with a fresh profile. The browser and its driver end with the block."""
    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        driver = stack.enter_context(subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True))
        stack.callback(driver.terminate)
        url = f"http://127.0.0.1:{_port(driver)}/session"
        options = {"args": [*_FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": int(TIMEOUT_S * 1000)},
        }
        with httpx.Client(timeout=TIMEOUT_S * 2, trust_env=False) as client:
            answer = client.post(url, json={"capabilities": {"alwaysMatch": capabilities}}).json()["value"]
            session = f"{url}/{answer['sessionId']}"
            try:
                yield Page(session)
            finally:
                client.delete(session)


def _port(driver: subprocess.Popen[str]) -> int:
    assert driver.stdout is not None
    for line in driver.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
    raise RuntimeError("chromedriver did not start")


class Page:
    """The browser's window. Any event loop may use it, because it keeps no connection."""

    def __init__(self, session: str) -> None:
        self._session = session

    async def open(self, url: str) -> None:
        """Open the address. Returns when the page is loaded."""
        await self._call("POST", "/url", url=url)

    async def type(self, selector: str, keys: str) -> None:
        """Type into the element like a keyboard."""
        await self._call("POST", f"/element/{await self._find(selector)}/value", text=keys)

    async def press(self, *keys: str) -> None:
        """Press keys together, without changing the focus."""
        down = [{"type": "keyDown", "value": key} for key in keys]
        up = [{"type": "keyUp", "value": key} for key in reversed(keys)]
        await self._call("POST", "/actions", actions=[{"type": "key", "id": "keys", "actions": down + up}])

    async def click(self, selector: str) -> None:
        """Click into the middle of the element. Fails if another element covers it."""
        await self._of_element(selector, "POST", "click")

    async def text(self, selector: str) -> str:
        """Return the visible text of the element."""
        return await self._of_element(selector, "GET", "text")

    async def value(self, expression: str) -> Any:
        """Return the value of the JavaScript expression in the page."""
        return await self._call("POST", "/execute/sync", script=f"return ({expression})", args=[])

    async def until(self, expression: str) -> Any:
        """Wait until the JavaScript expression is true, and return its value. Fails after TIMEOUT_S."""
        script = (
            "const done = arguments[0];"
            f"(function look() {{ const value = ({expression});"
            " if (value) done(value); else requestAnimationFrame(look); })()"
        )
        return await self._call("POST", "/execute/async", script=script, args=[])

    async def resize(self, width: int, height: int, *, mobile: bool = False, scale: float = 1) -> None:
        """Resize the page to this many CSS pixels; `mobile` emulates a phone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        await self._devtools("Emulation.setDeviceMetricsOverride", **metrics)

    async def prefer(self, scheme: str) -> None:
        """Prefer the colour scheme "light" or "dark"."""
        await self._devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self) -> bytes:
        """Return the window as a PNG."""
        return base64.b64decode(await self._call("GET", "/screenshot"))

    async def picture_of(self, selector: str, margin: int = 0) -> bytes:
        """Return the part of the page around the element as a PNG, with a margin in CSS pixels."""
        place = await self.value(
            "(box => ({x: box.left, y: box.top, width: box.width, height: box.height}))"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        clip = {"x": place["x"] - margin, "y": place["y"] - margin, "scale": 1}
        clip |= {"width": place["width"] + 2 * margin, "height": place["height"] + 2 * margin}
        return base64.b64decode((await self._devtools("Page.captureScreenshot", clip=clip))["data"])

    async def complaints(self) -> list[str]:
        """Return errors and policy violations that the browser has logged since the last call."""
        entries = await self._call("POST", "/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    async def _of_element(self, selector: str, method: str, command: str) -> Any:
        """Run a command on the element. Finds it again if the page has replaced it meanwhile."""
        while True:
            try:
                return await self._call(method, f"/element/{await self._find(selector)}/{command}")
            except AssertionError as error:
                if "stale element" not in str(error):
                    raise

    async def _find(self, selector: str) -> str:
        found = await self._call("POST", "/element", using="css selector", value=selector)
        return found[_ELEMENT]

    async def _devtools(self, command: str, **params: Any) -> Any:
        return await self._call("POST", "/goog/cdp/execute", cmd=command, params=params)

    async def _call(self, method: str, path: str, **body: Any) -> Any:
        async with httpx.AsyncClient(timeout=TIMEOUT_S + 10, trust_env=False) as client:
            content = body if method == "POST" else None
            response = await client.request(method, f"{self._session}{path}", json=content)
        value = response.json()["value"]
        if response.is_error:
            raise AssertionError(f"{path}: {value['error']}: {value['message'][:400]}")
        return value


Open = Callable[..., Awaitable[Page]]  # how tests get a page: await open(the application to serve)
