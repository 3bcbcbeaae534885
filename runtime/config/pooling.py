"""Pooling of hidden states into a vector, from a checkpoint's sentence-transformers files. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.config.fields import Fields
from runtime.errors import CheckpointError

MODULES = "modules.json"
# Pooling modes, in the order in which sentence-transformers concatenates them.
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A linear layer over the pooled vector."""

    folder: str  # folder within the checkpoint
    size: int  # length of the output vector
    bias: bool = True
    activation: str = ""  # applied to the output; "": none


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """Rule for turning a text's hidden states into one vector. The vectors of several `modes` are concatenated."""

    modes: tuple[str, ...] = ("last",)
    dense: tuple[Dense, ...] = ()
    normalize: bool = True  # scale to length one

    def size(self, hidden_size: int) -> int:
        """Return the length of the resulting vector."""
        return self.dense[-1].size if self.dense else hidden_size * len(self.modes)

    @property
    def needs_all(self) -> bool:
        """Whether pooling reads more than the last hidden state. If so, one step must compute the whole prompt."""
        return self.modes != ("last",)

    def __str__(self) -> str:
        names = {"last": "the last token", "cls": "the first token", "mean": "the mean of the tokens"}
        parts = " and ".join(names.get(mode, mode.replace("_", " ")) for mode in self.modes)
        return parts + ", dense" * len(self.dense) + ", scaled to length one" * self.normalize

    @classmethod
    def decode(cls, body: Mapping[str, Any] | None) -> Pooling | None:
        """Return the pooling that a JSON object describes, or None if `body` is None."""
        if body is None:
            return None
        dense = tuple(Dense(**each) for each in body["dense"])
        return cls(modes=tuple(body["modes"]), dense=dense, normalize=body["normalize"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFiles:
    """Contents of a checkpoint's sentence-transformers files."""

    pooling: Pooling
    max_tokens: int | None = None  # longer texts are cut to this number of tokens; None: not cut
    lower_case: bool = False  # whether texts are lower-cased before tokenization
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that precede the input, by name
    default_prompt: str | None = None


def read_sentence_files(directory: Path) -> SentenceFiles | None:
    """Read a checkpoint's sentence-transformers files. Returns None if the checkpoint has no modules.json.

    Raises CheckpointError if the files are invalid or not supported.
    """
    if not (directory / MODULES).is_file():
        return None
    modes: tuple[str, ...] = ()
    dense: list[Dense] = []
    normalize = False
    settings, includes_prompt = Fields({}, ""), True
    for kind, folder in _modules(directory):
        inner = directory / folder
        if kind == "Transformer":
            settings = _fields(inner / "sentence_bert_config.json", optional=True)
        elif kind == "Pooling":
            fields = _fields(inner / "config.json")
            modes = _modes(fields)
            includes_prompt = fields.flag("include_prompt", default=True)
        elif kind == "Dense" and modes:
            dense.append(_dense(_fields(inner / "config.json"), folder))
        elif kind == "Normalize":
            normalize = True
        else:
            raise CheckpointError(f"{directory / MODULES}: modules of the kind {kind} are not supported there.")
    if not modes:
        raise CheckpointError(f"{directory / MODULES} names no pooling.")
    prompts, default_prompt = _prompts(directory / "config_sentence_transformers.json")
    if not includes_prompt and any(prompts.values()):
        raise CheckpointError(f"{directory}: pooling that leaves the prompt out is not supported.")
    return SentenceFiles(
        pooling=Pooling(modes=modes, dense=tuple(dense), normalize=normalize),
        max_tokens=settings.optional_integer("max_seq_length"),
        lower_case=settings.flag("do_lower_case"),
        prompts=prompts,
        default_prompt=default_prompt,
    )


def module_folders(directory: Path) -> list[str]:
    """Return the subfolders that modules.json names; [] if there is no modules.json.

    Raises CheckpointError if the file is invalid.
    """
    if not (directory / MODULES).is_file():
        return []
    return [str(Path(folder)) for _, folder in _modules(directory) if Path(folder) != Path()]


def _modules(directory: Path) -> list[tuple[str, str]]:
    """Return (type, folder) of each module, in order."""
    listed, found = _read(directory / MODULES), []
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise CheckpointError(f"{directory / MODULES} must hold a list of modules.")
    for each in listed:
        kind, folder = each.get("type"), each.get("path")
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise CheckpointError(f"{directory / MODULES}: a module has no type and path.")
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise CheckpointError(f"{directory / MODULES}: {folder} is outside the checkpoint.")
        found.append((kind.rpartition(".")[2], folder))
    return found


def _modes(fields: Fields) -> tuple[str, ...]:
    """Return the pooling modes. Old files have a boolean field per mode; new files name one or several modes."""
    named = fields.values.get("pooling_mode")
    if named is None:
        return tuple(mode for switch, mode in MODES.items() if fields.flag(switch)) or ("mean",)
    known = {switch.removeprefix("pooling_mode_"): mode for switch, mode in MODES.items()}
    known |= {"cls": "cls", "max": "max", "mean": "mean"}
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names or not all(name in known for name in names):
        raise fields.wrong("pooling_mode", f"of {', '.join(known)}")
    return tuple(known[name] for name in names)


def _dense(fields: Fields, folder: str) -> Dense:
    name = str(fields.values.get("activation_function") or "Identity").rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise CheckpointError(f"{fields.path}the activation {name} is not supported.")
    return Dense(
        folder=folder,
        size=fields.integer("out_features"),
        bias=fields.flag("bias", default=True),
        activation=ACTIVATIONS[name],
    )


def _prompts(file: Path) -> tuple[dict[str, str], str | None]:
    fields = _fields(file, optional=True)
    prompts, default = fields.values.get("prompts") or {}, fields.values.get("default_prompt_name")
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not texts or (default is not None and default not in prompts):
        raise CheckpointError(f"{file}: prompts must be texts by name, default_prompt_name one of the names.")
    return prompts, default


def _fields(file: Path, *, optional: bool = False) -> Fields:
    if optional and not file.is_file():
        return Fields({}, f"{file}: ")
    values = _read(file)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} must hold a JSON object.")
    return Fields(values, f"{file}: ")


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
