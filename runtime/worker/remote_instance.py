"""Copies the weights of a running server to a server that starts (--load-format remote_instance).

Each rank of the new server forms a process group of two with the same rank of the running server, on its own port. The
running server's rank is rank 0 of this group. Rank 0 first sends a digest of its parameters' names and layouts. If the
new server's digest is equal, rank 0 then sends the bytes of all parameters, in the layout that kernels read.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener
from uuid import uuid4

import torch
from torch import Tensor, nn

from runtime.config.plan import ModelPlan
from runtime.errors import CheckpointError, InvalidRequest
from runtime.loading.weight_memory import content, distinct
from runtime.mesh.rank_info import RankInfo
from runtime.worker.weight_transfer import TransferGroup

JOIN_TIMEOUT_S = 120
POLL_S = 0.05
BACKEND = "gloo"
SENDER, RECEIVER = 0, 1
MAX_ANSWER_BYTES = 10_000
OTHER_LAYOUT = (
    "The weights of {} have another layout. Both servers need the same model, dtype, quantisation, number of ranks, "
    "version of Penstock and kind of processor."
)


def send_parameters(model: nn.Module, group: TransferGroup) -> None:
    """Send all parameters to a new server. Raises `InvalidRequest` if the layout of its model differs."""
    group.broadcast(_digest(model), SENDER)
    agrees = group.broadcast(torch.zeros(1, dtype=torch.uint8), RECEIVER)
    if not agrees.item():
        raise InvalidRequest("The new server's weights have another layout.", param="group_name")
    for storage in _storages(model):
        group.broadcast(storage.cpu(), SENDER)
    group.broadcast(torch.zeros(1, dtype=torch.uint8), RECEIVER)  # returns when the receiver has got everything


def load_from_instance(model: nn.Module, plan: ModelPlan, rank_info: RankInfo) -> None:
    """Fill the parameters of a model from a running server. `prepare` must have laid them out.

    Raises CheckpointError if the server cannot be reached or its model differs.
    """
    seed, ports = f"{plan.seed_address}:{plan.seed_port}", plan.seed_group_ports or ()
    name = f"remote-instance-{uuid4().hex}" if rank_info.rank == 0 else "remote-instance"
    body = {
        "master_address": plan.seed_address,
        "ports": ",".join(map(str, ports)),
        "group_rank": SENDER,
        "world_size": 2,
        "group_name": name,
        "backend": BACKEND,
    }
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-seed") as pool:
        asked: Future[None] | None = None
        if rank_info.rank == 0:
            asked = pool.submit(_post, plan, "init_weights_send_group_for_remote_instance", body)
        group = _join(plan, ports[rank_info.rank], asked, seed)
        try:
            if asked is not None:
                asked.result()
                asked = pool.submit(_post, plan, "send_weights_to_remote_instance", {**body, "backend": None})
            _receive(model, group, seed)
            if asked is not None:
                asked.result()
        except RuntimeError as error:  # how gloo reports errors
            raise CheckpointError(
                f"Copying the weights of {seed} failed: it is gone, or did not answer in time."
            ) from error
        finally:
            group.close()


def _join(plan: ModelPlan, port: int, asked: Future[None] | None, seed: str) -> TransferGroup:
    info = {
        "address": plan.seed_address,
        "port": port,
        "world_size": 2,
        "name": "weights",
        "backend": BACKEND,
        "timeout_s": JOIN_TIMEOUT_S,
    }
    try:
        _wait_for_port(plan.seed_address or "", port, asked)
        return TransferGroup(info, RECEIVER, torch.device("cpu"))
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"Port {port} of {seed} cannot be reached.") from error


def _wait_for_port(address: str, port: int, asked: Future[None] | None) -> None:
    """Wait until the running server has opened the port.

    Raises OSError after `JOIN_TIMEOUT_S`, or the error of the future `asked` if it fails first.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            with socket.create_connection((address, port), timeout=JOIN_TIMEOUT_S):
                return
        except OSError:
            if asked is not None and asked.done():
                asked.result()
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _receive(model: nn.Module, group: TransferGroup, seed: str) -> None:
    own = _digest(model)
    theirs = group.broadcast(torch.empty_like(own), SENDER)
    agrees = torch.equal(own, theirs)
    group.broadcast(torch.tensor([agrees], dtype=torch.uint8), RECEIVER)
    if not agrees:
        raise CheckpointError(OTHER_LAYOUT.format(seed))
    with torch.inference_mode():
        for storage in _storages(model):
            host = storage if storage.device.type == "cpu" else torch.empty_like(storage, device="cpu")
            group.broadcast(host, SENDER)
            if host is not storage:
                storage.copy_(host)
    group.broadcast(torch.ones(1, dtype=torch.uint8), RECEIVER)


def _post(plan: ModelPlan, route: str, body: Mapping[str, Any]) -> None:
    seed = f"{plan.seed_address}:{plan.seed_port}"
    headers = {"Content-Type": "application/json"}
    if plan.seed_key is not None:
        headers["Authorization"] = f"Bearer {plan.seed_key}"
    content = json.dumps({key: value for key, value in body.items() if value is not None}).encode()
    request = Request(f"http://{seed}/{route}", content, headers)
    try:
        # Ignores the proxies of the environment, because they would see the key.
        with build_opener(ProxyHandler({})).open(request, timeout=10 * JOIN_TIMEOUT_S) as answer:
            answer.read(MAX_ANSWER_BYTES)
    except HTTPError as error:
        text = error.read(MAX_ANSWER_BYTES).decode(errors="replace")
        raise CheckpointError(f"{seed} refuses to send its weights ({error.code}): {text[:500]}") from error
    except (OSError, HTTPException) as error:
        raise CheckpointError(f"{seed} cannot be reached: {error}.") from error


def _storages(model: nn.Module) -> Iterator[Tensor]:
    """Yield the memory of all parameters as bytes, uint8 [N]. Memory that parameters share is yielded once."""
    for name, parameter in model.named_parameters():
        if parameter.is_mkldnn:
            raise CheckpointError(f"{name} is stored in a form of oneDNN, which cannot be copied.")
    return map(content, distinct(parameter.data for parameter in model.parameters()))


def _digest(model: nn.Module) -> Tensor:
    """Return a SHA-256 digest of the names, kinds, dtypes, shapes, strides and sizes of all parameters, uint8 [32]."""
    layout: Sequence[Any] = [
        [
            name,
            type(each).__name__,
            str(each.dtype),
            list(each.shape),
            list(each.stride()),
            each.untyped_storage().nbytes(),
        ]
        for name, each in model.named_parameters()
    ]
    return torch.tensor(list(sha256(json.dumps(layout).encode()).digest()), dtype=torch.uint8)
