"""Unmodified clients of trainers against a real server: its weights change over gloo and from disk.

TRL and slime are no dependencies. The tests run where they can be imported: `pip install --no-deps trl`, or slime's
repository in PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.demo import WEIGHTS
from weights_server import fresh_state, ids, serving, state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
SCRIPTS = Path(__file__).parent / "scripts"
TEXTS: dict[str, Any] = {"skip_tokenizer_init": False}


def changed_demo(folder: Path) -> str:
    """Return a folder with the demo model after a change of all its weights."""
    shutil.copytree(WEIGHTS, folder, ignore=shutil.ignore_patterns("*.safetensors", "draft_head"))
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(WEIGHTS / "model.safetensors")
    changed = {name: each * (1 + 0.2 * torch.randn(each.shape, generator=generator)) for name, each in tensors.items()}
    save_file({name: each.to(tensors[name].dtype) for name, each in changed.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("name", ["trl", "slime"])
async def test_trainers_control_the_server(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    path = changed_demo(tmp_path / "changed")
    async with serving(str(WEIGHTS), **TEXTS) as (engine, http):
        before = await ids(http)
        process = await asyncio.create_subprocess_exec(
            sys.executable, SCRIPTS / f"with_{name}.py", str(http.base_url).rstrip("/"), path,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-4000:]
        assert b"CHANGED" in output
        assert await ids(http) != before
        assert await state(engine) == await fresh_state(path, **TEXTS)
