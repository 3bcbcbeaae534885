"""Progress bars for the slow parts of a start (kernels, weights, graph capture) and for lists of prompts."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

QUIET_S = 1.0  # seconds until a bar appears, so that quick starts show no bar


class Bar(Protocol):
    """A progress bar."""

    def update(self, n: float = 1, /) -> object:
        """Advance by `n` units."""


def progress_bar(
    total: int | None, name: str, *, unit: str, scaled: bool = False, quiet_s: float = QUIET_S
) -> AbstractContextManager[Bar | None]:
    """Return a progress bar if the program runs in a terminal or a notebook and `total` is known.

    Otherwise, return a context that yields None. The bar appears after `quiet_s` seconds and disappears when it is
    closed. With `scaled`, numbers are shown as 1.2k or 3.4M.
    """
    if total is None or not ("ipykernel" in sys.modules or sys.stderr.isatty()):
        return nullcontext()
    try:
        return shown_bar(total, name, unit=unit, scaled=scaled, quiet_s=quiet_s, leave=False)
    except ModuleNotFoundError:  # the environment in which a wheel is built
        return nullcontext()


def shown_bar(
    total: int, name: str, *, unit: str, scaled: bool = False, quiet_s: float = 0.0, leave: bool = True
) -> AbstractContextManager[Bar]:
    """Return a progress bar that is always shown, even if stderr is a file. It starts no background thread.

    With `leave`, the finished bar stays visible. Raises `ModuleNotFoundError` without tqdm.
    """
    from tqdm import tqdm

    class QuietBar(tqdm):
        monitor_interval = 0  # 0: tqdm starts no background thread

    return QuietBar(
        total=total, desc=name, unit=unit, unit_scale=scaled, delay=quiet_s, leave=leave, dynamic_ncols=leave
    )
