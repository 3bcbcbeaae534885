"""Records a failure in a JSON file: thread stacks, steps in flight, and requests without their texts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runtime.actors.live_requests import LiveRequest
from runtime.batch import Batch

logger = logging.getLogger("penstock.core")

MAX_TASKS = 200
MAX_REQUESTS = 1000


def write_record(
    folder: str | None,
    reason: str,
    state: Mapping[str, Any],
    in_flight: Iterable[Batch],
    requests: Iterable[LiveRequest],
) -> Path | None:
    """Log the stacks of all threads. Write the record to a file in `folder`, and return the file's path.

    Returns None if `folder` is None or the file cannot be written. Never raises an `OSError`, because the caller is
    about to report the original failure.
    """
    stacks = thread_stacks()
    logger.critical("%s\n%s", reason, "\n".join(f"Thread {name}:\n{stack}" for name, stack in stacks.items()))
    if folder is None:
        return None
    record = {
        "reason": reason,
        "time": time.time(),
        "process": os.getpid(),
        "state": dict(state),
        "steps_in_flight": [_step(batch) for batch in in_flight],
        "requests": [_request(live) for live, _ in zip(requests, range(MAX_REQUESTS), strict=False)],
        "threads": stacks,
        "tasks": task_stacks(),
    }
    path = Path(folder) / f"penstock-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, default=str), encoding="utf-8")
    except OSError as error:
        logger.error("The crash record cannot be written to %s: %s", path, error)
        return None
    logger.critical("The crash record was written to %s.", path)
    return path


def thread_stacks() -> dict[str, str]:
    """Return the Python stack of every thread of this process, by thread name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, '?')} ({ident})": "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    }


def task_stacks() -> list[str]:
    """Return one line for each task of this event loop: its name and the code location where it waits."""
    lines = []
    for task in list(asyncio.all_tasks())[:MAX_TASKS]:
        frames = task.get_stack(limit=1)
        where = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "?"
        lines.append(f"{task.get_name()} at {where}")
    return lines


def _step(batch: Batch) -> dict[str, Any]:
    return {
        "number": batch.number,
        "rows": len(batch.sequences),
        "tokens": len(batch.token_ids),
        "starts": batch.starts.tolist(),
        "counts": batch.counts.tolist(),
        "requests": [sequence.request.id for sequence in batch.sequences],
        **batch.stats._asdict(),
    }


def _request(live: LiveRequest) -> dict[str, Any]:
    """Return counts and parameters of a request, without texts, token ids or the client's labels."""
    sampling = live.request.sampling
    return {
        "id": live.request.id,
        "age_s": round(time.monotonic() - live.times.arrived, 3),
        "n": sampling.n,
        "max_new_tokens": sampling.max_new_tokens,
        "aborting": live.aborting is not None,
        "sequences": [
            {
                "prompt": s.num_prompt,
                "output": s.num_output,
                "computed": s.num_computed,
                "pages": len(s.pages),
            }
            for s in live.sequences
        ],
    }
