"""Write the pictures of JupyterLab that docs/python.md shows, in a light and a dark theme:

    python tests/kit/notebook_screenshots.py

It needs `pip install jupyterlab`, chromium and chromedriver. JupyterLab runs a notebook on the demo model, and each
picture is the output of one cell.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

import browser

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "images"
CELLS = {
    "start": "from penstock import Engine\n\nengine = Engine()\nawait engine.start()",
    "colours": """logprobs = {"return_logprob": True, "return_text_in_logprobs": True}
await engine.generate("Once upon a time", max_new_tokens=48, seed=3, **logprobs)""",
    "watch": "engine.watch(per_second=4)",
    "load": """import asyncio

village = "Once upon a time there was a small village beside a river, and in this village there lived a "
animals = ("cat", "dog", "fox", "owl", "bear", "hen")
await asyncio.gather(*(engine.generate(village + each, max_new_tokens=120, rid=each) for each in animals))
await asyncio.sleep(1)
print("done")""",
}
PICTURES = {"watch": "notebook-watch", "colours": "notebook-colours"}
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SIZE = (900, 1100)  # CSS pixels
MARGIN = 8


@contextlib.contextmanager
def lab(folder: Path, theme: str) -> Iterator[str]:
    """Run JupyterLab on a folder, with settings of its own. Yields its address."""
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0", "--ip=127.0.0.1"]
    command += [f"--ServerApp.root_dir={folder}", "--IdentityProvider.token="]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "serve" / "alias")]),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield _address(process)
        finally:
            process.terminate()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"is running at", line):
            line = next(each for each in process.stderr if "http://" in each)
            found = re.search(r"http://[^/]*:\d+", line)
            assert found is not None
            return found[0]
    raise RuntimeError("JupyterLab did not start.")


async def pictures(theme: str) -> dict[str, bytes]:
    """Return the output of each cell in `PICTURES` as a PNG, in this theme."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        cells = [nbformat.v4.new_code_cell(code) for code in CELLS.values()]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "penstock.ipynb")
        url = stack.enter_context(lab(folder, THEMES[theme]))
        page = stack.enter_context(browser.started())
        await page.resize(*SIZE)
        await page.open(f"{url}/doc/tree/penstock.ipynb")
        await page.until("document.querySelectorAll('.jp-Notebook .jp-CodeCell').length === " + str(len(CELLS)))
        await page.until("document.querySelector('[data-status=idle], .jp-Notebook-ExecutionIndicator') !== null")
        await page.click(".jp-Notebook .jp-CodeCell .jp-Editor")
        for number, cell in enumerate(CELLS, start=1):
            await page.press(browser.SHIFT, browser.ENTER)
            prompt = f"[{number}]:"
            await page.until(
                f"[...document.querySelectorAll('.jp-InputPrompt')].some(each => each.textContent === '{prompt}')"
            )
            if cell == "load":
                await page.until("document.querySelector('.jp-Notebook').textContent.includes('0 running')")
        await page.until("document.fonts.status === 'loaded'")
        await page.click(".jp-NotebookPanel-toolbar")
        return {
            PICTURES[cell]: await page.picture_of(f".jp-Notebook .jp-CodeCell:nth-of-type({number})", MARGIN)
            for number, cell in enumerate(CELLS, start=1)
            if cell in PICTURES
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    given: Any = parser.parse_args()
    if reason := browser.missing():
        parser.error(reason)
    given.out.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        for name, picture in asyncio.run(pictures(theme)).items():
            (given.out / f"{name}-{theme}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
