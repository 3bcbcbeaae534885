"""/start_profile and /stop_profile: the content of the trace, and its allowed locations."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

import http_server
from serve import Engine
from serve.server.app import build_app


async def in_pieces(body: object) -> AsyncIterator[bytes]:
    """Return a body in pieces without a content length."""
    yield json.dumps(body).encode()


@pytest.mark.slow
async def test_the_trace_holds_steps_and_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_PROFILE_DIR", str(tmp_path))
    ask = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
    }
    async with (  # the demo model with C++ kernels
        Engine(max_total_tokens=1024) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):

        async def output() -> list[int]:
            return (await http.post("/generate", json=ask)).json()["output_ids"]

        expected = await output()
        assert (await http.post("/stop_profile")).status_code == 400
        assert (await http.post("/start_profile")).text == "Start profiling.\n"
        assert (await http.post("/start_profile")).status_code == 400
        assert await output() == expected
        answer = (await http.post("/stop_profile")).text
        path = Path(answer.split()[-1])
        assert path.parent == tmp_path
        names = [event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        steps = [name for name in names if name.startswith("step ")]
        assert "1 rows, 3 tokens" in steps[0]
        assert len(set(steps)) >= 6
        if engine.status().kernels.startswith("C++"):
            assert {"begin", "attend", "choose"} <= set(names)

        short = {"num_steps": 2, "output_dir": "nightly", "profile_prefix": "short", "activities": ["CPU"]}
        await http.post("/start_profile", content=in_pieces(short), headers={"content-type": "application/json"})
        await output()
        path = Path(await engine.stop_profile())
        assert (path.parent, path.name[:6]) == (tmp_path / "nightly", "short-")
        trace = gzip.decompress(path.read_bytes()).decode()
        assert trace.count("step ") == 2
        assert await output() == expected

        for wrong in (
            {"output_dir": "/etc"},
            {"output_dir": "a/../.."},
            {"output_dir": "a\0b"},
            {"profile_prefix": "a/b"},
            {"steps": 1},
        ):
            refused = await http.post("/start_profile", json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, *wrong)
        (tmp_path / "old.trace.json.gz").write_bytes(b"0" * 100)
        monkeypatch.setattr("runtime.profile.MAX_FOLDER_BYTES", 50)
        assert (await http.get("/start_profile")).status_code == 400
