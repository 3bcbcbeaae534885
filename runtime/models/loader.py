"""Building a model and filling its parameters: every parameter once, every tensor accounted for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, nn

from ops.select import Kernels
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.errors import CheckpointError
from runtime.layers.sharding import Split, Stage, TensorParallelGroup
from runtime.layers.weight import Prepared, Shard, Weighted
from runtime.models.checkpoint import find_weights
from runtime.models.config import Config
from runtime.models.decoder import Build, Decoder, assemble
from runtime.models.tensors import TensorFiles

MAX_NAMED = 20  # tensors listed in one error
DUMMY_SEED = 1234
DUMMY_RANGE = 1e-3

# Tensors that some checkpoints carry and nobody needs: the angles are computed, a tied head is the embedding.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
IGNORED_IF_TIED = re.compile(r"lm_head\.weight")


def load_model(
    facts: ModelFacts,
    plan: ModelPlan,
    kernels: Kernels,
    group: TensorParallelGroup | None = None,
    stage: Stage | None = None,
) -> Decoder:
    """The model on plan.device in plan.dtype, ready to compute, without gradients.

    Of every layer only the share of the `group`'s rank, of the layers only those of the `stage`.

    At no time does it hold more than these weights and one tensor; a tied head in a layout that the embedding cannot
    read is a weight of its own. Raises CheckpointError naming every tensor that is missing, left over or misshapen;
    then no memory was taken yet.
    """
    device = torch.device(plan.device)
    config = Config(facts.config)
    with torch.device("meta"):
        model = assemble(config, Build(kernels, plan.context_length, device))
    tensors = None
    if plan.load_format != "dummy":
        tensors = TensorFiles(find_weights(Path(facts.path), plan.load_format), mmap=plan.mmap)
        ignored = _ignored(tensors.shapes, tied=config.flag("tie_word_embeddings"))
        shapes = {name: shape for name, shape in tensors.shapes.items() if name not in ignored}
        check_total(collect_shards(model), shapes)
    if stage is not None:
        model.keep(stage)
    if group is not None and group.size > 1:
        with torch.device("meta"):
            split(model, group)
    _allocate(model, getattr(torch, plan.dtype), device)
    _fill_all(collect_shards(model), tensors, plan.num_load_threads)
    for module in model.modules():
        if isinstance(module, Prepared):
            module.prepare()
    return model.eval()


def split(model: nn.Module, group: TensorParallelGroup) -> None:
    """Cut every layer that can be cut. Its parameters must not have memory yet."""
    for module in model.modules():
        if isinstance(module, Split):
            module.split(group)


def collect_shards(model: nn.Module) -> dict[str, Shard]:
    """What each checkpoint tensor fills. RuntimeError where a layer's shards leave a gap or overlap."""
    shards: dict[str, Shard] = {}
    for module in model.modules():
        own = list(module.shards()) if isinstance(module, Weighted) else []
        _check_cover(module, own)
        for shard in own:
            if shard.name in shards:
                raise RuntimeError(f"Two layers claim the tensor {shard.name}.")
            shards[shard.name] = shard
    return shards


def check_total(shards: Mapping[str, Shard], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the tensors are exactly those that the model is made of.

    Those with a default may be absent.
    """
    missing = [name for name, shard in shards.items() if name not in shapes and shard.default is None]
    extra = [name for name in shapes if name not in shards]
    misshapen = [
        f"{name} is {_text(shapes[name])}, must be {_text(shard.shape)}"
        for name, shard in shards.items()
        if name in shapes and (shapes[name] or (1,)) != shard.shape  # a scalar is a vector of one
    ]
    problems = [
        _list("missing", missing),
        _list("not of this model", extra),
        _list("of the wrong shape", misshapen),
    ]
    if any(problems):
        raise CheckpointError(
            "The checkpoint does not fit the model: " + "; ".join(filter(None, problems)) + "."
        )


def _allocate(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter memory; until now they were shapes only."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))


def _check_cover(module: nn.Module, shards: Sequence[Shard]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        row = 0
        for shard in sorted((p for p in shards if p.parameter is parameter), key=lambda p: p.first_row):
            if shard.first_row != row:
                raise RuntimeError(
                    f"{type(module).__name__}.{name}: {shard.name} does not begin at row {row}."
                )
            row += shard.num_rows
        if row != parameter.shape[0]:
            raise RuntimeError(
                f"{type(module).__name__}.{name}: {row} of {parameter.shape[0]} rows are filled."
            )


def _ignored(names: Mapping[str, object], *, tied: bool) -> set[str]:
    return {name for name in names if IGNORED.fullmatch(name) or (tied and IGNORED_IF_TIED.fullmatch(name))}


def _fill_all(shards: Mapping[str, Shard], tensors: TensorFiles | None, num_threads: int) -> None:
    if tensors is None:
        for shard in shards.values():
            fill_dummy(shard)
        return
    stored = {name: shard.cut for name, shard in shards.items() if name in tensors.shapes}
    tensors.read_all(lambda name, tensor: _fill(shards[name], tensor), stored, num_threads)
    for name, shard in shards.items():
        if shard.default is not None and name not in stored:
            shard.target.fill_(shard.default)


def _fill(shard: Shard, tensor: Tensor) -> None:
    shard.target.copy_(tensor)


def fill_dummy(shard: Shard) -> None:
    """Small uniform numbers that depend on the tensor's name and the device alone, drawn there; or the default.

    On a GPU that takes milliseconds, where drawing and sending 8 billion of them would take a minute.
    """
    target = shard.target
    if shard.default is not None:
        target.fill_(shard.default)
        return
    generator = torch.Generator(target.device).manual_seed(DUMMY_SEED + crc32(shard.name.encode()))
    if not shard.cut:
        target.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
        return
    values = torch.empty(shard.shape, dtype=target.dtype, device=target.device)
    target.copy_(values.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)[shard.cut])


def _list(problem: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {problem} ({', '.join(names[:MAX_NAMED])}{more})"


def _text(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape) or "a scalar"
