"""Build a model and fill its parameters from a checkpoint, checking that every tensor is used."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ops.backends import BLOCK_PRODUCTS, FP4_PRODUCTS, ROUNDING
from ops.machine import GIB, Machine
from ops.matmul.grouped import GroupForm
from ops.progress import Bar, progress_bar
from ops.select import Kernels
from runtime.config.fields import Fields
from runtime.config.gguf_header import is_gguf
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.config.pooling import Pooling
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.gathered import split_layers
from runtime.layers.moe import MoE
from runtime.layers.pooler import Pooler
from runtime.layers.quantization import QuantizationMethod, quantization_method
from runtime.layers.quantization.grouped import KeptGroups
from runtime.layers.score import ScoreLayer
from runtime.layers.sharding import TensorParallelGroup
from runtime.layers.weight import Shard, Weighted
from runtime.loading.checkpoint import WeightFiles, find_weights
from runtime.loading.custom_loader import CustomTensors
from runtime.loading.formats.gguf import GgufFiles
from runtime.loading.formats.stored import QuantizedTensors
from runtime.loading.kv_scales import set_kv_scales
from runtime.loading.offload import LayersInHost, layers_in_host, prepared_bytes
from runtime.loading.parameters import (
    Named,
    check_dtypes,
    check_total,
    collect_shards,
    fill_layers,
    own_parameters,
    split,
)
from runtime.loading.quantization import quantization_fields
from runtime.loading.tensors import TensorFiles, Tensors, give_back_freed
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo, Stage
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder
from runtime.modeling.host_layers import HostLayer, shared_modules
from runtime.models.registry import config_of, entry, family_of

# Files of products on GPUs that read packed weights.
KEEPING = frozenset(backend.file for backend in (*BLOCK_PRODUCTS.values(), *FP4_PRODUCTS.values()))
MAX_NEXTN_LAYERS = 16  # maximum number of multi-token prediction layers after the model's own layers
SHARD_FILES = "model-rank-{rank}-part-{part}.safetensors"  # files of the load format sharded_state

logger = logging.getLogger("penstock.core")
COMPARED_ROWS = 256  # number of rows in which LM head and embedding are compared
# Tensors in some checkpoints that are not needed: rotary frequencies are computed, and a tied LM head is the embedding.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
IGNORED_IF_TIED = re.compile(r"lm_head\.weight")


def load_model(
    facts: ModelFacts,
    plan: ModelPlan,
    kernels: Kernels,
    group: TensorParallelGroup | Mesh | None = None,
    stage: Stage | None = None,
    rank_info: RankInfo | None = None,
    experts: ExpertSharing | None = None,
) -> Decoder:
    """Return the model on plan.device in plan.dtype, ready to compute, without gradients.

    The model has only the layers of the pipeline `stage` and, of each layer, only this rank's shard in the `group`. A
    `Mesh` as `group` may split layers over different ranks (see `split_layers`). If each rank has its own files,
    `rank_info` selects this rank's files. `experts` says which experts this rank holds.

    Loading needs memory for these weights and for the checkpoint tensors of one layer. A tied LM head needs a second
    copy of the embedding if the lookup cannot read the head's layout. Layers that the plan keeps in host memory are
    listed in `Decoder.in_host`; they need a `LayerRing` to compute. Raises CheckpointError before it allocates
    memory if a tensor is missing, unexpected or has a wrong shape; the error names these tensors.
    """
    if plan.by_transformers:
        # Imported here, because it imports transformers' models.
        from runtime.loading.by_transformers import load_by_transformers

        model = load_by_transformers(facts, plan, kernels)
        model.pooler = make_pooler(model, facts, plan)
        return model
    outline = outline_model(facts, plan, kernels, group, stage, rank_info, experts)
    model, device, dtype = outline.model, torch.device(plan.device), getattr(torch, plan.dtype)
    in_host = layers_in_host(model, plan, dtype)
    filled = _check_memory(model, dtype, device, in_host)
    shown = filled if rank_info is None or rank_info.rank == 0 else None
    with progress_bar(shown, "Loading weights", unit="B", scaled=True) as bar:
        shared = shared_modules(model.layers) if in_host.layers else frozenset()
        for modules in prepared_layers(outline, plan, bar):
            layer = modules[0][1] if modules else None
            if layer is not None and layer in in_host.layers:
                model.in_host = (*model.in_host, HostLayer(layer, shared))
    if plan.kv_scales is not None:
        coordinates = rank_info or RankInfo()
        set_kv_scales(model, plan.kv_scales, facts, coordinates.tp_rank, coordinates.tp_size)
    model.pooler = make_pooler(model, facts, plan)
    return model.eval()


class Outline(NamedTuple):
    """A model on the meta device, and the tensors that fill it."""

    model: Decoder
    tensors: Tensors | None  # None if the weights are dummies
    # Argument `shards_of` of `fill_layers`; None: each module's own shards.
    shards_of: Callable[[Named], dict[str, list[Shard]]] | None


def outline_model(
    facts: ModelFacts,
    plan: ModelPlan,
    kernels: Kernels,
    group: TensorParallelGroup | Mesh | None = None,
    stage: Stage | None = None,
    rank_info: RankInfo | None = None,
    experts: ExpertSharing | None = None,
) -> Outline:
    """Build this rank's shard of the model, and open the checkpoint. Raises CheckpointError like `load_model`."""
    sharded = plan.load_format == "sharded_state"
    from_files = plan.load_format not in ("sharded_state", "dummy", "remote_instance")
    tensors = open_tensors(facts, plan) if from_files else None
    model = build_model(facts, plan, kernels, tensors, group, stage, experts)
    if sharded:
        tensors = open_sharded(facts, plan, rank_info or RankInfo())
        check_total(own_parameters(list(model.named_modules())), tensors.shapes, tensors.where)
    return Outline(model, tensors, own_parameters if sharded else None)


def prepared_layers(outline: Outline, plan: ModelPlan, bar: Bar | None = None) -> Iterator[Named]:
    """Fill each layer in turn, convert its weights to the kernels' layout, and yield its modules with their names."""
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    model, tensors, shards_of = outline
    threads = plan.num_load_threads
    for modules in fill_layers(model, tensors, dtype, device, num_threads=threads, shards_of=shards_of, bar=bar):
        for _, module in modules:
            if isinstance(module, Weighted):
                module.prepare()
        yield modules
        give_back_freed()


def build_model(
    facts: ModelFacts,
    plan: ModelPlan,
    kernels: Kernels,
    tensors: Tensors | None,
    group: TensorParallelGroup | Mesh | None = None,
    stage: Stage | None = None,
    experts: ExpertSharing | None = None,
) -> Decoder:
    """Return the model, or this rank's shard of it, on the meta device.

    Raises CheckpointError unless `tensors` are exactly the tensors that the model needs. If `tensors` is None, nothing
    is checked.
    """
    device, config = torch.device(plan.device), config_of(facts.config)
    build = Build(
        kernels,
        plan.context_length,
        device,
        _method(plan, kernels, tensors),
        state_dtype=plan.state_dtype,
        always_absorbed=plan.always_absorbed or plan.deterministic,
        experts=experts,
    )
    family = family_of(config.entry)
    with torch.device("meta"):
        model = family(config, build)
    if isinstance(tensors, TensorFiles) and _has_own_head(model, tensors):
        logger.warning(
            "config.json says tie_word_embeddings, but the checkpoint's lm_head.weight differs from the embedding. "
            "It is used as LM head, as in transformers."
        )
        config.values = {**config.values, "tie_word_embeddings": False}
        with torch.device("meta"):
            model = family(config, build)
    with torch.device("meta"):
        if is_headless(facts):
            model.without_head(_score_layers(config))
        for module in model.modules():
            if isinstance(module, MoE) and tensors is not None:
                module.follow(tensors.shapes)
    if tensors is not None:
        if isinstance(tensors, QuantizedTensors):
            tensors.check_unquantized(collect_shards(model))
            tensors.keep_grouped(_kept(build))
        ignored = _ignored(tensors.shapes, tied=config.flag("tie_word_embeddings"))
        shapes = {name: shape for name, shape in tensors.shapes.items() if name not in ignored}
        where = tensors.where if isinstance(tensors, TensorFiles) else lambda names: ""
        check_total(collect_shards(model), shapes, where)
        if isinstance(tensors, TensorFiles) and not plan.any_dtype:
            check_dtypes({name: dtype for name, dtype in tensors.dtypes.items() if name in shapes}, where)
    if stage is not None:
        model.keep(stage)
    size = group.rank_info.stage_size if isinstance(group, Mesh) else 1 if group is None else group.size
    if group is not None and size > 1:
        with torch.device("meta"):
            if isinstance(group, Mesh):
                split_layers(model, group)
            else:
                split(model, group)
        # Repeated after sharding: a weight is dequantised if sharding divides one of its quantisation groups.
        if isinstance(tensors, QuantizedTensors):
            tensors.keep_grouped(_kept(build))
    return model


def _kept(build: Build) -> Mapping[str, GroupForm]:
    """Return weight name -> form, for the weights that stay quantised in the model's layers."""
    return build.quantization.kept if isinstance(build.quantization, KeptGroups) else {}


def make_pooler(model: Decoder, facts: ModelFacts, plan: ModelPlan) -> Pooler:
    """Return the pooler, with dense weights from the folders of sentence-transformers modules."""
    pooling, weights = facts.pooling or Pooling(), []
    size = facts.hidden_size * len(pooling.modes)
    for dense in pooling.dense:
        shapes = {"linear.weight": (dense.size, size)} | ({"linear.bias": (dense.size,)} if dense.bias else {})
        if plan.load_format == "dummy":
            tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        else:
            files = TensorFiles(find_weights(Path(facts.path) / dense.folder), mmap=False)
            if files.shapes != shapes:
                raise CheckpointError(f"{dense.folder} must contain {shapes}, not {files.shapes}.")
            tensors = {name: files.read(name) for name in shapes}
        wide = {name: tensor.float().to(plan.device) for name, tensor in tensors.items()}
        weights.append((wide["linear.weight"], wide.get("linear.bias")))
        size = dense.size
    return Pooler(pooling, weights, model.scorer)


def _check_memory(model: nn.Module, dtype: torch.dtype, device: torch.device, in_host: LayersInHost) -> int:
    """Return the bytes of the parameters to load. Raises CheckpointError if the weights exceed the free memory."""
    filled = sum(each.numel() * getattr(each, "own_dtype", dtype).itemsize for each in model.parameters())
    needed = prepared_bytes(model, dtype) - in_host.num_bytes + in_host.slot_bytes
    if device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
    else:
        available = Machine.probe().available_bytes
    if available and needed > available:
        raise CheckpointError(
            f"The weights need {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, but only "
            f"{available / GIB:.1f} GiB of memory are free. Use a smaller model, or more devices (--tp-size)"
            + (", or keep layers in host memory (--cpu-offload-gb)." if device.type == "cuda" else ".")
        )
    return filled


def _method(plan: ModelPlan, kernels: Kernels, tensors: Tensors | None) -> QuantizationMethod:
    """Return the quantisation method. A checkpoint's low-bit weights stay quantised if kernels and options allow it."""
    dtype = getattr(torch, plan.dtype)
    in_cpp = kernels.launcher is not None and dtype in kernels.launcher.dtypes and plan.device == "cpu"
    requested, method = plan.quantization, quantization_method(plan.quantization)
    if not isinstance(tensors, QuantizedTensors) or requested not in (None, "w4a16", "w4a8"):
        return method
    if not in_cpp and kernels.backends["matmul"] not in KEEPING:
        return method
    # Whether kernels read the scales of inputs.
    rounds = any(kernels.backends[operation] in files for operation, files in ROUNDING.items())
    low_bit = {
        name: form if rounds else form._replace(input_scaled=False)
        for name, form in tensors.forms.items()
        if (requested is None and not (in_cpp and form.floating)) or form.bits == 4
    }
    if not low_bit:
        return method
    return KeptGroups(low_bit, dtype, rest=method, rounded_rows=requested == "w4a8", in_cpp=in_cpp)


def tensor_name(facts: ModelFacts, stored: str) -> str | None:
    """Return the model's name for a tensor that the checkpoint calls `stored`, or None if the model does not use it."""
    fields = Fields(facts.config, "config.json: ")
    num_nextn = fields.optional_integer("num_nextn_predict_layers", low=0) or 0
    nextn = (f"model.layers.{facts.num_layers + number}." for number in range(min(num_nextn, MAX_NEXTN_LAYERS)))
    if stored.startswith(tuple(nextn)):
        return None
    own = fields.optional_integer("nextn_layer", low=0)
    if own is not None:  # a draft head in the model's checkpoint: the head uses only this layer
        prefix = f"model.layers.{own}."
        if not stored.startswith(prefix):
            return None
        stored = "model.layers.0." + stored.removeprefix(prefix)
    name = entry(facts.architecture).tensor_name(stored)
    if name is None or not is_headless(facts) or name.startswith("score."):
        return name
    # The LM head is not needed. If the checkpoint was saved without a head, its names lack the prefix "model.".
    return None if name.startswith("lm_head.") else name if name.startswith("model.") else f"model.{name}"


def is_headless(facts: ModelFacts) -> bool:
    """Whether this is a native decoder that needs no LM head, because it returns vectors or scores."""
    return facts.pooling is not None and not facts.is_encoder


def _score_layers(config: Config) -> tuple[ScoreLayer, ...]:
    """Return the score layers of a classifier: one layer, or two for a reward model."""
    if not config.labels:
        return ()
    if config.architecture.endswith("ForRewardModel"):
        first = ScoreLayer("score.0", config.hidden_size, activation="relu")
        return first, ScoreLayer("score.2", 1)
    return (ScoreLayer("score", len(config.labels), bias=False),)


def open_tensors(facts: ModelFacts, plan: ModelPlan) -> Tensors:
    """Return the checkpoint's tensors under the model's names. Quantised tensors are dequantised while reading."""
    if plan.custom_loaders:
        return CustomTensors(plan.custom_loaders, facts.path, partial(tensor_name, facts))
    if is_gguf(facts.path):
        return QuantizedTensors(GgufFiles(Path(facts.path)), quantization_fields(facts.config))
    files = TensorFiles(
        find_weights(Path(facts.path), plan.load_format),
        mmap=plan.mmap,
        rename=partial(tensor_name, facts),
    )
    if facts.quantization is None:
        return files
    return QuantizedTensors(files, quantization_fields(facts.config))


def open_sharded(facts: ModelFacts, plan: ModelPlan, rank_info: RankInfo) -> TensorFiles:
    """Return this rank's tensors from its own files (--load-format sharded_state).

    Raises CheckpointError if there are no such files, or if they were written for another number of ranks.
    """
    directory, pattern = Path(facts.path), plan.shard_pattern or SHARD_FILES
    regex = re.escape(pattern).replace(r"\{rank\}", r"(\d+)").replace(r"\{part\}", r"\d+")
    files: dict[int, list[Path]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        if name := re.fullmatch(regex, file.name):
            files.setdefault(int(name[1]), []).append(file)
    if not files:
        raise CheckpointError(f"{directory} contains no files {pattern}. Write them with `penstock shard`.")
    if sorted(files) != list(range(rank_info.world_size)):
        raise CheckpointError(
            f"{directory} contains the shards of {len(files)} ranks (up to {max(files)}), but there are "
            f"{rank_info.world_size} ranks (--tp-size {rank_info.tp_size}, --pp-size {rank_info.pp_size})."
        )
    return TensorFiles(WeightFiles("safetensors", tuple(files[rank_info.rank])), mmap=plan.mmap)


def _has_own_head(model: Decoder, tensors: TensorFiles) -> bool:
    """Whether a model with a tied LM head has a stored head that differs from the embedding in the compared rows."""
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
