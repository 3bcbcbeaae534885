"""Checkpoints with separate files per rank (--load-format sharded_state).

A file model-rank-R-part-P.safetensors holds parameters of rank R as the layers allocate them, before `prepare` changes
their layout. Each rank therefore reads its files sequentially, and the files do not depend on the kernels. A different
number of ranks needs new files.
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
from runtime.errors import CheckpointError
from runtime.loading.checkpoint import DESCRIPTIONS
from runtime.loading.facts import read_facts
from runtime.loading.loader import SHARD_FILES, build_model, open_tensors
from runtime.loading.parameters import Named, fill_layers
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo

PART_BYTES = 4 * 10**9  # size of an output file in bytes; memory use is about the same


def write_shards(source: str, output: str, tp_size: int, pp_size: int, dtype: str | None = None) -> int:
    """Write the checkpoint in `source` to the new directory `output`, split over ranks. Return its size in bytes.

    Needs memory for one layer and one output file. Raises CheckpointError if the model is not of a native family, is
    quantised or cannot be split over these ranks, and if `output` exists.
    """
    facts, target = read_facts(source, model_impl="native"), Path(output)
    if facts.quantization is not None:
        raise CheckpointError(
            f"{source} is quantized ({facts.quantization}). Only unquantized checkpoints can be sharded."
        )
    if tp_size > 1 and facts.is_encoder:
        raise CheckpointError(f"{facts.architecture} does not support tensor parallelism. Omit --tp-size.")
    if pp_size > facts.num_layers or tp_size > facts.num_heads:
        raise CheckpointError(
            f"--pp-size exceeds the {facts.num_layers} layers, or --tp-size the {facts.num_heads} heads of the model."
        )
    if target.exists():
        raise CheckpointError(f"{output} exists already. Choose a new directory.")
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
        model = build_model(facts, plan, select(), tensors, Mesh(info, device).axis("tp"), stage)
        pending: dict[str, torch.Tensor] = {}
        part = pending_bytes = 0
        for modules in fill_layers(model, tensors, getattr(torch, plan.dtype), device):
            pending |= _detach(modules)
            pending_bytes = sum(tensor.nbytes for tensor in pending.values())
            if pending_bytes > PART_BYTES:
                part, total, pending = part + 1, total + _save(target, rank, part, pending), {}
        total += _save(target, rank, part, pending)
    for pattern in (*DESCRIPTIONS, "*/*.json", "*/*.safetensors"):  # sentence-transformers' modules are in subfolders
        for file in Path(source).glob(pattern):
            if not file.name.endswith(".index.json"):
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(file, copy)
    values = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps({**values, "dtype": plan.dtype}, indent=2), encoding="utf-8")
    return total


def _detach(modules: Named) -> dict[str, torch.Tensor]:
    """Return the parameters of a filled layer and move the layer back to the meta device."""
    detached: dict[str, torch.Tensor] = {}
    for name, module in modules:
        for part, parameter in list(module.named_parameters(recurse=False)):
            detached[f"{name}.{part}"] = parameter.data
            setattr(module, part, nn.Parameter(parameter.data.to("meta"), requires_grad=False))
    return detached


def _save(target: Path, rank: int, part: int, tensors: dict[str, torch.Tensor]) -> int:
    if tensors:
        save_file(tensors, target / SHARD_FILES.format(rank=rank, part=part), metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())
