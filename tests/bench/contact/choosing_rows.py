"""Time sampling from logits with each kind of parameter (top-p, top-k, ...), for one row up to a large batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from bench.contact.timing import Call, Place, Row, measure
from bench.gpu.limits import Work
from ops.backends import SAMPLING
from ops.machine import Machine
from ops.sampling import NO_LIMIT, SamplingArrays

VOCAB, ROWS = 128_256, (1, 64, 256)  # of Llama 3
SMALL_VOCAB, SMALL_ROWS = 500, (1, 3)
SPREAD = 2.5  # standard deviation of the logits; a few hundred tokens then have most of the probability
KINDS: Mapping[str, Mapping[str, float]] = {
    "greedy": {"greedy": 1},
    "temperature": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-k 50 and top-p 0.9": {"top_k": 50, "top_p": 0.9},
}


def choosing(place: Place) -> Iterator[Row]:
    """Yield a measurement per backend, kind of parameter and batch size. Its limit is the time to read the logits."""
    vocab, counts = (SMALL_VOCAB, SMALL_ROWS) if place.small else (VOCAB, ROWS)
    machine = Machine.probe()
    gpu = machine.gpus[0] if machine.gpus and place.on_gpu else None
    for name, backend in SAMPLING.items():
        if backend.unmet(machine, gpu):
            continue
        for kind in KINDS:
            for count in counts:
                yield partial(
                    measure,
                    place,
                    f"choose with {name}, {kind}, {count} rows",
                    f"{vocab:,} tokens",
                    Work(4.0 * count * vocab),
                    partial(_call, place, backend.file, kind, count, vocab),
                    in_graph=backend.captured,
                )


def _call(place: Place, file: str, kind: str, count: int, vocab: int) -> Call:
    host = _arrays(count, KINDS[kind])
    arrays = SamplingArrays(*(each.to(place.device) for each in host))
    logits = place.draw(count, vocab, scale=SPREAD, dtype=torch.float32)
    choose = import_module(f"ops.sampling.{file}").choose
    return lambda: choose(logits, arrays, host)


def _arrays(count: int, limits: Mapping[str, float]) -> SamplingArrays:
    """Return the parameters of `count` rows. The rows differ only in their random number."""
    values = {"greedy": 0, "temperature": 0.8, "xtc_threshold": 0.1, **NO_LIMIT, **limits}
    dtypes = {"greedy": torch.bool, "top_k": torch.int32}

    def filled(name: str) -> Tensor:
        return torch.full((count,), values[name], dtype=dtypes.get(name, torch.float32))

    uniform = torch.rand(count, generator=torch.Generator().manual_seed(1))
    return SamplingArrays(**{name: filled(name) for name in values}, uniform=uniform)
