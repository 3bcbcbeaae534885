"""Registry of architectures. Does not import torch: a family is imported when a model of it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtime.errors import CheckpointError
from runtime.modeling.config import Config
from runtime.modeling.entry import Entry
from runtime.models.decoders import ARCHITECTURES
from runtime.models.draft_heads import DRAFT_HEADS
from runtime.models.encoders import ENCODERS
from runtime.models.refused import REFUSED

if TYPE_CHECKING:
    from runtime.layers.build import Build
    from runtime.modeling.decoder import Decoder

    BuildDecoder = Callable[[Config, Build], Decoder]

# Suffix in place of ForCausalLM -> True if the decoder has a classifier head, False if it has no head at all.
HEADS = {"ForSequenceClassification": True, "ForRewardModel": True, "Model": False}


def find(architecture: str) -> Entry | None:
    """Return the entry of an architecture, or None if it is not supported.

    Also finds supported decoders with a classifier head, and without a head (see HEADS).
    """
    match = ARCHITECTURES.get(architecture) or ENCODERS.get(architecture) or DRAFT_HEADS.get(architecture)
    for end, scores in HEADS.items():
        base = ARCHITECTURES.get(architecture.removesuffix(end) + "ForCausalLM")
        if match is None and architecture.endswith(end) and base is not None:
            return replace(base, scores=scores, headless=True)
    return match


def entry(architecture: str) -> Entry:
    """Return the entry of an architecture. If it is not supported, raises CheckpointError, which may suggest a name."""
    match = find(architecture)
    if match is not None:
        return match
    raise CheckpointError(unsupported(architecture))


def architecture_of(values: Mapping[str, Any]) -> str:
    """Return the first supported architecture in config.json's list or, if none is supported, the list's first entry.

    Raises CheckpointError if config.json has no valid list.
    """
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError("config.json: architectures must be a list with the model's class name.")
    known = [name for name in names if find(name) is not None]
    return known[0] if known else names[0]


def config_of(values: Mapping[str, Any]) -> Config:
    """Return config.json with the defaults of its architecture. Raises CheckpointError if it is not supported."""
    architecture = architecture_of(values)
    return Config(architecture, entry(architecture), values)


def family_of(entry: Entry) -> BuildDecoder:
    """Return the family's function that builds the model with unfilled parameters."""
    file, _, function = entry.family.partition(":")
    return getattr(import_module(f"runtime.models.{file}"), function or "decoder")


def unsupported(architecture: str) -> str:
    """Return the error text for an architecture that no family supports."""
    if architecture in REFUSED:
        return f"The architecture {architecture} is not supported: {REFUSED[architecture]}."
    suggestion = _closest(architecture)
    hint = f" Did you mean {suggestion}?" if suggestion else ""
    known = ", ".join(sorted({**ARCHITECTURES, **ENCODERS}))
    return f"The architecture {architecture} is not supported.{hint} Native architectures: {known}."


def _closest(architecture: str) -> str | None:
    """Return the most similar supported name with the same digits, or None. Other digits mean another architecture."""
    stem = _family(architecture)
    families = {_family(name): name for name in ARCHITECTURES if _digits(name) == _digits(architecture)}
    close = get_close_matches(stem, families, n=1, cutoff=0.85)
    return families[close[0]] if close else None


def _family(architecture: str) -> str:
    return architecture.lower().partition("for")[0]


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))
