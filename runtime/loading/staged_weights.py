"""Weight updates from a trainer: new layers are prepared next to the loaded ones, then replace them all at once."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.large_pages import CACHE_LINE, LargePages, ReusedPages
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.errors import CheckpointError, MissingTensor
from runtime.layers.attention import KVScales
from runtime.layers.embedding import Embedding, KeptRows, VocabularyWeight
from runtime.layers.linear import Linear
from runtime.layers.lm_head import LMHead
from runtime.layers.moe import KeptExperts
from runtime.layers.quantization.grouped import KeptGroups
from runtime.layers.quantization.method import Unquantized
from runtime.layers.weight import Shard, Weighted, frozen
from runtime.loading.formats import mxfp4
from runtime.loading.formats.stored import QuantizedTensors
from runtime.loading.loader import IGNORED, IGNORED_IF_TIED, tensor_name
from runtime.loading.memory_tensors import MemoryTensors
from runtime.loading.parameters import FLOATING, allocate, fill_named, named_list, own_shards
from runtime.loading.quantization import quantization_fields
from runtime.loading.tensors import Tensors
from runtime.modeling.decoder import Decoder

NOTHING = torch.empty(0, dtype=torch.uint8)
MAX_READ = 2**20  # maximum number of values that `read` returns
IDENTITY_ROWS = 256  # number of rows of the identity matrix that `_recover` multiplies at a time
SCALES = re.compile(r".*\.[kv]_scale")


class Staged(NamedTuple):
    """The result of `StagedWeights.stage`."""

    unknown: list[str]  # tensors that no layer of this rank uses; another pipeline stage may use them
    # Tensors that incomplete layers lack. "NAME.*" means that some tensors of the quantised layer NAME are missing.
    waiting: list[str]


class StagedWeights:
    """Layers with new weights, which `commit` copies to the loaded model.

    Tensors have the names and whole shapes of a checkpoint; this rank takes its shard. A layer is prepared, that is,
    its weights are converted to the kernels' layout, when all its tensors have arrived. With `merge`, an unquantised
    linear layer, embedding or norm takes missing tensors from the current weights. Call all methods between two steps,
    on the thread that enqueues the steps.
    """

    def __init__(self, model: Decoder, facts: ModelFacts, plan: ModelPlan, *, fixed: bool, scaled_cache: bool) -> None:
        """`fixed` says whether graphs hold the weights' addresses, `scaled_cache` whether the KV cache has 8 bits."""
        self._model, self._facts, self._plan = model, facts, plan
        self._fixed, self._scaled_cache = fixed, scaled_cache
        self._units = _units(model)
        self._names = frozenset(name for unit in self._units.values() for name in unit)
        self._pending: dict[str, Tensor] = {}  # tensors that have arrived and are not yet in a prepared layer
        self._is_complete = True  # whether every layer with pending tensors has been prepared
        self._scratch = NOTHING  # reused memory for the tensors of a fused layer, because new memory costs page faults
        self._memory = ReusedPages()  # memory of prepared weights, which later updates may use again
        self._prepared: dict[Weighted, Weighted] = {}  # layer of the model -> the same layer with new weights

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole (unsharded) shapes of the tensors of which this rank holds a part, by the model's names."""
        return {name: shards[0].shape for unit in self._units.values() for name, shards in unit.items()}

    @property
    def is_pending(self) -> bool:
        """Whether there are tensors or prepared layers that `commit` has not applied."""
        return bool(self._pending or self._prepared)

    @property
    def num_bytes(self) -> int:
        """Upper bound on the bytes of all tensors of this rank, in float32."""
        total = 0
        for shape in self.shapes.values():
            total += 4 * torch.Size(shape).numel()
        return total

    @property
    def keeps_tensors(self) -> bool:
        """Whether all tensors are kept until `commit`: a quantised checkpoint stores each weight in several tensors."""
        return self._facts.quantization is not None

    def stage(
        self,
        tensors: Mapping[str, Tensor],
        *,
        merge: bool,
        final: bool,
        lent: bool = False,
        later: Collection[str] = (),
    ) -> Staged:
        """Prepare the layers whose tensors are complete. Raises CheckpointError; call `drop` after an error.

        `final` says that no further tensors follow. A quantised checkpoint stores each weight in several tensors; its
        layers are prepared only in the final call or, with `merge`, as soon as all these tensors have arrived. If the
        tensors are `lent`, the caller overwrites their memory later, so tensors of incomplete layers are copied. Layers
        that use a tensor named in `later` are not prepared in this call.
        """
        coming = {name for name in (tensor_name(self._facts, each) for each in later) if name is not None}
        staged = self._stage(tensors, coming, merge=merge, final=final)
        if not coming:
            self._scratch = NOTHING
        if lent:
            kept = self._pending.keys() & {tensor_name(self._facts, name) for name in tensors}
            self._pending |= {name: self._pending[name].clone() for name in kept}
        return staged

    def _stage(self, tensors: Mapping[str, Tensor], coming: Set[str], *, merge: bool, final: bool) -> Staged:
        in_mxfp4 = self._facts.quantization == "mxfp4"  # trainers have gpt-oss's experts in 16 bits
        for stored, tensor in tensors.items():
            name = tensor_name(self._facts, stored)
            if name is None or IGNORED.fullmatch(name) or self._is_tied_head(name) or self._skips_scale(name):
                continue
            self._pending |= mxfp4.rounded(name, tensor.detach()) if in_mxfp4 else {name: tensor.detach()}
        quantized, self._is_complete = self._facts.quantization is not None, False
        if quantized and not (merge or final):
            return Staged([], [])
        try:
            source = self._source()
        except CheckpointError as error:
            if not quantized or final:
                raise
            # The missing tensor may still arrive.
            return Staged([], [error.name] if isinstance(error, MissingTensor) else _modules(self._pending))
        unknown = [name for name in source.shapes if name not in self._names]
        if quantized and unknown and not final:
            return Staged([], _modules(unknown))
        waiting: list[str] = []
        for layer, shards in self._units.items():
            present = {name: shards[name] for name in shards if name in source.shapes}
            if not present or not coming.isdisjoint(shards):
                continue
            _check(present, source)
            missing = [name for name, each in shards.items() if name not in present and each[0].default is None]
            if missing and not (merge and _can_recover(layer)):
                waiting += missing
                continue
            with self._memory_of(layer):
                fresh = self._prepare(layer, source, present, recover=bool(missing))
            if self._fixed:
                _check_layout(layer, fresh)
            self._prepared[layer] = fresh
            self._forget(present, source)
        for name in unknown:
            self._pending.pop(name, None)
        self._is_complete = not waiting
        return Staged(unknown, waiting)

    def missing(self) -> list[str]:
        """Return the names of the tensors that this rank needs for the layers that are not prepared.

        Tensors with a default are omitted.
        """
        prepared = {name for layer in self._prepared for name in self._units[layer]}
        return [
            name
            for unit in self._units.values()
            for name, shards in unit.items()
            if name not in prepared and shards[0].default is None
        ]

    def commit(self, *, keep_memory: bool = False) -> set[str]:
        """Replace the current weights by those of the prepared layers, and return the names of the tensors.

        With `keep_memory`, the memory of the prepared layers is kept for the next update.
        """
        names = {name for layer in self._prepared for name in self._units[layer]}
        with torch.inference_mode():
            replaced = [replace_parameters(layer, fresh) for layer, fresh in self._prepared.items()]
        self._prepared.clear()
        if keep_memory and all(replaced):
            self._memory.reset()
        else:
            self._memory = ReusedPages()
        if self._is_complete:  # the tensors of a quantised checkpoint are kept until here
            self._pending.clear()
        return names

    def drop(self) -> None:
        """Discard all tensors and prepared layers. The current weights do not change."""
        self._pending.clear()
        self._prepared.clear()
        self._scratch = NOTHING
        self.free_memory()

    def free_memory(self) -> None:
        """Free the memory that `commit` has kept, unless layers are prepared in it."""
        if not self._prepared:
            self._memory = ReusedPages()

    def read(self, name: str, num_rows: int) -> dict[str, Any] | None:
        """Return this rank's part of the first rows of a tensor, or None if the rank has no part of it.

        The answer has the tensor's whole "shape", the "first" index of the part in each dimension, and its "values" as
        nested lists. Raises CheckpointError if the values are stored in a form that cannot be converted back.
        """
        known = tensor_name(self._facts, name)
        if known is None or known not in self._names:
            return None
        rows = self.shapes[known]
        if min(num_rows, rows[0]) * torch.Size(rows[1:]).numel() > MAX_READ:
            raise CheckpointError(f"{name}: at most {MAX_READ} numbers can be read at once. Set a lower truncate_size.")
        shards = self._current(known)
        whole, parts = torch.full(shards[0].shape, torch.nan), torch.zeros(shards[0].shape, dtype=torch.bool)
        for shard in shards:
            shard.give(whole)
            shard.give(parts, torch.ones_like(shard.target, dtype=torch.bool))
        kept = parts.nonzero()
        low, high = kept.amin(0).tolist(), (kept.amax(0) + 1).tolist()
        low, high = low or [0], high or [1]
        part = whole[tuple(slice(first, end) for first, end in zip(low, high, strict=True))]
        part = part[: max(0, num_rows - low[0])]
        return {"shape": list(whole.shape), "first": low, "values": part.tolist()}

    @property
    def vocabulary_names(self) -> list[str]:
        """Names, in the model, of the tensors of the embedding and of the LM head."""
        layers = (self._model.embedding, self._model.head)
        return sorted({name for layer in layers if layer is not None for name in self._units.get(layer, ())})

    @property
    def embedding_names(self) -> frozenset[str]:
        """Names, in the model, of the tensors of the embedding."""
        embedding = self._model.embedding
        return frozenset() if embedding is None else frozenset(self._units.get(embedding, ()))

    @property
    def reads_vocabulary(self) -> bool:
        """Whether `own_part` can return the tensors in `vocabulary_names`."""
        return all(layer is None or _can_recover(layer) for layer in (self._model.embedding, self._model.head))

    def own_part(self, name: str) -> Tensor:
        """Return a tensor in its whole shape, with this rank's values, and zeros in place of other ranks' values.

        Raises CheckpointError if the values are stored in a form that cannot be converted back.
        """
        shards = self._current(name)
        whole = torch.zeros(shards[0].shape, dtype=shards[0].target.dtype, device=shards[0].target.device)
        for shard in shards:
            shard.give(whole)
        return whole

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors, by their names in the model, into the layers that contain them."""
        for layer, shards in self._units.items():
            present = {name: each for name, each in shards.items() if name in tensors}
            if present:
                fresh = self._prepare(layer, MemoryTensors({**tensors}), present, recover=False)
                if self._fixed:
                    _check_layout(layer, fresh)
                with torch.inference_mode():
                    replace_parameters(layer, fresh)
        self._scratch = NOTHING

    def _current(self, name: str) -> list[Shard]:
        """Return this rank's shards of a tensor, with their current values."""
        layer = next(layer for layer, shards in self._units.items() if name in shards)
        if not _can_recover(layer):
            raise CheckpointError(
                f"{name} cannot be read: {type(layer).__name__} layers of this model keep only a converted form of it "
                "(experts, quantised weights)."
            )
        with torch.inference_mode():
            shell = shell_of(layer, getattr(torch, self._plan.dtype), torch.device(self._plan.device))
            _recover(layer, shell)
        return own_shards(shell)[name]

    def _source(self) -> Tensors:
        """Return the pending tensors under the model's names.

        Raises CheckpointError if a tensor has a wrong dtype, or if parts of a quantised tensor are missing.
        """
        stored = MemoryTensors(self._pending)
        if self._facts.quantization is None:
            wrong = [f"{name} is {dtype}" for name, dtype in stored.dtypes.items() if dtype not in FLOATING]
            if wrong:
                raise CheckpointError(f"The tensors are not the model's: {named_list('of an integer dtype', wrong)}.")
            return stored
        tensors = QuantizedTensors(stored, quantization_fields(self._facts.config))
        tensors.check_unquantized([name for unit in self._units.values() for name in unit])
        tensors.keep_grouped(_kept(self._model))
        return tensors

    def _prepare(
        self, layer: Weighted, source: Tensors, present: Mapping[str, Sequence[Shard]], *, recover: bool
    ) -> Weighted:
        device, dtype = torch.device(self._plan.device), getattr(torch, self._plan.dtype)
        if not recover and (fresh := self._converted(layer, source, present, dtype, device)) is not None:
            return fresh
        reused = device.type == "cpu" and isinstance(layer, Linear) and type(layer.method) is Unquantized
        fresh = self._scratch_shell(layer, dtype) if reused else shell_of(layer, dtype, device)
        shards = _shards(fresh)
        with torch.inference_mode():
            if recover:
                _recover(layer, fresh)
                shards = {name: shards[name] for name in present}
            fill_named(shards, source, self._plan.num_load_threads)
            fresh.prepare()
            for kept in _kept_parts(fresh):
                kept.prepare()
            if reused:
                self._leave_scratch(fresh)
        return fresh

    def _memory_of(self, layer: Weighted) -> AbstractContextManager[None]:
        """Return a context in which the layer's weight is packed into reused memory; new memory costs page faults."""
        if not isinstance(layer, Linear | VocabularyWeight) or type(layer.method) is not Unquantized:
            return nullcontext()
        launcher = layer.kernels.launcher
        return nullcontext() if launcher is None else launcher.weights_in(self._memory)

    def _scratch_shell(self, layer: Weighted, dtype: torch.dtype) -> Weighted:
        """Like `shell_of`, with parameters in the scratch memory, which the next layer overwrites."""
        shell, first, places = _outline(layer), 0, {}
        for name, parameter in shell.named_parameters(recurse=False):
            if parameter.is_meta:
                own = getattr(parameter, "own_dtype", dtype)
                places[name] = first, own, parameter.shape
                first += -(-parameter.numel() * own.itemsize // CACHE_LINE) * CACHE_LINE
        if len(self._scratch) < first:
            self._scratch = NOTHING
            self._scratch = LargePages().take(first)
        for name, (start, own, shape) in places.items():
            memory = self._scratch[start : start + shape.numel() * own.itemsize].view(own).view(shape)
            setattr(shell, name, nn.Parameter(memory, requires_grad=False))
        return shell

    def _leave_scratch(self, layer: Weighted) -> None:
        """Move the layer's parameters that are still in the scratch memory to memory of their own."""
        start = self._scratch.untyped_storage().data_ptr()
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter.untyped_storage().data_ptr() == start:
                setattr(layer, name, nn.Parameter(parameter.clone(), requires_grad=False))

    def _converted(
        self,
        layer: Weighted,
        source: Tensors,
        present: Mapping[str, Sequence[Shard]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Weighted | None:
        """Prepare a layer directly from its only tensor, without an intermediate copy.

        Returns None if this is not possible: if the layer has several tensors, if this rank needs only a part of the
        tensor, or if the tensor has another dtype or device. Also returns None if the prepared layer would share memory
        with the tensor, because this memory belongs to the trainer.
        """
        if not isinstance(layer, Linear | VocabularyWeight) or type(layer.method) is not Unquantized:
            return None
        if len(self._units[layer]) != 1 or not isinstance(source, MemoryTensors):
            return None
        [(name, shards)] = present.items()
        outline = _outline(layer)
        if len(shards) != 1 or [key for key, _ in outline.named_parameters(recurse=False)] != ["weight"]:
            return None
        [shard], tensor = shards, source.read(name)
        if shard.cut or shard.transposed or shard.step > 1 or tensor.shape != outline.get_parameter("weight").shape:
            return None
        if tensor.dtype != dtype or tensor.device.type != device.type or not tensor.is_contiguous():
            return None
        with torch.inference_mode():
            outline.weight = frozen(tensor)
            outline.prepare()
        parameters = outline.parameters(recurse=False)
        kept = any(each.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for each in parameters)
        return None if kept else outline

    def _forget(self, names: Mapping[str, object], source: Tensors) -> None:
        """Drop the pending tensors of a prepared layer. Quantised tensors stay until `commit` or `drop`."""
        if isinstance(source, MemoryTensors):
            for name in names:
                del self._pending[name]

    def _is_tied_head(self, name: str) -> bool:
        head = self._model.head
        return head is not None and head.tied and IGNORED_IF_TIED.fullmatch(name) is not None

    def _skips_scale(self, name: str) -> bool:
        """Whether this is a scale of the KV cache, which a full-precision cache ignores.

        Raises CheckpointError for such a scale if the cache has 8 bits.
        """
        if not SCALES.fullmatch(name):
            return False
        if self._scaled_cache:
            raise CheckpointError(
                f"{name}: the scales of an 8-bit KV cache cannot change while the server runs. Leave them out."
            )
        return True


def _units(model: Decoder) -> dict[Weighted, dict[str, list[Shard]]]:
    """Return each layer that is prepared separately -> tensor name -> the shards that the tensor fills."""
    units = {}
    for layer in model.modules():
        if isinstance(layer, Weighted) and not isinstance(layer, KeptRows | KeptExperts | KVScales):
            shards = _shards(_outline(layer))
            if shards:
                units[layer] = shards
    return units


def _modules(names: Iterable[str]) -> list[str]:
    """Return "NAME.*" for each layer NAME that has one of these tensors."""
    return sorted({f"{name.rpartition('.')[0]}.*" for name in names})


def _outline(layer: Weighted) -> Weighted:
    """Return a copy of the layer with new parameters on the meta device. The copy shares inner layers except `kept`."""
    outline = copy.copy(layer)
    for name in ("_parameters", "_buffers", "_modules"):
        object.__setattr__(outline, name, dict(getattr(layer, name)))
    with torch.device("meta"):
        outline.allocate()
    return outline


def shell_of(layer: Weighted, dtype: torch.dtype, device: torch.device) -> Weighted:
    """Return a copy of the layer with newly allocated parameters, which are not filled."""
    shell = _outline(layer)
    for part in (shell, *_kept_parts(shell)):
        allocate(part, dtype, device)
    return shell


def _kept_parts(layer: Weighted) -> list[Weighted]:
    """Return the inner layers that hold this layer's weights in the checkpoint's quantisation groups."""
    kept = getattr(layer, "kept", ())
    return [each for each in kept if isinstance(each, Weighted)]


def _shards(layer: Weighted) -> dict[str, list[Shard]]:
    shards = own_shards(layer)
    for kept in _kept_parts(layer):
        for name, each in own_shards(kept).items():
            shards.setdefault(name, []).extend(each)
    return shards


def _kept(model: nn.Module) -> Mapping[str, Any]:
    """Return weight name -> form, for the weights that stay quantised in the model."""
    for module in model.modules():
        method = getattr(module, "method", None)
        if isinstance(method, KeptGroups):
            return method.kept
    return {}


def _check(present: Mapping[str, Sequence[Shard]], source: Tensors) -> None:
    wrong = [
        f"{name} is {_text(source.shapes[name])}, must be {_text(shards[0].shape)}"
        for name, shards in present.items()
        if (source.shapes[name] or (1,)) != shards[0].shape
    ]
    if wrong:
        raise CheckpointError(f"The tensors do not fit the model: {named_list('of the wrong shape', wrong)}.")


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _check_layout(layer: Weighted, fresh: Weighted) -> None:
    for key, now in fresh.named_parameters(recurse=False):
        before = getattr(layer, key)
        if before is None or not same_layout(before, now):
            raise CheckpointError(
                f"{type(layer).__name__}.{key} has a new layout, but graphs hold the address of the old one. Start the "
                "server with the new checkpoint."
            )


def replace_parameters(layer: Weighted, fresh: Weighted) -> bool:
    """Move the parameters of `fresh` to `layer`. A parameter with the same layout is copied into the old memory.

    Return True if all parameters were copied. The memory of `fresh` is then free.
    """
    is_free = True
    for key, now in list(fresh.named_parameters(recurse=False)):
        before = getattr(layer, key)
        if before is not None and same_layout(before, now):
            before.untyped_storage().copy_(now.untyped_storage())
        else:
            setattr(layer, key, now)
            is_free = False
    return is_free


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors have the same dtype, shape and strides, so that one storage can be copied to the other."""
    if type(one) is not type(other) or one.is_mkldnn or other.is_mkldnn:
        return False
    layouts = ((x.dtype, x.shape, x.stride(), x.untyped_storage().nbytes()) for x in (one, other))
    return next(layouts) == next(layouts)


# --- tensors from prepared layers ---


def _can_recover(layer: Weighted) -> bool:
    """Whether `_recover` can reproduce the layer's checkpoint tensors exactly."""
    if isinstance(layer, VocabularyWeight):
        if layer.kept or (isinstance(layer, LMHead) and layer.unit):
            return False
        is_plain_table = isinstance(layer, Embedding) and not layer.tied
        return is_plain_table or type(layer.method) is Unquantized
    if isinstance(layer, Linear):
        return type(layer.method) is Unquantized
    return type(layer).prepare is Weighted.prepare


def _recover(layer: Weighted, into: Weighted) -> None:
    """Fill the parameters of `into` with the layer's current tensors, in the checkpoint's layout.

    A packed weight is multiplied by the identity matrix. The result is exact, because each sum has only one product
    that is not zero.
    """
    for name, target in into.named_parameters(recurse=False):
        source = getattr(layer, name)
        if name != "weight" or not isinstance(layer, Linear | VocabularyWeight):
            if source is not None:
                target.copy_(source)
            continue
        if isinstance(layer, Embedding):
            ids = torch.arange(layer.ids.start, layer.ids.start + layer.ids.size, device=target.device)
            target.copy_(layer.kernels.embed(ids, source, layer.ids.start))
            continue
        for rows in _identity(target):
            product = layer.kernels.linear(rows, source, None) if isinstance(layer, Linear) else _logits(layer, rows)
            first = int(rows[0].argmax())
            target[:, first : first + len(rows)] = product.t()


def _logits(layer: VocabularyWeight, rows: Tensor) -> Tensor:
    products = layer.kernels.logits(rows, layer.get_parameter("weight"))
    return layer.kernels.as_logits(products, scale=None, soft_cap=None)


def _identity(weight: Tensor) -> Iterator[Tensor]:
    size = weight.shape[1]
    for first in range(0, size, IDENTITY_ROWS):
        rows = torch.zeros(min(IDENTITY_ROWS, size - first), size, dtype=weight.dtype, device=weight.device)
        rows[torch.arange(len(rows)), first + torch.arange(len(rows))] = 1
        yield rows
