"""A progress bar over the prompts of a call, in a terminal or in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from ops.progress import shown_bar
from runtime.actors.output_stream import OutputStream

REFRESH_S = 0.2


@contextmanager
def progress_over(streams: Sequence[OutputStream], *, shown: bool) -> Iterator[None]:
    """Show a bar of finished prompts while the block runs. If `shown` is false, do nothing."""
    if not shown:
        yield
        return
    loop, began_s = asyncio.get_running_loop(), monotonic()
    with shown_bar(len(streams), "Prompts", unit="prompt") as bar:
        timer: asyncio.TimerHandle | None = None
        num_shown = 0

        def update() -> None:
            nonlocal num_shown
            num_finished = sum(stream.finished for stream in streams)
            bar.update(num_finished - num_shown)
            num_shown = num_finished

        def refresh() -> None:
            nonlocal timer
            update()
            timer = loop.call_later(REFRESH_S + (monotonic() - began_s) / 100, refresh)

        refresh()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            update()
