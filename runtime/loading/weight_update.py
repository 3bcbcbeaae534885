"""Replace the weights of a loaded model by those of another checkpoint, in the memory of the old weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ops.select import Kernels
from runtime.config.gguf_header import is_gguf
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.errors import CheckpointError, ConfigurationError, InvalidRequest
from runtime.layers.attention import KVScales
from runtime.layers.embedding import Embedding
from runtime.layers.expert_sharing import ExpertSharing
from runtime.layers.linear import Linear
from runtime.layers.pooler import Pooler
from runtime.loading.draft_facts import has_nextn_tensors
from runtime.loading.facts import read_facts
from runtime.loading.loader import Outline, make_pooler, outline_model, prepared_layers
from runtime.loading.parameters import Named, fill_shards
from runtime.loading.staged_weights import Staged, StagedWeights, same_layout
from runtime.loading.weight_memory import MemoryFile, checksums, fill_random, release, reserve
from runtime.loading.whole_vocabulary import WholeVocabulary
from runtime.mesh.mesh import Mesh
from runtime.modeling.decoder import Decoder

logger = logging.getLogger("penstock.core")

LOAD_FORMATS = ("auto", "safetensors", "pt", "npcache")  # formats that new weights may have
# Facts that must be equal in the old and the new checkpoint. `_difference` compares the layers.
SAME_FACTS = ("architecture", "quantization", "num_layers", "hidden_size", "vocab_size", "pooling", "labels")
OWN_STATE = frozenset(vars(nn.Module()))  # attributes that every torch module has; they are not compared
MAX_SHOWN = 80  # maximum number of characters of a value in an error text


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A checkpoint from which weights were or will be read."""

    facts: ModelFacts
    plan: ModelPlan
    files: Mapping[str, tuple[int, int]]  # file name -> size and modification time before reading

    @classmethod
    def of(cls, facts: ModelFacts, plan: ModelPlan) -> WeightSource:
        """Make the source of this checkpoint, with the current size and modification time of each file."""
        return cls(facts, plan, _stamps(Path(facts.path)))

    @property
    def is_unchanged(self) -> bool:
        """Whether the files have not changed since `of` was called. Always true for dummy weights."""
        return self.plan.load_format == "dummy" or self.files == _stamps(Path(self.facts.path))


class LoadedWeights:
    """Replaces the weights of one rank's model.

    All methods must be called between two steps, by the thread that enqueues steps.
    """

    def __init__(
        self,
        model: Decoder,
        source: WeightSource,
        kernels: Kernels,
        mesh: Mesh,
        *,
        fixed: bool,
        scaled_cache: bool,
        experts: ExpertSharing | None = None,
    ) -> None:
        """`fixed` says whether graphs hold the weights' addresses, `scaled_cache` whether the KV cache has 8 bits.

        `experts` is the current placement of the model's experts.
        """
        self._model = model
        self._experts = experts
        self._source = self._previous = self._initial = source
        self._kernels = kernels
        self._mesh = mesh
        self._fixed = fixed
        self._scaled_cache = scaled_cache
        self._is_loading = False  # whether `load` was called, and neither `loaded` nor `restore` since
        self._changed = False  # whether weights have changed since the last load began
        self._backup: MemoryFile | None = None  # copy of weights that no checkpoint has, made before a load or release
        self._released = False
        self._staged: StagedWeights | None = None
        self._snapshot: dict[str, str] | None = None
        # A draft head's copy of the vocabulary layers, updated with the weights.
        self._vocabulary: WholeVocabulary | None = None
        self._head: LoadedWeights | None = None  # a draft head in the model's checkpoint, updated with the weights
        self.unset: set[str] = set()  # tensors that lost their values in a release, and have not been loaded since
        # Whether the weights are those of the source's files; False after `commit` and `fill_random`.
        self._from_files = source.plan.load_format != "remote_instance"

    def check(self, path: str, load_format: str | None) -> None:
        """Raise `InvalidRequest` or `CheckpointError` unless the checkpoint's weights can replace the current ones.

        Reads no weights except the scales of the KV cache.
        """
        head = self._head_in(path)
        if head is not None:
            head.check(path, load_format)
        try:
            self._outline(self._target(path, load_format))
        except (InvalidRequest, CheckpointError):
            raise
        except Exception as error:  # damaged files raise errors of many types
            logger.exception("The checkpoint %s cannot be used.", path)
            raise CheckpointError(_reason(error)) from error

    def load(self, path: str, load_format: str | None) -> dict[str, Any]:
        """Read the checkpoint's weights. Return {"error": None}, or {"error": reason} if this failed.

        After an error some weights may be new, so no step may run before `restore`.
        """
        self._previous, self._changed, self._is_loading = self._source, False, True
        try:
            if not self._from_files:
                self._back_up()
            self._source = self._target(path, load_format)
            self._fill(self._source)
        except Exception as error:  # returned as text: the caller then makes all ranks restore their weights
            logger.exception("The weights of %s were not loaded.", path)
            return {"error": _reason(error)}
        head = self._head_in(path)
        return {"error": None} if head is None else head.load(path, load_format)

    def loaded(self) -> None:
        """Accept the weights of the last `load`. Call this after all ranks have loaded them."""
        if self._head is not None and self._head.is_changing:
            self._head.loaded()
        self._is_loading = False
        self._from_files = True
        self.unset.clear()
        self._forget_backup()
        self._gather_vocabulary()

    def restore(self) -> None:
        """Restore the weights from before the last `load`.

        Raises RuntimeError if they cannot be read again. The model is then unusable.
        """
        if self._head is not None and self._head.is_changing:
            self._head.restore()
        source = self._source = self._previous
        self._is_loading = False
        if self._backup is not None:
            try:
                self._backup.restore()
            except OSError as error:
                raise RuntimeError("The old weights cannot be read from their temporary file.") from error
            self._forget_backup()
            return
        if not self._changed:
            return
        if not source.is_unchanged:
            raise RuntimeError(
                f"The old weights are not in {source.facts.path} any more, because its files have changed."
            )
        try:
            self._fill(source)
        except Exception as error:  # files, memory and kernels raise errors of many types
            raise RuntimeError(f"The old weights in {source.facts.path} cannot be read again.") from error

    # --- weights of a trainer ---

    @property
    def staged(self) -> StagedWeights:
        """The trainer's weights that wait for `commit`. Raises CheckpointError for models that take no such weights."""
        if self._staged is None:
            facts, plan, reason = self._source.facts, self._source.plan, self._not_replaced
            if reason:
                raise CheckpointError(reason)
            fixed, scaled = self._fixed, self._scaled_cache
            self._staged = StagedWeights(self._model, facts, plan, fixed=fixed, scaled_cache=scaled)
        return self._staged

    @property
    def _not_replaced(self) -> str:
        """The reason why single tensors of the model cannot be replaced, or ""."""
        facts, plan = self._source.facts, self._source.plan
        if plan.by_transformers:
            return f"{facts.architecture} is run by transformers' modules, whose weights cannot be replaced."
        gguf = "The weights of GGUF files cannot be replaced while the server runs."
        return gguf if is_gguf(facts.path) else ""

    @property
    def max_bytes(self) -> int:
        """Upper bound on the bytes of all tensors of an update that this rank uses, in float32."""
        return self.staged.num_bytes + (0 if self._head is None else self._head.staged.num_bytes)

    def stage(self, tensors: Mapping[str, Tensor], **options: Any) -> Staged:
        """Prepare new layers of the model and of the draft head in its checkpoint (see `StagedWeights.stage`)."""
        unknown, waiting = self.staged.stage(tensors, **options)
        if self._head is not None:
            waiting = [*waiting, *self._head.staged.stage(tensors, **options).waiting]
        return Staged(unknown, waiting)

    def drop_staged(self) -> None:
        """Discard all staged tensors and layers."""
        self.staged.drop()
        if self._head is not None:
            self._head.drop_staged()

    def free_update_memory(self) -> None:
        """Free the memory that updates keep for later updates."""
        if self._head is not None:
            self._head.free_update_memory()
        if self._staged is not None:
            self._staged.free_memory()

    def commit(self, *, keep_memory: bool = False) -> int:
        """Replace the current weights by the staged ones, and return the number of changed tensors.

        With `keep_memory`, the memory of the staged layers is kept for the next update.
        """
        if self._released:
            raise CheckpointError("The memory of the weights is released; resume it first.")
        if self._head is not None:
            self._head.commit(keep_memory=keep_memory)
        names = self.staged.commit(keep_memory=keep_memory)
        self._from_files = self._from_files and not names
        self.unset -= names
        if not names.isdisjoint(self.staged.vocabulary_names):
            self._gather_vocabulary()
        return len(names)

    def update_head(self, head: LoadedWeights) -> None:
        """Update the draft head with the model: its layers are in the model's checkpoints and updates (NEXTN)."""
        self._head = head

    def _head_in(self, path: str) -> LoadedWeights | None:
        """Return the weights of the draft head if this checkpoint has tensors for it, or else None."""
        if self._head is None:
            return None
        if has_nextn_tensors(path, self._head._source.facts):
            return self._head
        logger.warning("%s has no multi-token prediction layers, so the draft head keeps its weights.", path)
        return None

    def follow(self, vocabulary: WholeVocabulary, *, gather: bool) -> None:
        """Keep this copy equal to the weights of all ranks, from now on (`gather`) or from the next update on.

        Raises `ConfigurationError` for `gather` if the weights are stored in a form that cannot be converted back. The
        copy then does not follow updates.
        """
        if not self._not_replaced and self.staged.reads_vocabulary:
            self._vocabulary = vocabulary
        elif gather:
            raise ConfigurationError("A draft head cannot read the quantised embedding or LM head of several ranks.")
        if gather:
            self._gather_vocabulary()

    def _gather_vocabulary(self) -> None:
        if self._vocabulary is not None:
            self._vocabulary.gather(self.staged)

    def send(self, send: Callable[[nn.Module], None]) -> None:
        """Call `send` with the model, whose parameters must not change meanwhile."""
        if self._released:
            raise InvalidRequest("The memory of the weights is released; resume it first.")
        with torch.inference_mode():
            send(self._model)

    # --- experts ---

    @property
    def is_changing(self) -> bool:
        """Whether an update or a release of weights is in progress, so that experts must not move."""
        staged = self._staged is not None and self._staged.is_pending
        return staged or self._is_loading or self._released or self._backup is not None

    @property
    def are_initial(self) -> bool:
        """Whether the weights come unchanged from the first checkpoint, and no update or release is in progress."""
        in_files = self._from_files and self._source is self._initial and self._source.is_unchanged
        return in_files and not self.is_changing and not self.unset

    def experts_moved(self) -> None:
        """Discard what depends on this rank's experts after experts have moved. `is_changing` must be false."""
        self._staged = None
        self._snapshot = None

    # --- checks ---

    def take_snapshot(self) -> None:
        """Compute the checksums of all parameters, and keep them for `compare`."""
        self._snapshot = checksums(self._model)

    def compare(self) -> list[str]:
        """Return the names of the parameters that differ from the snapshot. Raises InvalidRequest without one."""
        if self._snapshot is None:
            raise InvalidRequest("There is no snapshot of the weights. Send action snapshot first.", param="action")
        now = checksums(self._model)
        return sorted(name for name in now.keys() | self._snapshot.keys() if now.get(name) != self._snapshot.get(name))

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each parameter of this rank, in the layout that the kernels read."""
        return checksums(self._model)

    def fill_random(self) -> None:
        """Overwrite all parameters with random bytes, so that a check can find weights that an update missed."""
        fill_random(self._model)
        self._from_files = False

    # --- memory ---

    def release(self, *, keep: bool) -> int:
        """Release the memory of the weights, and return its size in bytes. If `keep`, `resume` restores the weights.

        Weights to keep that are not in unchanged files are first written to a temporary file.
        """
        if self._released:
            return 0
        on_gpu = next(self._model.parameters()).device.type == "cuda"
        if on_gpu and (self._fixed or not self._source.plan.memory_saver):
            raise InvalidRequest(
                "The memory of a GPU can be given back only with --enable-memory-saver and without "
                "--enable-torch-compile, because graphs and compiled code hold its addresses."
            )
        in_files = self._from_files and self._source.is_unchanged and not self._source.plan.by_transformers
        if keep and not in_files:
            self._back_up()
        self._released = True
        self.free_update_memory()
        return release(parameter.data for parameter in self._model.parameters())

    def resume(self) -> bool:
        """Allocate the released memory again. Return False if the weights were not kept and so have no values."""
        if not self._released:
            return True
        reserve(parameter.data for parameter in self._model.parameters())
        self._released = False
        if self._backup is not None:
            self._backup.restore()
            self._forget_backup()
            return True
        if self._from_files and self._source.is_unchanged and not self._source.plan.by_transformers:
            self._fill(self._source)
            return True
        self.unset = set(self.staged.shapes)
        return False

    def _back_up(self) -> None:
        self._forget_backup()
        self._backup = MemoryFile(parameter.data for parameter in self._model.parameters())

    def _forget_backup(self) -> None:
        backup, self._backup = self._backup, None
        if backup is not None:
            backup.close()

    # --- reading a checkpoint ---

    def _target(self, path: str, load_format: str | None) -> WeightSource:
        facts, plan = self._source.facts, self._source.plan
        if plan.by_transformers:
            raise CheckpointError(
                f"{facts.architecture} is run by transformers' modules, whose weights cannot be replaced while the "
                "server runs. Start the server with the new checkpoint."
            )
        if is_gguf(facts.path) or is_gguf(path):
            raise CheckpointError(
                "The weights of GGUF files cannot be replaced while the server runs, because each file has its own "
                "quantisation. Start the server with the new file."
            )
        usual = plan.load_format if plan.load_format in LOAD_FORMATS else "auto"
        if (load_format or usual) not in LOAD_FORMATS:
            raise InvalidRequest(f"load_format must be one of {', '.join(LOAD_FORMATS)}.", param="load_format")
        new_facts = read_facts(path, plan.config_overrides, model_impl="native")
        for name in SAME_FACTS:
            ours, theirs = getattr(facts, name), getattr(new_facts, name)
            if isinstance(theirs, tuple):  # other ranks receive the facts as JSON, which turns tuples into lists
                ours, theirs = list(ours), list(theirs)
            if ours != theirs:
                raise CheckpointError(f"{path} is another model: {name} is {_text(theirs)}, not {_text(ours)}.")
        return WeightSource.of(new_facts, replace(plan, path=path, load_format=load_format or usual))

    def _outline(self, source: WeightSource) -> Outline:
        """Build the checkpoint's model without weights. Raises CheckpointError unless only its weights may differ."""
        facts, info = source.facts, self._mesh.rank_info
        stage = info.stage_layers(facts.num_layers)
        outline = outline_model(facts, source.plan, self._kernels, self._mesh, stage, info, self._experts)
        difference = _difference(self._model, outline.model)
        if difference is not None:
            raise CheckpointError(f"{facts.path} is another model: {difference}.")
        if self._scaled_cache and source.plan.kv_scales is None:
            self._check_scales(outline)
        return outline

    def _check_scales(self, outline: Outline) -> None:
        """Raise CheckpointError if KV scales differ: graphs and the cache depend on the current scales."""
        for (name, ours), (_, theirs) in _pairs(self._model, outline.model):
            if not isinstance(ours, KVScales) or not isinstance(theirs, KVScales):
                continue
            fill_shards([(name, theirs)], outline.tensors)
            theirs.prepare()
            if ours.values != theirs.values:
                raise CheckpointError(
                    f"The scales of the 8-bit KV cache differ ({ours.name}). Start the server with the new checkpoint."
                )

    def _fill(self, source: WeightSource) -> None:
        outline = self._outline(source)
        pooler = make_pooler(self._model, source.facts, source.plan)
        outer: list[tuple[str, nn.Module]] = []
        ours = {fresh: own for (_, own), (_, fresh) in _pairs(self._model, outline.model)}
        with torch.inference_mode():
            for modules in prepared_layers(outline, source.plan):
                if not modules[0][0].startswith("layers."):
                    outer += modules  # moved after blocks of the vocabulary are packed into them
                    continue
                self._take(ours, [*outer, *modules])
                outer = []
            self._take(ours, outer)
        self._model.pooler = pooler

    def _take(self, ours: Mapping[nn.Module, nn.Module], modules: Named) -> None:
        """Move the parameters of fresh modules to the loaded model's modules."""
        for name, fresh in modules:
            own = ours[fresh]
            for key, now in list(fresh.named_parameters(recurse=False)):
                self._changed = True
                before = getattr(own, key)
                if before is not None and same_layout(before, now):
                    before.untyped_storage().copy_(now.untyped_storage())
                elif self._fixed:
                    raise CheckpointError(
                        f"{name}.{key} has a new layout, but graphs hold the address of the old one. Start the server "
                        "with the new checkpoint."
                    )
                else:
                    setattr(own, key, now)
                setattr(fresh, key, nn.Parameter(torch.empty(0), requires_grad=False))


def _stamps(path: Path) -> dict[str, tuple[int, int]]:
    files = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    states = {file.name: file.stat() for file in files if file.is_file()}
    return {name: (state.st_size, state.st_mtime_ns) for name, state in states.items()}


def _pairs(ours: nn.Module, theirs: nn.Module) -> Iterable[tuple[tuple[str, nn.Module], tuple[str, nn.Module]]]:
    return zip(ours.named_modules(), theirs.named_modules(), strict=True)


def _difference(ours: Decoder, theirs: Decoder) -> str | None:
    """Return the first difference between two models as a text, or None. Weights are not compared."""
    if [name for name, _ in ours.named_modules()] != [name for name, _ in theirs.named_modules()]:
        return "its layers differ"
    dtype = ours.dtype
    for (name, own), (_, other) in _pairs(ours, theirs):
        if isinstance(own, Pooler):  # not compared: the pooler is built from the facts, which are equal
            continue
        if type(own) is not type(other):
            return f"{name} is a {type(other).__name__}, not a {type(own).__name__}"
        mine, yours = vars(own), vars(other)
        for key in (mine.keys() | yours.keys()) - OWN_STATE:
            one, two = mine.get(key), yours.get(key)
            if isinstance(own, Linear) and key in ("adapters", "row_values"):  # not compared: an update keeps adapters
                continue
            if isinstance(own, KVScales) and key == "values":  # not compared: read from the checkpoint like weights
                continue
            if isinstance(own, Embedding) and key == "scale" and one is not None and two is not None:
                # One of the scales may already be rounded to the dtype.
                one, two = (torch.tensor(each, dtype=dtype).item() for each in (one, two))
            if _differ(one, two):
                return f"{name}.{key} is {_text(two)}, not {_text(one)}"
        tables = dict(other.named_buffers(recurse=False))
        for key, table in own.named_buffers(recurse=False):  # for example rotary tables
            if key not in tables or tables[key].shape != table.shape or not torch.equal(tables[key], table):
                return f"the values of {name}.{key} differ"
    return None


def _differ(one: Any, two: Any) -> bool:
    """Whether two attributes of layers differ. Tensors, modules and functions are not compared."""
    if isinstance(one, bool | int | float | str | None) or isinstance(two, bool | int | float | str | None):
        return not (isinstance(one, Tensor) or isinstance(two, Tensor)) and one != two
    if type(one) is not type(two):
        return True
    if isinstance(one, Mapping):
        return one.keys() != two.keys() or any(_differ(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) != len(two) or any(map(_differ, one, two))
    if dataclasses.is_dataclass(one) and not isinstance(one, Kernels):
        return any(_differ(getattr(one, each.name), getattr(two, each.name)) for each in dataclasses.fields(one))
    return False


def _reason(error: Exception) -> str:
    """Return the error text for the client. Texts of unexpected errors are replaced, because they expose internals."""
    if isinstance(error, CheckpointError | InvalidRequest):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"The weights cannot be read: {error.strerror}."
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "There is not enough memory to read a layer in addition to the current weights."
    return "The weights cannot be loaded."


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
