"""Show one line instead of a traceback in a notebook when a call is interrupted."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")
ABORTED = "The call was interrupted; its requests are aborted, and the engine goes on."


def briefly_interrupted(
    method: Callable[Params, Coroutine[Any, Any, Result]],
) -> Callable[Params, Coroutine[Any, Any, Result]]:
    """Decorate a method so that IPython shows one line if the call is cancelled, for example by interrupting the cell.

    The call still raises `CancelledError`, so that asyncio and task groups work as usual.
    """

    @functools.wraps(method)
    async def call(*args: Params.args, **keywords: Params.kwargs) -> Result:
        try:
            return await method(*args, **keywords)
        except asyncio.CancelledError as error:
            show_one_line(error, f"Interrupted: {ABORTED}")
            raise

    return call


def show_one_line(error: BaseException, line: str) -> None:
    """Let IPython show `line` in place of this exception's traceback."""
    error._render_traceback_ = lambda: [line]  # pyright: ignore[reportAttributeAccessIssue]
