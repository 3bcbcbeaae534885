"""Filling a model's parameters: every one once, every tensor accounted for, one layer after the other."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from runtime.errors import CheckpointError
from runtime.layers.sharding import TensorParallelGroup
from runtime.layers.weight import Shard, Weighted
from runtime.models.decoder import Decoder
from runtime.models.tensors import Tensors

MAX_NAMED = 20  # tensors listed in one error
DUMMY_SEED = 1234
DUMMY_RANGE = 1e-3
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PIECE_BYTES = 16 * 2**20  # that one thread reads at once
QUIET_S = 1.0  # before a bar is shown

Named = Sequence[tuple[str, nn.Module]]


def fill_layers(
    model: Decoder,
    tensors: Tensors | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_threads: int = 1,
    shards_of: Callable[[Named], dict[str, list[Shard]]] | None = None,
    bar: Any = None,
) -> Iterator[Named]:
    """Give one layer after the other memory and weights, and yield the modules it is made of, with their names.

    What surrounds the layers is the first one. Whoever iterates prepares them, or saves them and lets go, so that of
    what the checkpoint holds in another form than memory only one layer is there at a time. Without `tensors` the
    weights are dummies. `shards_of` says which tensors fill some modules, in place of what their layers say.
    """
    of_layers = [
        [(f"layers.{i}.{n}", m) for n, m in each.named_modules()] for i, each in enumerate(model.layers)
    ]
    inside = {module for layer in of_layers for _, module in layer}
    around = [(name, module) for name, module in model.named_modules() if module not in inside]
    single = [each for each in around if isinstance(each[1], Weighted) and each[1].by_itself]
    around = [each for each in around if each not in single]
    for modules in (around, *([each] for each in single), *of_layers):
        for _, module in modules:
            allocate(module, dtype, device)
        _fill((shards_of or _shards_of)(modules), tensors, num_threads, bar)
        yield modules


def _fill(shards: Mapping[str, Sequence[Shard]], tensors: Tensors | None, num_threads: int, bar: Any) -> None:
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

    tensors.read_all(
        take, {name: [piece.cut for piece in each] for name, each in pieces.items()}, num_threads
    )
    for name, each in shards.items():
        for shard in each:
            if shard.default is not None and name not in pieces:
                shard.target.fill_(shard.default)


def loading_bar(total_bytes: int | None) -> Any:
    """How far loading is, in a terminal or a notebook; nothing elsewhere, for None, and for what is there at once."""
    notebook = "ipykernel" in sys.modules
    if total_bytes is None or (not notebook and not sys.stderr.isatty()):
        return nullcontext()
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread that stays

    return Bar(
        total=total_bytes, desc="Loading weights", unit="B", unit_scale=True, delay=QUIET_S, leave=False
    )


def split(model: nn.Module, group: TensorParallelGroup) -> None:
    """Cut every layer that can be cut. Its parameters must not have memory yet."""
    for module in model.modules():
        if isinstance(module, Weighted):
            module.split(group)


def collect_shards(model: nn.Module) -> dict[str, list[Shard]]:
    """What each checkpoint tensor fills: one part of one layer, or several.

    RuntimeError where a layer's shards leave a gap or overlap, and where two layers claim one tensor.
    """
    return _shards_of([("", module) for module in model.modules()])


def _shards_of(modules: Named) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for _, module in modules:
        own = own_shards(module) if isinstance(module, Weighted) else {}
        _check_cover(module, [shard for shards in own.values() for shard in shards])
        for name, shards in own.items():
            if name in found and not (isinstance(module, Weighted) and module.by_itself):
                raise RuntimeError(f"Two layers claim the tensor {name}.")
            found.setdefault(name, []).extend(shards)
    return found


def own_shards(module: Weighted) -> dict[str, list[Shard]]:
    shards: dict[str, list[Shard]] = {}
    for shard in module.shards():
        shards.setdefault(shard.name, []).append(shard)
    return shards


def own_parameters(modules: Named) -> dict[str, list[Shard]]:
    """What fills some modules' parameters in such files: tensors of the same names and shapes."""
    return {
        f"{name}.{own}": [Shard(f"{name}.{own}", parameter, 0, len(parameter), (None,) * parameter.dim())]
        for name, module in modules
        for own, parameter in module.named_parameters(recurse=False)
    }


def check_total(
    shards: Mapping[str, Sequence[Shard]],
    shapes: Mapping[str, tuple[int, ...]],
    where: Callable[[Sequence[str]], str] = lambda names: "",
) -> None:
    """Raise CheckpointError unless the tensors are exactly those that the layers are made of.

    Those with a default may be absent. `where` says of some tensors in which files they are, or are not.
    """
    missing = [name for name, (shard, *_) in shards.items() if name not in shapes and shard.default is None]
    extra = [name for name in shapes if name not in shards]
    # A scalar is a vector of one.
    wrong = [name for name in shards if name in shapes and (shapes[name] or (1,)) != shards[name][0].shape]
    misshapen = [f"{name} is {_text(shapes[name])}, must be {_text(shards[name][0].shape)}" for name in wrong]
    problems = [
        _list("missing", missing),
        _list("not of this model", extra),
        _list("of the wrong shape", misshapen),
    ]
    if any(problems):
        raise CheckpointError(
            f"The checkpoint does not fit the model: {'; '.join(filter(None, problems))}"
            f"{where([*missing, *extra, *wrong])}."
        )


def check_dtypes(dtypes: Mapping[str, torch.dtype], where: Callable[[Sequence[str]], str]) -> None:
    """Raise CheckpointError for tensors that are no floating numbers, or of another dtype than their like.

    Alike are tensors of different layers or experts with the same name. Of a dtype that only one tensor has, that is
    said too, unless it is float32: some checkpoints keep a router's correction or the final norm so.
    """
    alike: dict[str, list[str]] = {}
    for name in dtypes:
        alike.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    wrong = [name for name, dtype in dtypes.items() if dtype not in FLOATING]
    counts = Counter(dtypes.values())
    for names in alike.values():
        here = Counter(dtypes[name] for name in names)
        usual = max(here, key=lambda dtype: (here[dtype], counts[dtype]))
        wrong += [name for name in names if dtypes[name] != usual]
        if len(dtypes) > len(names) == counts[usual] == 1 and usual != torch.float32:
            wrong += names
    if wrong:
        said = [f"{name} is {str(dtypes[name]).removeprefix('torch.')}" for name in dict.fromkeys(wrong)]
        raise CheckpointError(
            f"The checkpoint has {_list('of an unexpected dtype', said)}{where(wrong)}. "
            "With --dtype set, all floating ones are converted."
        )


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a layer's own parameters memory that are only shapes so far."""
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
                raise RuntimeError(
                    f"{type(module).__name__}.{name}: {shard.name} does not begin at row {row}."
                )
            row += shard.num_rows
        if row != parameter.shape[0]:
            raise RuntimeError(
                f"{type(module).__name__}.{name}: {row} of {parameter.shape[0]} rows are filled."
            )


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
