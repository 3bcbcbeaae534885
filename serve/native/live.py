"""`/live_state`: what the page at /live shows: queue, batch, pages, prefix tree, and the times of requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from serve.access import CLIENT, Client
from serve.endpoint import json_response

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.actors.live_requests import Timeline
    from runtime.actors.scheduler import SchedulerActor

MAX_REQUESTS = 200  # that are shown
MAX_NODES = 300  # of a prefix tree
MAX_RID_CHARS = 80


async def live_state(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Counts of each replica and how long requests took. No text, no token.

    An admin sees every request and the shape of the prefix trees, the holder of a key the requests of that key, anybody
    else counts alone. Times are seconds before now, the later the smaller.
    """
    client = CLIENT.get()
    found = core.timelines()
    shown = [each for each in found if _may_see(client, each)]
    status = core.status()
    body = {
        "state": status.state,
        "model": core.plan.serve.served_model_name,
        "num_requests": status.num_requests,
        "num_steps": status.num_steps,
        "num_generated": status.num_generated,
        "tokens_per_s": round(status.gen_throughput, 2),
        "replicas": [_replica(actor, with_tree=client.is_admin) for actor in core.schedulers],
        "requests": [_timeline(each) for each in shown[:MAX_REQUESTS]],
        "num_hidden": len(found) - min(len(shown), MAX_REQUESTS),
    }
    return json_response(body)


def _may_see(client: Client, request: Timeline) -> bool:
    return client.is_admin or bool(client.name and request.owner == client.name)


def _replica(actor: SchedulerActor, *, with_tree: bool) -> dict[str, Any]:
    load = actor.scheduler.load
    tree = None
    if with_tree:
        nodes, num_nodes = actor.scheduler.prefix_tree(MAX_NODES)
        tree = {"num_nodes": num_nodes, "nodes": nodes}
    return {
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_retracted": load.num_retracted,
        "step_age_s": round(actor.steps.age_s, 4),
        "pages": {
            "running": load.num_used_pages,
            "prefix": load.num_evictable_pages,
            "free": load.num_pages - load.num_used_pages - load.num_evictable_pages,
        },
        "tree": tree,
    }


def _timeline(request: Timeline) -> dict[str, Any]:
    now_s = time.monotonic()
    return {
        "rid": request.label[:MAX_RID_CHARS],
        "state": request.state,
        "finish": request.finish,
        "prompt_tokens": request.prompt,
        "cached_tokens": request.cached,
        "output_tokens": request.output,
        "ago_s": {
            name: round(now_s - at_s, 4) if at_s else None
            for name, at_s in zip(
                ("arrived", "tokenized", "queued", "scheduled", "first_token", "ended"), request.times
            )
        },
    }
