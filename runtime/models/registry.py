"""Which architectures there are. Torch-free: a family's file is imported when its model is built."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from runtime.errors import CheckpointError
from runtime.models.decoders import ARCHITECTURES
from runtime.models.encoders import ENCODERS
from runtime.models.entry import Entry

# What may stand in the place of ForCausalLM: a classifier's head or none.
HEADS = {"ForSequenceClassification": True, "ForRewardModel": True, "Model": False}


def find(architecture: str) -> Entry | None:
    """The entry of an architecture, also of a decoder whose head is another one or none; None where there is none."""
    found = ARCHITECTURES.get(architecture) or ENCODERS.get(architecture)
    for end, scores in HEADS.items():
        base = ARCHITECTURES.get(architecture.removesuffix(end) + "ForCausalLM")
        if found is None and architecture.endswith(end) and base is not None:
            return replace(base, scores=scores, headless=True)
    return found


def entry(architecture: str) -> Entry:
    """The entry of an architecture. Raises CheckpointError, with a hint, where there is none."""
    found = find(architecture)
    if found is not None:
        return found
    raise CheckpointError(unsupported(architecture))


def unsupported(architecture: str) -> str:
    """Why an architecture without a family cannot be computed by one."""
    meant = _misspelt(architecture)
    hint = f" Did you mean {meant}?" if meant else ""
    known = ", ".join(sorted({**ARCHITECTURES, **ENCODERS}))
    return f"The architecture {architecture} is not supported.{hint} Families of ours: {known}."


def _misspelt(architecture: str) -> str | None:
    """The name that was meant, where only letters are wrong: another number or addition is another architecture."""
    stem = _family(architecture)
    families = {_family(name): name for name in ARCHITECTURES if _digits(name) == _digits(architecture)}
    close = get_close_matches(stem, families, n=1, cutoff=0.85)
    return families[close[0]] if close else None


def _family(architecture: str) -> str:
    return architecture.lower().partition("for")[0]


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))
