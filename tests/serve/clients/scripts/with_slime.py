"""slime's engine client, unmodified, against the server at argv[1]; argv[2] is a checkpoint with new weights.

The client's methods are HTTP calls. SGLang itself, which starts servers in slime, is replaced by an empty module.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import requests
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "kit"))
from trainer_process import tensors_of, trainer_group


def module(name: str, **members: Any) -> None:
    made = types.ModuleType(name)
    made.__dict__.update(members, __path__=[], __spec__=ModuleSpec(name, None))
    sys.modules[name] = made


for each in ("sglang", "sglang.srt"):
    module(each)
module("sglang.srt.server_args", ServerArgs=object)
module("sglang.srt.utils", kill_process_tree=print)
[slime] = getattr(importlib.util.find_spec("slime"), "submodule_search_locations", None) or [""]
folder = types.ModuleType("slime.backends.sglang_utils")  # without the set-up of GPUs in its __init__
folder.__path__ = [f"{slime}/backends/sglang_utils"]
sys.modules[folder.__name__] = folder
module("slime.utils.accelerator", resolve_visible_device_id=int)

from slime.backends.sglang_utils.external import discover_external_engines  # noqa: E402  # pyright: ignore[reportMissingImports]
from slime.backends.sglang_utils.server_control import num_requests_from_load  # noqa: E402  # pyright: ignore[reportMissingImports]
from slime.backends.sglang_utils.sglang_engine import SGLangEngine  # noqa: E402  # pyright: ignore[reportMissingImports]

CHECKED = {"dp_size": 1, "disaggregation_mode": "null", "enable_memory_saver": False}
EXTERNAL = {"rollout_external": True, "sglang_router_ip": None, "sglang_router_port": None}


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"wrong: {what}")


url, path = sys.argv[1:3]
[info] = discover_external_engines([url])
check((info.worker_type, info.num_gpus, info.parallel_config["tp_size"]) == ("regular", 1, 1), "server info")
engine = SGLangEngine(types.SimpleNamespace(**EXTERNAL), rank=0)
engine.node_rank, engine.server_host, engine.server_port = 0, info.host, info.port
engine.router_ip = engine.router_port = None
server_args = {"node_rank": 0, "host": info.host, "port": info.port, **CHECKED}
engine._init_external(server_args, external_engine_need_check_fields=list(CHECKED))

check(engine.health_generate(), "health")
engine.pause_generation()
engine.flush_cache()
tensors = tensors_of(path)
names, dtypes = list(tensors), [tensor.dtype for tensor in tensors.values()]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
engine.destroy_weights_update_group("slime")  # there is none yet
with ThreadPoolExecutor(1) as pool:
    joining = pool.submit(engine.init_weights_update_group, "127.0.0.1", port, 1, 2, "slime", "gloo")
    group = trainer_group(port, 2, "slime")
    check(joining.result()["success"], "the group")
    engine.check_weights("snapshot")
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    update = pool.submit(
        engine.update_weights_from_distributed, names, dtypes, shapes, "slime", flush_cache=False, weight_version="7"
    )
    for tensor in tensors.values():
        torch.distributed.broadcast(tensor, 0, group=group)
    check(update.result()["success"], "the update")
engine.continue_generation()
check(engine.get_weight_version() == "7", "the version")
engine.destroy_weights_update_group("slime")

engine.release_memory_occupation()
engine.resume_memory_occupation(["weights"])
engine.resume_memory_occupation(["kv_cache"])
loads: Any = requests.get(f"{url}/v1/loads?include=core", timeout=30).json()
check(num_requests_from_load(loads) == 0, "the load")
engine.update_weights_from_disk(path, weight_version="8")
engine.check_weights("snapshot")
check(engine.check_weights("compare")["success"], "the check")
print("CHANGED", engine.get_weight_version())
