"""Tools for tests of programs that use Penstock: engines with the demo model, and HTTP clients without sockets.

    from penstock import testing

    async with testing.client() as http:                       # httpx.AsyncClient for the whole server
        answer = await http.post("/v1/chat/completions", json={...})

    async with testing.openai_client(says=["It rains."]) as official: ...

With pytest, installing the package adds the fixtures `penstock`, `penstock_engine`, `penstock_client` and
`penstock_openai` (`serve.testing.plugin`). This module imports the engine when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.testing.clients import client, openai_client
    from serve.testing.engines import engine, sync_engine
    from serve.testing.script import says

__all__ = ["client", "engine", "openai_client", "says", "sync_engine"]
_MODULES = {
    "client": "clients",
    "openai_client": "clients",
    "engine": "engines",
    "sync_engine": "engines",
    "says": "script",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'serve.testing' has no attribute {name!r}")
    return getattr(import_module(f"serve.testing.{_MODULES[name]}"), name)
