"""Registry entry of an architecture. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.modeling import spellings


@dataclass(frozen=True, slots=True)
class Entry:
    """An architecture: the family that builds it, and how to read its config.json and its checkpoint."""

    family: str  # file in runtime/models, with ":function" unless the function is `decoder`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of fields missing from config.json
    renamed: Mapping[str, str] = field(default_factory=dict)  # name of a field in config.json -> the usual name
    sinks: bool = False  # whether attention has learned sinks
    encoder: bool = False  # whether the model processes each text in one step and generates no tokens
    scores: bool = False  # whether the model is a classifier, whose outputs are scores of labels
    draft_head: bool = False  # whether the model is a draft head
    headless: bool = False  # whether the model is a decoder that has no LM head and generates no tokens
    captured: bool = True  # for encoders: whether CPU graphs can capture steps; graphs can capture every decoder
    tensors: Mapping[str, str | None] = field(default_factory=dict)  # renamed tensors (see `tensor_name`)
    layer_types: tuple[str, ...] = ()  # kinds of layers that config.json may list; (): full and sliding attention
    spelling: str | None = None  # function in `spellings.py` that converts config.json to the usual form

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of config.json under the usual names, with defaults for missing fields."""
        read = dict(values)
        if self.spelling is not None:
            read = getattr(spellings, self.spelling)(read)
        for name, usual in self.renamed.items():
            if read.get(name) is not None:
                read[usual] = read[name]
        return {**self.defaults, **read}

    def tensor_name(self, stored: str) -> str | None:
        """Return the model's name for the checkpoint tensor `stored`, or None if the model does not use the tensor.

        `tensors` maps regular expressions to replacements. The first expression that matches the start of the name is
        used. The replacement None means that the tensor is not needed.
        """
        for pattern, replacement in self.tensors.items():
            match = re.match(pattern, stored)
            if match is not None:
                return None if replacement is None else match.expand(replacement) + stored[match.end() :]
        return stored

    @property
    def file(self) -> str:
        return self.family.partition(":")[0] + ".py"

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a recurrent state instead of keys and values."""
        return spellings.LINEAR in self.layer_types
