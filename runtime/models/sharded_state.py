"""Checkpoints of which each rank has files of its own, written once for so many ranks (--load-format sharded_state).

A file model-rank-R-part-P.safetensors holds parameters of rank R as our layers have them, before kernels lay them out:
they are read from beginning to end, whatever kernels compute then. Another number of ranks needs other files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ops.select import select
from runtime.config.plan import ModelPlan
from runtime.distributed.mesh import Mesh, RankInfo
from runtime.errors import CheckpointError
from runtime.models.checkpoint import DESCRIPTIONS
from runtime.models.config import read_facts
from runtime.models.loader import SHARE_FILES, build_model, open_tensors
from runtime.models.parameters import Named, fill_layers

PART_BYTES = 4 * 10**9  # of one file, and about what is in memory at once


def write_shares(source: str, output: str, tp_size: int, pp_size: int, dtype: str | None = None) -> int:
    """Write the checkpoint in `source` to the new directory `output`, for so many ranks -> the bytes of the weights.

    One layer is in memory at a time beside what is written next. Raises CheckpointError for a checkpoint without a
    family, a quantised one, one that cannot be shared so, and a directory that is there already.
    """
    facts, target = read_facts(source, model_impl="native"), Path(output)
    if facts.quantization is not None:
        raise CheckpointError(f"{source} is quantized ({facts.quantization}), which shares cannot be.")
    if tp_size > 1 and facts.is_encoder:
        raise CheckpointError(f"{facts.architecture} cannot be cut over ranks: leave --tp-size out.")
    if pp_size > facts.num_layers or tp_size > facts.num_heads:
        raise CheckpointError(
            f"{facts.num_layers} layers of {facts.num_heads} heads are too few for so many ranks."
        )
    if target.exists():
        raise CheckpointError(f"{output} is there already; give a new directory.")
    plan = ModelPlan(
        path=source,
        load_format="auto",
        dtype=dtype or facts.dtype,
        device="cpu",
        context_length=facts.context_length,
        random_seed=0,
    )
    tensors, device, total = open_tensors(facts, plan), torch.device("cpu"), 0
    target.mkdir(parents=True)
    for rank in range(tp_size * pp_size):
        info = RankInfo(rank=rank, tp_size=tp_size, pp_size=pp_size)
        stage = info.stage_layers(facts.num_layers)
        model = build_model(facts, plan, select(), tensors, Mesh(info, device), stage)
        held: dict[str, torch.Tensor] = {}
        part = held_bytes = 0
        for modules in fill_layers(model, tensors, getattr(torch, plan.dtype), device):
            held |= _taken(modules)
            held_bytes = sum(tensor.nbytes for tensor in held.values())
            if held_bytes > PART_BYTES:
                part, total, held = part + 1, total + _save(target, rank, part, held), {}
        total += _save(target, rank, part, held)
    for pattern in (*DESCRIPTIONS, "*/*.json", "*/*.safetensors"):  # those of pooling stand in folders
        for file in Path(source).glob(pattern):
            if not file.name.endswith(".index.json"):
                place = target / file.relative_to(source)
                place.parent.mkdir(exist_ok=True)
                shutil.copy(file, place)
    values = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(
        json.dumps({**values, "dtype": plan.dtype}, indent=2), encoding="utf-8"
    )
    return total


def _taken(modules: Named) -> dict[str, torch.Tensor]:
    """The parameters of a filled layer, which is without memory again."""
    taken: dict[str, torch.Tensor] = {}
    for name, module in modules:
        for own, parameter in list(module.named_parameters(recurse=False)):
            taken[f"{name}.{own}"] = parameter.data
            setattr(module, own, nn.Parameter(parameter.data.to("meta"), requires_grad=False))
    return taken


def _save(target: Path, rank: int, part: int, tensors: dict[str, torch.Tensor]) -> int:
    if tensors:
        save_file(tensors, target / SHARE_FILES.format(rank=rank, part=part), metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())
