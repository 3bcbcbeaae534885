"""A chat request passes from its handler to the model through exactly the files that the architecture page names."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_models
from runtime.actors.engine_core import EngineCore
from runtime.actors.scheduler import SchedulerActor
from runtime.actors.tokenizer import TokenizerActor
from runtime.modeling.decoder import Decoder
from runtime.worker.model_runner import ModelRunner
from serve import Engine
from serve.server.app import build_app

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / package) for package in ("serve", "runtime", "ops"))
CALLS = (
    (EngineCore, "submit_all"),
    (TokenizerActor, "submit"),
    (SchedulerActor, "admit"),
    (ModelRunner, "launch"),
    (Decoder, "forward"),
)


def in_the_docs() -> list[str]:
    """Return the files in the architecture page's chain of arrows."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    [way] = re.findall(r"```\n(serve/\S+\n(?: *-> [^`]*))```", text)
    return [file for file in re.split(r"\s*->\s*|\s+", way) if file]


def calling_file() -> str:
    """Return Penstock's file that called the caller's function."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return "" if frame is None else str(Path(frame.f_code.co_filename).relative_to(ROOT))


async def test_each_file_is_called_by_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: dict[str, set[str]] = {name: set() for _, name in CALLS}

    def follow(owner: type, name: str) -> None:
        called = getattr(owner, name)

        def followed(*args: Any, **kwargs: Any) -> Any:
            callers[name].add(calling_file())
            return called(*args, **kwargs)

        monkeypatch.setattr(owner, name, followed)

    files = [str(Path(str(inspect.getsourcefile(owner))).relative_to(ROOT)) for owner, _ in CALLS]
    # With torch kernels the forward is called in every step; C++ kernels replay the captured forward.
    async with Engine(tiny_models.cached(), attention_backend="torch_native", max_total_tokens=512) as engine:
        for owner, name in CALLS:
            follow(owner, name)
        transport = httpx.ASGITransport(build_app(engine.core))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
            body["model"] = engine.core.plan.serve.served_model_name
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
    way = in_the_docs()
    assert len(way) <= 6
    assert way[1:] == files
    assert callers == {name: {before} for (_, name), before in zip(CALLS, way, strict=False)}
