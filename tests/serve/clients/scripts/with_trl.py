"""TRL's client, unmodified, against the server at argv[1]; argv[2] is a checkpoint with new weights.

The parts of vLLM that the client imports on the trainer's side are replaced: the address of this machine, and the
sender, which broadcasts over gloo here and over NCCL there.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "kit"))
from trainer_process import packed, tensors_of, trainer_group


class Sender:
    """The part of vLLM's NCCLWeightTransferEngine that trainers call, over gloo."""

    @staticmethod
    def trainer_init(info: dict[str, Any]) -> Any:
        return trainer_group(info["master_port"], info["world_size"], "weight_transfer")

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        tensors = [tensor for _, tensor in iterator]
        for bucket in packed(tensors, "packed", 2**30):
            torch.distributed.broadcast(bucket, 0, group=trainer_args.group)


def module(name: str, **members: Any) -> None:
    made = types.ModuleType(name)
    made.__dict__.update(members, __path__=[], __spec__=ModuleSpec(name, None))
    sys.modules[name] = made


module("vllm", __version__="0.25.0")
for each in ("vllm.utils", "vllm.distributed", "vllm.distributed.weight_transfer"):
    module(each)
module("vllm.utils.network_utils", get_ip=lambda: "127.0.0.1")
module(
    "vllm.distributed.weight_transfer.nccl_engine",
    NCCLWeightTransferEngine=Sender,
    NCCLTrainerSendWeightsArgs=lambda **fields: types.SimpleNamespace(**fields),
)
[trl] = getattr(importlib.util.find_spec("trl"), "submodule_search_locations", None) or [""]
folder = types.ModuleType("trl.generation")  # without the trainers that its __init__ imports
folder.__path__ = [f"{trl}/generation"]
sys.modules[folder.__name__] = folder

from trl.generation.vllm_client import VLLMClient  # noqa: E402  # pyright: ignore[reportMissingImports]


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"wrong: {what}")


def generate(client: Any, **options: Any) -> dict[str, Any]:
    return client.generate([[5, 6, 7], [9, 8, 7, 6]], temperature=1.0, max_tokens=6, logprobs=0, **options)


url, path = sys.argv[1:3]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
client = VLLMClient(base_url=url, group_port=port)
check(client.get_world_size() == 1, "world size")

found = generate(client, n=2, generation_kwargs={"seed": 3, "ignore_eos": True})
check(found["prompt_ids"] == [[5, 6, 7], [9, 8, 7, 6]], "prompt ids")
check([len(ids) for ids in found["completion_ids"]] == [6] * 4, "completion ids")
check(all(len(each) == 1 for row in found["logprobs"] for each in row), "one log-probability a token")
check([[i] for i in found["completion_ids"][0]] == found["logprob_token_ids"][0], "ids of log-probabilities")
[scores] = client.get_sequence_logprobs([[5, 6, 7, *found["completion_ids"][0]]], [3], 10)["actual_logprobs"]
check(len(scores) == 6, "log-probabilities of a sequence")

client.init_communicator(device="cuda")  # without an index, so that no CUDA call follows
with client.weight_update():
    for name, tensor in tensors_of(path).items():
        client.update_named_param(name, tensor)
client.reset_prefix_cache()
changed = generate(client, generation_kwargs={"seed": 3, "ignore_eos": True})
check(changed["completion_ids"] != found["completion_ids"][::2], "the weights changed")
client.communicator = None  # a group of torch, which the client would close like one of vLLM
print("CHANGED", changed["completion_ids"])
