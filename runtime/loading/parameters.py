"""Fill a model's parameters layer by layer, and check that every tensor is used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from ops.progress import Bar
from runtime.errors import CheckpointError
from runtime.layers.sharding import TensorParallelGroup
from runtime.layers.weight import Shard, Weighted
from runtime.loading.tensors import Tensors
from runtime.modeling.decoder import Decoder

MAX_NAMED = 20  # maximum number of tensors listed in one error
DUMMY_SEED = 1234
DUMMY_RANGE = 1e-3
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PIECE_BYTES = 16 * 2**20  # number of bytes that a thread reads at a time

Named = Sequence[tuple[str, nn.Module]]


def fill_layers(
    model: Decoder,
    tensors: Tensors | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_threads: int = 1,
    shards_of: Callable[[Named], dict[str, list[Shard]]] | None = None,
    bar: Bar | None = None,
) -> Iterator[Named]:
    """Allocate and fill one layer after another, and yield each layer's modules with their names.

    Modules outside the layers come first. The caller prepares or saves each layer before it takes the next one, so that
    only one layer is in memory in the checkpoint's format. If `tensors` is None, the weights are dummies.
    `shards_of` returns the shards that fill the given modules; the default is the modules' own shards.
    """
    layers = [[(f"layers.{i}.{n}", m) for n, m in each.named_modules()] for i, each in enumerate(model.layers)]
    inside = {module for layer in layers for _, module in layer}
    outer = [(name, module) for name, module in model.named_modules() if module not in inside]
    single = [each for each in outer if isinstance(each[1], Weighted) and each[1].by_itself]
    outer = [each for each in outer if each not in single]
    for modules in (outer, *([each] for each in single), *layers):
        for _, module in modules:
            allocate(module, dtype, device)
        _fill((shards_of or _shards_of)(modules), tensors, num_threads, bar)
        yield modules


def fill_shards(modules: Named, tensors: Tensors | None) -> None:
    """Fill the parameters of some modules. The parameters must be allocated."""
    _fill(_shards_of(modules), tensors, 1, None)


def fill_named(shards: Mapping[str, Sequence[Shard]], tensors: Tensors, num_threads: int) -> None:
    """Fill shards. `shards` maps the name of each tensor to the shards that the tensor fills."""
    _fill(shards, tensors, num_threads, None)


def _fill(shards: Mapping[str, Sequence[Shard]], tensors: Tensors | None, num_threads: int, bar: Bar | None) -> None:
    if tensors is None:
        for each in shards.values():
            for shard in each:
                fill_dummy(shard)
        return
    pieces = {
        name: [piece for shard in each for piece in shard.pieces(PIECE_BYTES)]
        for name, each in shards.items()
        if name in tensors.shapes
    }

    def take(name: str, number: int, part: Tensor) -> None:
        piece = pieces[name][number]
        piece.take(part)
        if bar is not None:
            bar.update(piece.target.nbytes)

    tensors.read_all(take, {name: [piece.cut for piece in each] for name, each in pieces.items()}, num_threads)
    for name, each in shards.items():
        for shard in each:
            if shard.default is not None and name not in pieces:
                shard.target.fill_(shard.default)


def split(model: nn.Module, group: TensorParallelGroup) -> None:
    """Keep this rank's shard of every layer. Parameters must still be on the meta device."""
    for module in model.modules():
        if isinstance(module, Weighted):
            module.split(group)


def collect_shards(model: nn.Module) -> dict[str, list[Shard]]:
    """Return the shards that each checkpoint tensor fills.

    Raises RuntimeError if a layer's shards leave a gap or overlap, or if two layers use one tensor.
    """
    return _shards_of([("", module) for module in model.modules()])


def _shards_of(modules: Named) -> dict[str, list[Shard]]:
    by_tensor: dict[str, list[Shard]] = {}
    for _, module in modules:
        local = own_shards(module) if isinstance(module, Weighted) else {}
        _check_cover(module, [shard for shards in local.values() for shard in shards])
        for name, shards in local.items():
            if name in by_tensor and not (isinstance(module, Weighted) and module.by_itself):
                raise RuntimeError(f"Two layers use the tensor {name}.")
            by_tensor.setdefault(name, []).extend(shards)
    return by_tensor


def own_shards(module: Weighted) -> dict[str, list[Shard]]:
    shards: dict[str, list[Shard]] = {}
    for shard in module.shards():
        shards.setdefault(shard.name, []).append(shard)
    return shards


def own_parameters(modules: Named) -> dict[str, list[Shard]]:
    """Return one shard per parameter, for files that store parameters under the modules' names and in their shapes."""
    return {
        f"{name}.{part}": [Shard(f"{name}.{part}", parameter, 0, len(parameter), (None,) * parameter.dim())]
        for name, module in modules
        for part, parameter in module.named_parameters(recurse=False)
    }


def check_total(
    shards: Mapping[str, Sequence[Shard]],
    shapes: Mapping[str, tuple[int, ...]],
    where: Callable[[Sequence[str]], str] = lambda names: "",
) -> None:
    """Raise CheckpointError unless the tensors are exactly the tensors that the layers need.

    Tensors with a default may be missing. `where` names the files of some tensors for the error message.
    """
    missing = [name for name, (shard, *_) in shards.items() if name not in shapes and shard.default is None]
    extra = [name for name in shapes if name not in shards]
    # A scalar may fill a vector of one element.
    wrong = [name for name in shards if name in shapes and (shapes[name] or (1,)) != shards[name][0].shape]
    misshapen = [f"{name} is {_text(shapes[name])}, must be {_text(shards[name][0].shape)}" for name in wrong]
    problems = [
        named_list("missing", missing),
        named_list("not of this model", extra),
        named_list("of the wrong shape", misshapen),
    ]
    if any(problems):
        raise CheckpointError(
            f"The checkpoint does not fit the model: {'; '.join(filter(None, problems))}"
            f"{where([*missing, *extra, *wrong])}."
        )


def check_dtypes(dtypes: Mapping[str, torch.dtype], where: Callable[[Sequence[str]], str]) -> None:
    """Raise CheckpointError for tensors that are not floating-point, or differ in dtype from similar tensors.

    The names of similar tensors differ only in layer and expert numbers. A dtype that only one tensor has is an error
    too, except float32, which some checkpoints use for a router's correction or the final norm.
    """
    similar: dict[str, list[str]] = {}
    for name in dtypes:
        similar.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    wrong = [name for name, dtype in dtypes.items() if dtype not in FLOATING]
    counts = Counter(dtypes.values())
    for names in similar.values():
        group = Counter(dtypes[name] for name in names)
        usual = max(group, key=lambda dtype: (group[dtype], counts[dtype]))
        wrong += [name for name in names if dtypes[name] != usual]
        if len(dtypes) > len(names) == counts[usual] == 1 and usual != torch.float32:
            wrong += names
    if wrong:
        details = [f"{name} is {str(dtypes[name]).removeprefix('torch.')}" for name in dict.fromkeys(wrong)]
        raise CheckpointError(
            f"The checkpoint has {named_list('of an unexpected dtype', details)}{where(wrong)}. "
            "Set --dtype to convert all floating-point tensors."
        )


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate a module's parameters that are on the meta device."""
    for name, shape in list(module.named_parameters(recurse=False)):
        if not shape.is_meta:
            continue
        memory = torch.empty(shape.shape, dtype=getattr(shape, "own_dtype", dtype), device=device)
        setattr(module, name, nn.Parameter(memory, requires_grad=False))


def _check_cover(module: nn.Module, shards: Sequence[Shard]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        row = 0
        for shard in sorted((p for p in shards if p.parameter is parameter), key=lambda p: p.first_row):
            if shard.first_row != row:
                raise RuntimeError(f"{type(module).__name__}.{name}: {shard.name} does not begin at row {row}.")
            row += shard.num_rows
        if row != parameter.shape[0]:
            raise RuntimeError(f"{type(module).__name__}.{name}: {row} of {parameter.shape[0]} rows have shards.")


def fill_dummy(shard: Shard) -> None:
    """Fill a shard with its default, or with small uniform numbers that depend only on the tensor's name and device.

    The numbers are drawn on the device, because drawing 8 billion numbers on the CPU and copying them takes a minute.
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
    if shard.index is not None:  # draw only this expert's part of the tensor
        generator.manual_seed(generator.initial_seed() + shard.index)
        shape = (1, *shape[1:])
        cut = (slice(0, 1), *cut[1:])
    values = torch.empty(shape, dtype=target.dtype, device=target.device)
    shard.take(values.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)[cut])


def named_list(problem: str, names: Sequence[str]) -> str:
    """Return the number and names of tensors with a problem, or "" if there are none."""
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {problem} ({', '.join(names[:MAX_NAMED])}{more})"


def _text(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape) or "a scalar"
