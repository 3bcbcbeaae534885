"""Building a model and filling its parameters: every parameter once, every tensor accounted for."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ops.machine import GIB, Machine
from ops.matmul.grouped import GroupForm
from ops.select import Kernels
from runtime.config.fields import Fields
from runtime.config.gguf_header import is_gguf
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.config.pooling import Pooling
from runtime.distributed.mesh import RankInfo
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.moe import MoE
from runtime.layers.pooler import Pooler
from runtime.layers.quantization import QuantizationMethod, quantization_method
from runtime.layers.quantization.grouped import KeptGroups
from runtime.layers.score import ScoreLayer
from runtime.layers.sharding import Stage, TensorParallelGroup
from runtime.layers.weight import Weighted
from runtime.models.by_transformers import load_by_transformers
from runtime.models.checkpoint import WeightFiles, find_weights
from runtime.models.config import Config
from runtime.models.custom_loader import GivenTensors
from runtime.models.decoder import Decoder
from runtime.models.formats.gguf import GgufFiles
from runtime.models.formats.stored import QuantizedTensors
from runtime.models.kv_scales import set_kv_scales
from runtime.models.parameters import (
    allocate,
    check_dtypes,
    check_total,
    collect_shards,
    fill_layers,
    loading_bar,
    own_parameters,
    own_shards,
    split,
)
from runtime.models.quantization import quantization_fields
from runtime.models.registry import entry
from runtime.models.tensors import TensorFiles, Tensors, give_back_freed

MAX_FURTHER = 16  # layers behind the model's own that predict further tokens
SHARE_FILES = "model-rank-{rank}-part-{part}.safetensors"  # of sharded_state

logger = logging.getLogger("penstock.core")
COMPARED_ROWS = 256  # of a head and an embedding
# Tensors that some checkpoints carry and nobody needs: the angles are computed, a tied head is the embedding.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
IGNORED_IF_TIED = re.compile(r"lm_head\.weight")


def load_model(
    facts: ModelFacts,
    plan: ModelPlan,
    kernels: Kernels,
    group: TensorParallelGroup | None = None,
    stage: Stage | None = None,
    rank_info: RankInfo | None = None,
) -> Decoder:
    """The model on plan.device in plan.dtype, ready to compute, without gradients.

    Of every layer only the share of the `group`'s rank, of the layers only those of the `stage`; `rank_info` says which
    files are this rank's where each has its own.

    At no time does it hold more than these weights and what one layer is made of; a tied head in a layout that the
    embedding cannot read is a weight of its own. Raises CheckpointError naming every tensor that is missing, left over
    or misshapen; then no memory was taken yet.
    """
    if plan.by_transformers:
        model = load_by_transformers(facts, plan, kernels)
        model.pooler = _pooler(model, facts, plan)
        return model
    shares = plan.load_format == "sharded_state"
    tensors = None if shares or plan.load_format == "dummy" else open_tensors(facts, plan)
    model = build_model(facts, plan, kernels, tensors, group, stage)
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    if shares:
        tensors = open_share(facts, plan, rank_info or RankInfo())
        check_total(own_parameters(list(model.named_modules())), tensors.shapes, tensors.where)
    filled = _check_memory(model, dtype, device)
    with loading_bar(filled if rank_info is None or rank_info.rank == 0 else None) as bar:
        for modules in fill_layers(
            model,
            tensors,
            dtype,
            device,
            num_threads=plan.num_load_threads,
            shards_of=own_parameters if shares else None,
            bar=bar,
        ):
            for _, module in modules:
                if isinstance(module, Weighted):
                    module.prepare()
            give_back_freed()
    if plan.kv_scales is not None:
        ranks = rank_info or RankInfo()
        set_kv_scales(model, plan.kv_scales, facts, ranks.tp_rank, ranks.tp_size)
    model.pooler = _pooler(model, facts, plan)
    return model.eval()


def build_model(
    facts: ModelFacts,
    plan: ModelPlan,
    kernels: Kernels,
    tensors: Tensors | None,
    group: TensorParallelGroup | None = None,
    stage: Stage | None = None,
) -> Decoder:
    """The model, or a rank's share of it, as shapes without memory. Raises CheckpointError unless `tensors` fill it."""
    device, config = torch.device(plan.device), Config(facts.config)
    build = Build(
        kernels,
        plan.context_length,
        device,
        _method(plan, kernels, tensors),
        state_dtype=plan.state_dtype,
        always_absorbed=plan.always_absorbed,
    )
    family = entry(config.architecture).decoder()
    with torch.device("meta"):
        model = family(config, build)
    if isinstance(tensors, TensorFiles) and _has_own_head(model, tensors):
        logger.warning(
            "config.json says tie_word_embeddings, but the checkpoint's lm_head.weight is not the embedding: it is the "
            "head, as in transformers."
        )
        config.values = {**config.values, "tie_word_embeddings": False}
        with torch.device("meta"):
            model = family(config, build)
    with torch.device("meta"):
        if writes_nothing(facts):
            model.without_head(_score_layers(config))
        for module in model.modules():
            if isinstance(module, MoE) and tensors is not None:
                module.follow(tensors.shapes)
    if tensors is not None:
        if isinstance(tensors, QuantizedTensors):
            tensors.check_plain(collect_shards(model))
            tensors.keep_grouped(_kept(build))
        ignored = _ignored(tensors.shapes, tied=config.flag("tie_word_embeddings"))
        shapes = {name: shape for name, shape in tensors.shapes.items() if name not in ignored}
        where = tensors.where if isinstance(tensors, TensorFiles) else lambda names: ""
        check_total(collect_shards(model), shapes, where)
        if isinstance(tensors, TensorFiles) and not plan.any_dtype:
            check_dtypes({name: dtype for name, dtype in tensors.dtypes.items() if name in shapes}, where)
    if stage is not None:
        model.keep(stage)
    if group is not None and group.size > 1:
        with torch.device("meta"):
            split(model, group)
        if isinstance(tensors, QuantizedTensors):  # a share may cut groups
            tensors.keep_grouped(_kept(build))
    return model


def _kept(build: Build) -> Mapping[str, GroupForm]:
    """The weights that the model's layers want in groups, and in which form."""
    return build.quantization.kept if isinstance(build.quantization, KeptGroups) else {}


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


def _check_memory(model: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """The bytes that are filled. Raises CheckpointError where there is less memory free: nothing was taken yet."""
    filled = needed = 0
    for parameter in model.parameters():
        own = getattr(parameter, "own_dtype", dtype).itemsize
        filled += parameter.numel() * own
        needed += parameter.numel() * getattr(parameter, "prepared_bits", 8 * own) // 8
    if device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
    else:
        available = Machine.probe().available_bytes
    if available and needed > available:
        raise CheckpointError(
            f"The weights need {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, and "
            f"{available / GIB:.1f} GiB of memory are free. Use a smaller model, or more devices (--tp-size)."
        )
    return filled


def _method(plan: ModelPlan, kernels: Kernels, tensors: Tensors | None) -> QuantizationMethod:
    """As asked; weights of few bits stay so, where nothing else was asked for, if there are kernels for them."""
    dtype = getattr(torch, plan.dtype)
    in_cpp = kernels.launcher is not None and dtype in kernels.launcher.dtypes and plan.device == "cpu"
    asked, method = plan.quantization, quantization_method(plan.quantization)
    if not isinstance(tensors, QuantizedTensors) or asked not in (None, "w4a16", "w4a8"):
        return method
    if not in_cpp and kernels.backends["matmul"] != "with_triton":
        return method
    few = {name: form for name, form in tensors.forms.items() if asked is None or form.bits == 4}
    if not few:
        return method
    return KeptGroups(few, dtype, rest=method, rounded_rows=asked == "w4a8", in_cpp=in_cpp)


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


def open_tensors(facts: ModelFacts, plan: ModelPlan) -> Tensors:
    """The checkpoint's tensors as the model knows them, dequantised as they are read where they are quantised."""
    if plan.custom_loaders:
        return GivenTensors(plan.custom_loaders, facts.path, partial(_tensor_name, facts))
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


def open_share(facts: ModelFacts, plan: ModelPlan, rank_info: RankInfo) -> TensorFiles:
    """The tensors of this rank. Raises CheckpointError where there are none, or they are those of other ranks."""
    directory, pattern = Path(facts.path), plan.shard_pattern or SHARE_FILES
    wanted = re.escape(pattern).replace(r"\{rank\}", r"(\d+)").replace(r"\{part\}", r"\d+")
    found: dict[int, list[Path]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        if name := re.fullmatch(wanted, file.name):
            found.setdefault(int(name[1]), []).append(file)
    if not found:
        raise CheckpointError(f"{directory} holds no files {pattern}: write them with `penstock shard`.")
    if sorted(found) != list(range(rank_info.world_size)):
        raise CheckpointError(
            f"{directory} holds the shares of {len(found)} ranks (up to {max(found)}), and there are "
            f"{rank_info.world_size} (--tp-size {rank_info.tp_size}, --pp-size {rank_info.pp_size})."
        )
    return TensorFiles(WeightFiles("safetensors", tuple(found[rank_info.rank])), mmap=plan.mmap)


def update_weights(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Give the layers that `tensors` names new weights: whole checkpoint tensors by name, of any dtype.

    To be called between steps. Weights keep the memory that they have where their layout allows it, so that recorded
    and captured steps see the new ones. Raises CheckpointError, and changes nothing, for a tensor that no layer of this
    rank has, one of another shape, and a layer of which only some tensors are there.
    """
    tied = model.head is not None and model.head.weight is None
    tensors = {name: tensors[name] for name in tensors.keys() - _ignored(tensors, tied=tied)}
    layers = [(module, own_shards(module)) for module in model.modules() if isinstance(module, Weighted)]
    layers = [(module, own) for module, own in layers if not tensors.keys().isdisjoint(own)]
    wanted = {name: shards for _, own in layers for name, shards in own.items()}
    check_total(wanted, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    dtype = model.dtype
    with torch.inference_mode():
        for module, _ in layers:
            _renew(module, tensors, dtype)


def _renew(module: Weighted, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Fill a layer that has its weights already, and prepare them again if they were prepared."""
    before = dict(module.named_parameters(recurse=False))
    with torch.device("meta"):
        module.allocate()
    if before:
        allocate(module, dtype, next(iter(before.values())).device)
    for name, shards in own_shards(module).items():
        for shard in shards:
            if name in tensors:
                shard.take(tensors[name][shard.cut])
            elif shard.default is not None:
                shard.target.fill_(shard.default)
    module.prepare()
    for name, now in list(module.named_parameters(recurse=False)):
        if name in before and now is not before[name] and _same_layout(before[name], now):
            before[name].untyped_storage().copy_(now.untyped_storage())
            setattr(module, name, before[name])


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes of one tensor can take the place of the other's."""
    if type(one) is not type(other) or one.is_mkldnn or other.is_mkldnn:
        return False
    layouts = ((x.dtype, x.shape, x.stride(), x.untyped_storage().nbytes()) for x in (one, other))
    return next(layouts) == next(layouts)


def _has_own_head(model: Decoder, tensors: TensorFiles) -> bool:
    """Whether the head of a model that calls it tied is in the checkpoint and, by some rows, is not the embedding."""
    head, embedding = model.head, model.embedding
    if head is None or embedding is None or not head.tied:
        return False
    names = [f"{layer.name}.weight" for layer in (head, embedding)]
    shapes = [tensors.shapes.get(name) for name in names]
    if shapes[0] is None or shapes[0] != shapes[1]:
        return False
    first = shapes[0][0] // 2
    cut = (
        slice(first, min(first + COMPARED_ROWS, shapes[0][0])),
        *(slice(0, size) for size in shapes[0][1:]),
    )
    return not torch.equal(*(tensors.read(name, cut).float() for name in names))


def _ignored(names: Mapping[str, object], *, tied: bool) -> set[str]:
    return {name for name in names if IGNORED.fullmatch(name) or (tied and IGNORED_IF_TIED.fullmatch(name))}
