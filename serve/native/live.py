"""`/live_state`, the data of the page /live (queue, batch, KV cache, prefix tree, request times), and `/v1/loads`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

import serve
from serve.calls.client import CLIENT, Client
from serve.http.endpoint import json_response

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.actors.live_requests import Timeline
    from runtime.actors.scheduler import SchedulerActor
    from runtime.tokenizer.tokenizer import Tokenizer

MAX_REQUESTS = 200  # maximum number of requests in the answer
MAX_NODES = 300  # maximum number of nodes in the answer per prefix tree
MAX_NODE_TOKENS = 16  # maximum number of a node's tokens that are shown as text
MAX_RID_CHARS = 80


async def live_state(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return counts per replica and the times of requests.

    An admin sees every request and the shape of the prefix trees. With `?texts=true`, an admin also sees the first
    tokens of each node as text; the answer has no other texts. A client with an API key sees the requests of this key.
    Other clients see only counts. `ago_s` has the age of each event in seconds.
    """
    client = CLIENT.get()
    timelines = core.timelines()
    shown = [each for each in timelines if _may_see(client, each)]
    status = core.status()
    texts_by = core.tokenizer if client.is_admin and http.query_params.get("texts") == "true" else None
    body = {
        "state": status.state,
        "model": core.plan.serve.served_model_name,
        "num_requests": status.num_requests,
        "num_steps": status.num_steps,
        "num_generated": status.num_generated,
        "tokens_per_s": round(status.gen_throughput, 2),
        "replicas": [_replica(actor, with_tree=client.is_admin, texts_by=texts_by) for actor in core.schedulers],
        "requests": [_timeline(each) for each in shown[:MAX_REQUESTS]],
        "num_hidden": len(timelines) - min(len(shown), MAX_REQUESTS),
    }
    return json_response(body)


async def loads(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the load of each replica and of all replicas together, in SGLang's format."""
    actors = core.schedulers
    replicas = [_load(rank, actor, core.plan.cache.page_size) for rank, actor in enumerate(actors)]
    running, waiting = (sum(each[name] for each in replicas) for name in ("num_running_reqs", "num_waiting_reqs"))
    aggregate = {
        "total_running_reqs": running,
        "total_waiting_reqs": waiting,
        "total_reqs": running + waiting,
        "total_used_tokens": sum(each["num_used_tokens"] for each in replicas),
        "avg_token_usage": round(sum(each["token_usage"] for each in replicas) / max(1, len(replicas)), 4),
    }
    body = {
        "timestamp": time.time(),
        "version": serve.__version__,
        "dp_rank_count": len(replicas),
        "loads": replicas,
        "aggregate": aggregate,
    }
    return json_response(body)


def _load(rank: int, actor: SchedulerActor, page_size: int) -> dict[str, Any]:
    load, predicted_s = actor.scheduler.load, actor.first_token_s(1)
    return {
        "dp_rank": rank,
        "num_running_reqs": load.num_running,
        "num_waiting_reqs": load.num_waiting,
        "num_total_reqs": load.num_running + load.num_waiting,
        "num_used_tokens": load.num_used_tokens,
        "token_usage": round(load.token_usage, 4),
        "num_retracted": load.num_retracted,
        "num_pinned_tokens": load.num_pinned_pages * page_size,
        "predicted_first_token_s": None if predicted_s is None else round(predicted_s, 4),
    }


def _may_see(client: Client, request: Timeline) -> bool:
    return client.is_admin or bool(client.name and request.owner == client.name)


def _replica(actor: SchedulerActor, *, with_tree: bool, texts_by: Tokenizer | None) -> dict[str, Any]:
    load = actor.scheduler.load
    tree = None
    if with_tree:
        nodes, num_nodes = actor.scheduler.prefix_tree(MAX_NODES)
        tree = {"num_nodes": num_nodes, "nodes": nodes}
        if texts_by is not None:
            ids = actor.scheduler.prefix_tree_ids(MAX_NODES, MAX_NODE_TOKENS)
            tree["texts"] = [texts_by.decode([each for each in keys if each < 2**31]) for keys in ids]
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
