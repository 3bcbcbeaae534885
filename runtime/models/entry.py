"""What the registry says of an architecture. Torch-free: a family's file is imported when its model is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.layers.build import Build
    from runtime.models.config import Config
    from runtime.models.decoder import Decoder

    BuildDecoder = Callable[[Config, Build], Decoder]


@dataclass(frozen=True, slots=True)
class Entry:
    """A family's file, and the values its configuration takes where config.json is silent."""

    family: str  # the file in this folder; "gemma:gemma2" where its function is not called decoder
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)  # the family's name of a value -> the usual one
    sinks: bool = False  # its attention has learned sinks
    encoder: bool = False  # sees each text whole and writes no token
    scores: bool = False  # a classifier: its vectors are scores of labels
    headless: bool = False  # a decoder without a head, which writes no token
    # Its single tokens, in a CUDA graph: not where no backend of attention takes its heads there. Of an encoder, its
    # steps in the CPU graph, which every decoder of ours has.
    captured: bool = True
    tensors: Mapping[str, str | None] = field(default_factory=dict)  # see `tensor_name`
    layer_types: tuple[str, ...] = ()  # those that its configuration may list; (): those of attention
    spelling: str | None = None  # a function in `spellings.py` that brings older files into the usual form

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What config.json says, in the usual names and with the defaults."""
        read = dict(values)
        if self.spelling is not None:
            read = getattr(import_module("runtime.models.spellings"), self.spelling)(read)
        for own, usual in self.renamed.items():
            if read.get(own) is not None:
                read[usual] = read[own]
        return {**self.defaults, **read}

    def tensor_name(self, stored: str) -> str | None:
        """What the family calls a checkpoint's tensor; None for one that it does not need.

        `tensors` holds regular expressions of the beginnings of names, and what stands in their places or None.
        """
        for pattern, ours in self.tensors.items():
            found = re.match(pattern, stored)
            if found is not None:
                return None if ours is None else found.expand(ours) + stored[found.end() :]
        return stored

    @property
    def file(self) -> str:
        return self.family.partition(":")[0] + ".py"

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state in the place of keys and values."""
        return bool(self.layer_types)

    def decoder(self) -> BuildDecoder:
        """The family's function that builds the whole model, its parameters not yet filled."""
        file, _, function = self.family.partition(":")
        return getattr(import_module(f"runtime.models.{file}"), function or "decoder")
