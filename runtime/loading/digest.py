"""The digest of a checkpoint: equal for checkpoints with the same bytes, on every machine."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

from runtime.config.plan import ModelPlan
from runtime.loading.adapter_config import CONFIG

BLOCK_BYTES = 2**22
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".gguf", ".npz", ".pth")
ADAPTER_ENDINGS = (".safetensors", ".bin")
OTHER_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "quantization_config.json")


def model_digest(plan: ModelPlan, path: Path, known: Path) -> str:
    """Return the digest of the weights and settings that determine a model's keys and values.

    `path` is the checkpoint's folder or file. `known` is a cache file of digests, by path, size and modification
    time. Checkpoint files without an entry are read completely, which blocks, and their digests are added to the cache
    file. Raises OSError if a file cannot be read.
    """
    digest = blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if _counts(each))
    before = _read(known)
    after = dict(before)
    for file in files:
        status = file.stat()
        name = f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}"
        if name not in after:
            after[name] = _file_digest(file)
        digest.update(f"{file.name}:{after[name]}\n".encode())
    if after != before:
        _write(known, after)
    settings = (
        plan.load_format,
        plan.random_seed if plan.load_format == "dummy" else None,
        secrets.token_hex() if plan.load_format == "remote_instance" else None,  # random: no file has the weights
        plan.dtype,
        plan.quantization,
        plan.kv_scales,
        plan.by_transformers,
        plan.any_dtype,
        tuple(plan.custom_loaders),
    )
    digest.update(repr(settings).encode())
    digest.update(json.dumps(dict(plan.config_overrides), sort_keys=True, default=str).encode())
    return digest.hexdigest()


def adapter_digest(folder: Path) -> str:
    """Return the digest of an adapter's weights and settings. Blocks while it reads all of these files.

    Raises OSError if a file cannot be read.
    """
    digest = blake2b(digest_size=16)
    for file in _adapter_files(folder):
        digest.update(f"{file.name}:{_file_digest(file)}\n".encode())
    return digest.hexdigest()


def adapter_stamps(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return values that change if a file of an adapter is replaced. Raises OSError if a file cannot be read."""
    status = [(file.name, file.stat()) for file in _adapter_files(folder)]
    return [(name, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in status]


def _adapter_files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.name == CONFIG or each.suffix in ADAPTER_ENDINGS)


def _counts(file: Path) -> bool:
    return file.is_file() and (file.name in OTHER_FILES or file.name.endswith(WEIGHT_ENDINGS))


def _file_digest(path: Path) -> str:
    digest = sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return {str(name): str(value) for name, value in values.items()}
    return {}


def _write(path: Path, values: dict[str, str]) -> None:
    with suppress(OSError):  # without the cache file, the next start only takes longer
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.rename(path)
