"""Show an engine in a notebook: a summary, a live view, and why requests wait."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from serve.python import html
from serve.python.hooks import StepEvent, observe_steps

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.actors.live_requests import Timeline
    from runtime.actors.status import Status

MAX_REQUESTS = 12
MAX_STEPS = 60
MAX_NODES = 24
TICKS = " ▁▂▃▄▅▆▇█"
COLOURS = {"queue": "hsla(40,90%,50%,0.6)", "prefill": "hsla(210,80%,50%,0.6)", "decode": "hsla(130,60%,42%,0.6)"}


def engine_html(core: EngineCore | None, path: str) -> str:
    """Return a summary of an engine as HTML: its model, requests and KV cache pages."""
    if core is None:
        return html.facts({"engine": "not running", "model": path})
    status = core.status()
    return html.facts(
        {
            "engine": status.state,
            "model": f"{core.plan.serve.served_model_name} ({core.facts.architecture})",
            "requests": f"{status.num_running} running, {status.num_waiting} waiting",
            "pages": _pages(status),
            "cache": memory_words(core),
            "since the start": f"{status.num_steps} steps, {status.num_generated} tokens",
            "kernels": status.kernels[:120],
        }
    )


def memory_words(core: EngineCore) -> str:
    """Return a sentence with the KV cache's capacity and the number of tokens that it holds."""
    status = core.status()
    used = (status.num_used_pages + status.num_cached_pages) * status.page_size
    return f"reserved for {status.max_total_tokens} tokens; {used} are in it now"


def _pages(status: Status) -> html.Html:
    used, cached, total = status.num_used_pages, status.num_cached_pages, max(1, status.num_pages)
    label = f"{used} in use, {cached} kept for prefixes, {total - used - cached} free"
    return html.bar((used + cached) / total, label)


def why_waiting(core: EngineCore, rid: str | None = None) -> list[str]:
    """Return, for each waiting request or for the request `rid`, one line that says why the request waits."""
    status = core.status()
    lines = []
    for each in core.timelines():
        if each.state not in ("waiting", "tokenizing") or (rid is not None and each.label != rid):
            continue
        waited = time.monotonic() - each.times[0]
        lines.append(f"{each.label[:40]}: {_reason(core, status, each)} (for {waited:.2f} s)")
    return lines


def _reason(core: EngineCore, status: Status, request: Timeline) -> str:
    if request.state == "tokenizing":
        return "its text is being tokenized, or its grammar or adapter prepared"
    if status.num_running >= core.plan.scheduler.max_running:
        return f"{status.num_running} requests run, which is max_running_requests"
    free = status.num_pages - status.num_used_pages
    needed = -(-request.prompt // status.page_size)
    if free < needed:
        return f"its prompt needs {needed} pages, and {free} are not in use"
    if status.num_waiting > 1:
        return f"{status.num_waiting} requests wait for the next step with room for a prompt"
    return "it enters with the next step, if the running requests leave room for their own growth"


class Watch:
    """A live view of an engine. `engine.watch()` shows it in a notebook until the engine ends or `stop` is called.

    The view is redrawn at most `per_second` times a second, and only after a change. In a terminal, `print(view)` shows
    one line.
    """

    def __init__(self, core: EngineCore, *, per_second: float = 2.0) -> None:
        self._core = core
        self._interval_s = 1 / max(0.1, min(10.0, per_second))
        self._steps: list[StepEvent] = []
        self._display: Any = None
        self._shown = ""
        self._end_steps = observe_steps(core, self._note)
        self._task = asyncio.get_running_loop().create_task(self._refresh(), name="penstock-watch")

    def stop(self) -> None:
        """End the view. The notebook keeps its last state."""
        self._end_steps()
        self._task.cancel()

    def _note(self, step: StepEvent) -> None:
        self._steps.append(step)
        del self._steps[:-MAX_STEPS]

    async def _refresh(self) -> None:
        try:
            while self._core.status().state == "ready":
                await asyncio.sleep(self._interval_s)
                self._draw()
        finally:
            self._end_steps()

    def _draw(self) -> None:
        now = self._repr_html_()
        if self._display is not None and now != self._shown:
            from IPython.display import HTML

            self._display.update(HTML(now))
        self._shown = now

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        self._shown = self._repr_html_()
        self._display = display(HTML(self._shown), display_id=True)

    def __repr__(self) -> str:
        status = self._core.status()
        return (
            f"{status.state}: {status.num_running} running, {status.num_waiting} waiting, "
            f"{status.num_used_pages}/{status.num_pages} pages, {status.num_generated} tokens"
        )

    def _repr_html_(self) -> str:
        core = self._core
        status = core.status()
        rows: dict[str, object] = {
            "requests": f"{status.num_running} running, {status.num_waiting} waiting",
            "pages": _pages(status),
            "steps": self._step_words(),
            "prefix tree": tree_words(core),
        }
        reasons = why_waiting(core)[:3]
        if reasons:
            rows["waits"] = "; ".join(reasons)
        return html.facts(rows) + timeline_html(core)

    def _step_words(self) -> str:
        if not self._steps:
            return "none yet"
        longest = max(step.seconds for step in self._steps) or 1e-9
        line = "".join(TICKS[min(8, round(8 * step.seconds / longest))] for step in self._steps)
        last = self._steps[-1]
        return f"{line} last {1000 * last.seconds:.1f} ms, {last.num_rows} rows, longest {1000 * longest:.1f} ms"


def tree_words(core: EngineCore) -> str:
    """Return a phrase with the number of nodes of the prefix trees, and of pages that no request uses."""
    outlines = [actor.scheduler.prefix_tree(MAX_NODES) for actor in core.schedulers]
    num_pages = core.status().num_cached_pages
    return f"{sum(count for _, count in outlines)} nodes, {num_pages} pages that no request uses"


def tree_html(core: EngineCore) -> str:
    """Return the shape of the prefix trees as HTML: each node with the number of its pages, below its parent."""
    lines = []
    for actor in core.schedulers:
        nodes, count = actor.scheduler.prefix_tree(MAX_NODES)
        children: dict[int, list[int]] = {}
        for index, (parent, _, _) in enumerate(nodes):
            children.setdefault(parent, []).append(index)
        pending = [(index, 0) for index in reversed(children.get(-1, []))]
        while pending:
            index, depth = pending.pop()
            _, num_pages, locks = nodes[index]
            used = f", used by {locks}" if locks else ""
            lines.append(f"{'   ' * depth}└ {num_pages} pages{used}")
            pending += [(child, depth + 1) for child in reversed(children.get(index, []))]
        if count > len(nodes):
            lines.append(f"… {count - len(nodes)} further nodes")
    return html.text("\n".join(lines) or "empty")


def timeline_html(core: EngineCore) -> str:
    """Return the latest requests as HTML bars on one time axis: waiting, prefill and decode."""
    requests = core.timelines()[:MAX_REQUESTS]
    if not requests:
        return ""
    now = time.monotonic()
    start = min(each.times[0] for each in requests)
    span = max(1e-6, max(each.times[5] or now for each in requests) - start)
    rows = []
    for each in requests:
        arrived, _, _, scheduled, first, ended = each.times
        end = ended or now
        marks = (("queue", arrived, scheduled or end), ("prefill", scheduled or end, first or end))
        parts = [
            _part(name, begin - start, finish - begin, span)
            for name, begin, finish in (*marks, ("decode", first or end, end))
            if finish > begin
        ]
        bar = f"<div style='position:relative;width:22em;height:1em'>{''.join(parts)}</div>"
        counts = f"{each.prompt} + {each.output} tokens, {each.cached} cached"
        rows.append((each.label[:16], html.Html(bar), each.finish or each.state, counts))
    legend = " ".join(
        f"<span style='background:{colour}'>&nbsp;{name}&nbsp;</span>" for name, colour in COLOURS.items()
    )
    return html.table(rows, ("request", "", "", f"{span:.2f} s")) + legend


def _part(name: str, begin: float, length: float, span: float) -> str:
    place = f"left:{100 * begin / span:.1f}%;width:{max(0.4, 100 * length / span):.1f}%"
    title = f"{name} {1000 * length:.1f} ms"
    return f"<div title='{title}' style='position:absolute;height:100%;background:{COLOURS[name]};{place}'></div>"
