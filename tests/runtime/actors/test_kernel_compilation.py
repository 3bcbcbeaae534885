"""An engine whose C++ kernels must be compiled answers at once with torch's kernels, and changes to C++ later."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any, TextIO

import pytest

from cpp_kernels import library
from greedy import GREEDY, model_path, prompts, reference
from runtime.actors.kernel_compilation import CHANGED, ENDS, FAILED
from runtime.errors import ConfigurationError, InvalidRequest
from serve import Engine

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1}


class Compiler:
    """A compiler that waits for `finish` before it links, and then links the real kernels."""

    def __init__(self, folder: Path) -> None:
        self._gate = folder / "gate"
        os.mkfifo(self._gate)
        path = folder / "c++"
        link = f'read _ < "{self._gate}"; cp "{library().path}" "$OUT"'
        path.write_text(
            f'#!/bin/sh\nfor OUT; do :; done\ncase "$*" in *-shared*) {link};; *) : > "$OUT";; esac\n', encoding="utf-8"
        )
        path.chmod(0o755)

    async def finish(self) -> None:
        """Let the compiler end. Returns when it has begun to link."""
        with await self.linking() as gate:
            gate.write("go\n")

    async def linking(self) -> TextIO:
        """Wait until it has begun to link. It waits until the returned file is written or closed."""
        return await asyncio.to_thread(self._gate.open, "w")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return found


async def until_logged(caplog: pytest.LogCaptureFixture, *texts: str) -> None:
    while not any(text in record.getMessage() for record in caplog.records for text in texts):
        await asyncio.sleep(0.01)


def in_cpp(engine: Engine) -> bool:
    return engine.status().kernels.startswith("C++")


async def outputs(engine: Engine) -> list[list[int]]:
    return [answer["output_ids"] for answer in await engine.generate(input_ids=prompts(), sampling_params=GREEDY)]


async def test_requests_are_answered_before_during_and_after_the_change(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with Engine(model_path("llama"), **OPTIONS) as engine:
        assert not in_cpp(engine)
        assert await outputs(engine) == reference("llama")
        assert await outputs(engine) == reference("llama")  # with cached prefixes
        long = {**GREEDY, "max_new_tokens": 200}
        pieces = [piece async for piece in engine.stream(input_ids=prompts()[0], sampling_params=long)]
        stream = engine.stream(input_ids=prompts()[0], sampling_params=long)
        first = await anext(stream)
        engine.core.schedulers[0].delay_s = 0.2  # the stream is longer than the change
        await compiler.finish()
        await until_logged(caplog, ENDS)
        engine.core.schedulers[0].delay_s = 0.0
        assert engine.status().num_requests == 1  # the change met the stream
        rest = [piece async for piece in stream]
        assert rest[-1]["output_ids"] == pieces[-1]["output_ids"]
        assert first["output_ids"] == pieces[-1]["output_ids"][: len(first["output_ids"])]
        assert in_cpp(engine)
        assert await outputs(engine) == reference("llama")
        engine.core.check()


async def test_deterministic_answers_need_the_kernels(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    params = {**GREEDY, "deterministic": True}
    async with Engine(model_path("llama"), **OPTIONS) as engine:
        with pytest.raises(InvalidRequest, match="until the C\\+\\+ kernels are compiled"):
            await engine.generate(input_ids=prompts()[0], sampling_params=params)
        await compiler.finish()
        await until_logged(caplog, ENDS)
        await engine.generate(input_ids=prompts()[0], sampling_params=params)


async def test_weights_that_changed_meanwhile_stay(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with Engine(model_path("llama"), **OPTIONS) as engine:
        await engine.core.update_weights(model_path("llama"))
        await compiler.finish()
        await until_logged(caplog, CHANGED)
        assert not in_cpp(engine)
        assert await outputs(engine) == reference("llama")


async def test_a_compiler_that_fails_costs_speed_only(
    compiler: Compiler, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "c++").write_text("#!/bin/sh\necho 'kernels.cpp:1: error: I am broken' >&2\nexit 1\n")
    async with Engine(model_path("llama"), **OPTIONS) as engine:
        await until_logged(caplog, FAILED.partition("%s")[0])
        assert await outputs(engine) == reference("llama")
        assert not in_cpp(engine)
    [record] = [record for record in caplog.records if record.msg == FAILED]
    assert "I am broken" in record.getMessage()
    assert record.exc_info is None


async def test_answers_are_not_promised_to_be_deterministic_if_the_kernels_do_not_compile(
    compiler: Compiler, tmp_path: Path
) -> None:
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 1\n")
    params = {**GREEDY, "deterministic": True}
    async with Engine(model_path("llama"), **OPTIONS, wait_for_kernels=True) as engine:
        assert await outputs(engine) == reference("llama")
        with pytest.raises(InvalidRequest, match="the C\\+\\+ kernels cannot be compiled"):
            await engine.generate(input_ids=prompts()[0], sampling_params=params)
    with pytest.raises(ConfigurationError, match="--enable-deterministic-inference needs the C\\+\\+ kernels"):
        async with Engine(model_path("llama"), **OPTIONS, enable_deterministic_inference=True):
            pass


async def test_closing_the_engine_ends_the_compiler(
    compiler: Compiler, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with Engine(model_path("llama"), **OPTIONS) as engine:
        gate = await compiler.linking()
        assert not in_cpp(engine)
    gate.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [path.name for path in (tmp_path / "cache" / "penstock" / "cpp").iterdir()] == ["lock"]


async def test_an_engine_can_wait_for_its_kernels(compiler: Compiler) -> None:
    finishing = asyncio.ensure_future(compiler.finish())
    async with Engine(model_path("llama"), **OPTIONS, wait_for_kernels=True) as engine:
        assert in_cpp(engine)
    await finishing
