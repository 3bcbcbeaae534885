"""Building a model and filling its parameters: every parameter once, every tensor accounted for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, nn

from ops.machine import GIB, Machine
from ops.select import Kernels
from runtime.config.fields import Fields
from runtime.config.gguf_header import is_gguf
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.config.pooling import Pooling
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.pooler import Pooler
from runtime.layers.quantization import QuantizationMethod, quantization_method
from runtime.layers.quantization.grouped import KeptGroups
from runtime.layers.score import ScoreLayer
from runtime.layers.sharding import Split, Stage, TensorParallelGroup
from runtime.layers.weight import Prepared, Shard, Weighted
from runtime.models.by_transformers import load_by_transformers
from runtime.models.checkpoint import find_weights
from runtime.models.config import Config
from runtime.models.decoder import Decoder
from runtime.models.formats.gguf import GgufFiles
from runtime.models.formats.stored import QuantizedTensors
from runtime.models.quantization import quantization_fields
from runtime.models.registry import entry
from runtime.models.tensors import TensorFiles

MAX_FURTHER = 16  # layers behind the model's own that predict further tokens
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
    if plan.by_transformers:
        model = load_by_transformers(facts, plan, kernels)
        model.pooler = _pooler(model, facts, plan)
        return model
    device = torch.device(plan.device)
    config = Config(facts.config)
    tensors = open_tensors(facts, plan) if plan.load_format != "dummy" else None
    build = Build(
        kernels, plan.context_length, device, _method(plan, kernels, tensors), state_dtype=plan.state_dtype
    )
    with torch.device("meta"):
        model = entry(config.architecture).decoder()(config, build)
        if writes_nothing(facts):
            model.without_head(_score_layers(config))
    if tensors is not None:
        if isinstance(tensors, QuantizedTensors):
            wanted = collect_shards(model)
            tensors.without_zero_biases(wanted)
            tensors.keep_grouped(wanted)
        ignored = _ignored(tensors.shapes, tied=config.flag("tie_word_embeddings"))
        shapes = {name: shape for name, shape in tensors.shapes.items() if name not in ignored}
        check_total(collect_shards(model), shapes)
    if stage is not None:
        model.keep(stage)
    if group is not None and group.size > 1:
        with torch.device("meta"):
            split(model, group)
        if isinstance(tensors, QuantizedTensors):  # a share may cut groups
            tensors.keep_grouped(collect_shards(model))
    dtype = getattr(torch, plan.dtype)
    _check_memory(model, dtype, device)
    for module in model.modules():
        _allocate(module, dtype, device)
    _fill_all(collect_shards(model), tensors, plan.num_load_threads)
    for module in model.modules():
        if isinstance(module, Prepared):
            module.prepare()
    model.pooler = _pooler(model, facts, plan)
    return model.eval()


def _pooler(model: Decoder, facts: ModelFacts, plan: ModelPlan) -> Pooler:
    """What makes vectors of hidden states, with the weights that stand in folders of their own."""
    pooling, weights = facts.pooling or Pooling(), []
    size = facts.hidden_size * len(pooling.modes)
    for dense in pooling.dense:
        shapes = {"linear.weight": (dense.size, size)} | (
            {"linear.bias": (dense.size,)} if dense.bias else {}
        )
        if plan.load_format == "dummy":
            found = {name: torch.zeros(shape) for name, shape in shapes.items()}
        else:
            files = TensorFiles(find_weights(Path(facts.path) / dense.folder), mmap=False)
            if files.shapes != shapes:
                raise CheckpointError(f"{dense.folder} must hold {shapes}, and holds {files.shapes}.")
            found = {name: files.read(name) for name in shapes}
        there = {name: tensor.float().to(plan.device) for name, tensor in found.items()}
        weights.append((there["linear.weight"], there.get("linear.bias")))
        size = dense.size
    return Pooler(pooling, weights, model.scorer)


def _check_memory(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Raise CheckpointError where the weights are larger than the memory that is free: nothing was taken yet."""
    needed = sum(
        parameter.numel() * getattr(parameter, "own_dtype", dtype).itemsize
        for parameter in model.parameters()
    )
    if device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
    else:
        available = Machine.probe().available_bytes
    if available and needed > available:
        raise CheckpointError(
            f"The weights need {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, and "
            f"{available / GIB:.1f} GiB of memory are free. Use a smaller model, or more devices (--tp-size)."
        )


def _method(
    plan: ModelPlan, kernels: Kernels, tensors: TensorFiles | QuantizedTensors | None
) -> QuantizationMethod:
    """As asked; where nothing was, weights of 4 bits stay so if there are kernels for them."""
    dtype = getattr(torch, plan.dtype)
    keeps = kernels.launcher is not None and dtype in kernels.launcher.dtypes and plan.device == "cpu"
    if plan.quantization is None and keeps and isinstance(tensors, QuantizedTensors) and tensors.groups:
        return KeptGroups(tensors.groups, dtype, tensors.tables)
    return quantization_method(plan.quantization)


def _tensor_name(facts: ModelFacts, stored: str) -> str | None:
    """What the family calls a stored tensor; None for unused ones, as those of layers that predict further tokens."""
    fields = Fields(facts.config, "config.json: ")
    num_further = fields.optional_integer("num_nextn_predict_layers", low=0) or 0
    further = (
        f"model.layers.{facts.num_layers + number}." for number in range(min(num_further, MAX_FURTHER))
    )
    if stored.startswith(tuple(further)):
        return None
    name = entry(facts.architecture).tensor_name(stored)
    if name is None or not writes_nothing(facts) or name.startswith("score."):
        return name
    # The head is not needed, and a body that was saved alone does not say that it is one.
    return None if name.startswith("lm_head.") else name if name.startswith("model.") else f"model.{name}"


def writes_nothing(facts: ModelFacts) -> bool:
    """Whether a decoder of ours needs no head: its checkpoint is made for vectors or scores."""
    return facts.pooling is not None and not facts.is_encoder


def _score_layers(config: Config) -> tuple[ScoreLayer, ...]:
    """Of a decoder that is a classifier: one product, or two of a reward model."""
    if not config.labels:
        return ()
    if config.architecture.endswith("ForRewardModel"):
        first = ScoreLayer("score.0", config.hidden_size, activation="relu")
        return first, ScoreLayer("score.2", 1)
    return (ScoreLayer("score", len(config.labels), bias=False),)


def open_tensors(facts: ModelFacts, plan: ModelPlan) -> TensorFiles | QuantizedTensors:
    """The checkpoint's tensors as the model knows them, dequantised as they are read where they are quantised."""
    if is_gguf(facts.path):
        return QuantizedTensors(GgufFiles(Path(facts.path)), quantization_fields(facts.config))
    files = TensorFiles(
        find_weights(Path(facts.path), plan.load_format),
        mmap=plan.mmap,
        rename=partial(_tensor_name, facts),
    )
    if facts.quantization is None:
        return files
    return QuantizedTensors(files, quantization_fields(facts.config))


def update_weights(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Give the layers that `tensors` names new weights: whole checkpoint tensors by name, of any dtype.

    To be called between steps. Weights keep the memory that they have where their layout allows it, so that recorded
    and captured steps see the new ones. Raises CheckpointError, and changes nothing, for a tensor that no layer of this
    rank has, one of another shape, and a layer of which only some tensors are there.
    """
    tied = model.head is not None and model.head.weight is None
    tensors = {name: tensors[name] for name in tensors.keys() - _ignored(tensors, tied=tied)}
    layers = [(module, _own_shards(module)) for module in model.modules() if isinstance(module, Weighted)]
    layers = [(module, own) for module, own in layers if not tensors.keys().isdisjoint(own)]
    wanted = {name: shards for _, own in layers for name, shards in own.items()}
    check_total(wanted, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    dtype = model.dtype
    with torch.inference_mode():
        for module, _ in layers:
            _renew(module, tensors, dtype)


def _renew(module: Weighted, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Fill a layer that has its weights already, and prepare them again if they were prepared."""
    before: dict[str, nn.Parameter] = {}
    if isinstance(module, Prepared) and isinstance(module, nn.Module):
        before = dict(module.named_parameters(recurse=False))
        with torch.device("meta"):
            module.allocate()
        if before:
            _allocate(module, dtype, next(iter(before.values())).device)
    for name, shards in _own_shards(module).items():
        for shard in shards:
            if name in tensors:
                shard.take(tensors[name][shard.cut])
    if not (isinstance(module, Prepared) and isinstance(module, nn.Module)):
        return
    module.prepare()
    for name, now in list(module.named_parameters(recurse=False)):
        if name in before and _same_layout(before[name], now):
            before[name].untyped_storage().copy_(now.untyped_storage())
            setattr(module, name, before[name])


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes of one tensor can take the place of the other's."""
    if type(one) is not type(other) or one.is_mkldnn or other.is_mkldnn:
        return False
    layouts = ((x.dtype, x.shape, x.stride(), x.untyped_storage().nbytes()) for x in (one, other))
    return next(layouts) == next(layouts)


def split(model: nn.Module, group: TensorParallelGroup) -> None:
    """Cut every layer that can be cut. Its parameters must not have memory yet."""
    for module in model.modules():
        if isinstance(module, Split):
            module.split(group)


def collect_shards(model: nn.Module) -> dict[str, list[Shard]]:
    """What each checkpoint tensor fills: one part of one layer, or several.

    RuntimeError where a layer's shards leave a gap or overlap, and where two layers claim one tensor.
    """
    found: dict[str, list[Shard]] = {}
    for module in model.modules():
        own = _own_shards(module) if isinstance(module, Weighted) else {}
        _check_cover(module, [shard for shards in own.values() for shard in shards])
        for name in own.keys() & found.keys():
            raise RuntimeError(f"Two layers claim the tensor {name}.")
        found |= own
    return found


def _own_shards(module: Weighted) -> dict[str, list[Shard]]:
    shards: dict[str, list[Shard]] = {}
    for shard in module.shards():
        shards.setdefault(shard.name, []).append(shard)
    return shards


def check_total(shards: Mapping[str, Sequence[Shard]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the tensors are exactly those that the layers are made of.

    Those with a default may be absent.
    """
    missing = [name for name, (shard, *_) in shards.items() if name not in shapes and shard.default is None]
    extra = [name for name in shapes if name not in shards]
    misshapen = [
        f"{name} is {_text(shapes[name])}, must be {_text(shard.shape)}"
        for name, (shard, *_) in shards.items()
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


def _allocate(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a layer's own parameters memory; until now they were shapes, or prepared."""
    for name, shape in list(module.named_parameters(recurse=False)):
        memory = torch.empty(shape.shape, dtype=getattr(shape, "own_dtype", dtype), device=device)
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


def _fill_all(
    shards: Mapping[str, Sequence[Shard]], tensors: TensorFiles | QuantizedTensors | None, num_threads: int
) -> None:
    if tensors is None:
        for each in shards.values():
            for shard in each:
                fill_dummy(shard)
        return

    def fill(name: str, parts: Sequence[Tensor]) -> None:
        for shard, part in zip(shards[name], parts, strict=True):
            shard.take(part)

    stored = {name: [shard.cut for shard in each] for name, each in shards.items() if name in tensors.shapes}
    tensors.read_all(fill, stored, num_threads)
    for name, each in shards.items():
        for shard in each:
            if shard.default is not None and name not in stored:
                shard.target.fill_(shard.default)


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
    shape, cut = shard.shape, shard.cut
    if shard.index is not None:  # one expert of many in the tensor: no more is drawn than that
        generator.manual_seed(generator.initial_seed() + shard.index)
        shape = (1, *shape[1:])
        cut = (slice(0, 1), *cut[1:])
    values = torch.empty(shape, dtype=target.dtype, device=target.device)
    shard.take(values.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)[cut])


def _list(problem: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {problem} ({', '.join(names[:MAX_NAMED])}{more})"


def _text(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape) or "a scalar"
