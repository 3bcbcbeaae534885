"""Download models from object stores and web servers (s3://, gs://, https://, ...). Does not import torch."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

from ops.machine import cache_folder
from runtime.config.pooling import module_folders
from runtime.errors import CheckpointError

# fsspec protocols that read files without running or unpacking anything.
STORES = (
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "adl",
    "hdfs",
    "webhdfs",
    "http",
    "https",
    "file",
    "memory",
)
RECORD = ".penstock-remote.json"
WEIGHTS = (("*.safetensors",), ("*.bin", "*.pt"), ("*.gguf",))  # only the first kind that the folder has is downloaded


def is_url(path: str) -> bool:
    return "://" in path


def download(url: str, download_dir: str | None, descriptions: tuple[str, ...], *, weights: bool = True) -> str:
    """Copy a model from a folder of a store, and return the local folder. Unchanged files are not copied again.

    From subfolders, only configuration files and the weights of sentence-transformers modules are copied. Raises
    CheckpointError if the store is not supported, its library is missing, or it does not respond.
    """
    files, root, listed = _listed(url)
    available = {path[len(root) :].lstrip("/"): info for path, info in listed.items()}
    selected = _selected(available, descriptions, weights)
    if not {"config.json", "adapter_config.json"} & {*selected} and not any(
        each.endswith(".gguf") for each in selected
    ):
        raise CheckpointError(f"{url} contains no model: it has no config.json.")
    base = cache_folder("remote") if download_dir is None else Path(download_dir)
    folder = base / _folder_name(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _copy(files, root, selected, available, folder)
        if weights:
            _copy(files, root, _weights_of_modules(folder, available), available, folder)
        for name in _known(folder).keys() - set(available):
            (folder / name).unlink(missing_ok=True)  # the file was deleted in the store
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{url} cannot be copied to {folder}: {error!r}.") from error
    return str(folder)


def folders_with(url: str, file: str) -> list[str]:
    """Return the names of the subfolders of the store's folder `url` that contain this file.

    Raises CheckpointError if the store cannot be read.
    """
    _, root, listed = _listed(url)
    names = (path[len(root) :].lstrip("/").split("/") for path in listed)
    return [each[0] for each in names if len(each) == 2 and each[1] == file]


def _listed(url: str) -> tuple[Any, str, dict[str, Any]]:
    """Return a store's file system, the URL's path in it, and the files in this folder and its direct subfolders.

    Raises CheckpointError if the store is not supported, its library is missing, or it does not respond.
    """
    store = url.partition("://")[0]
    if store not in STORES:
        raise CheckpointError(f"{url}: {store} is not a supported store. Supported are: {', '.join(STORES)}.")
    try:
        import fsspec

        files, root = fsspec.core.url_to_fs(url)
        return files, root, files.find(root, maxdepth=2, detail=True)
    except ImportError as error:
        raise CheckpointError(f"{url} needs a library. Run pip install 'penstock[remote]' ({error}).") from error
    except Exception as error:  # the stores' libraries raise errors of many types
        raise CheckpointError(f"{url} cannot be read: {error!r}.") from error


def _copy(files: Any, root: str, names: list[str], available: dict[str, Any], folder: Path) -> None:
    """Copy new and changed files, and record the version of each."""
    known = _known(folder)
    for name in names:
        state = _state(available[name])
        if known.get(name) == state and (folder / name).is_file():
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        part = folder / f"{name}.{os.getpid()}.part"
        files.get_file(f"{root.rstrip('/')}/{name}", str(part))
        part.replace(folder / name)
        known[name] = state
        (folder / RECORD).write_text(json.dumps(known), encoding="utf-8")


def _weights_of_modules(folder: Path, available: dict[str, Any]) -> list[str]:
    """Return the names of the weight files in the folders of sentence-transformers' modules."""
    folders, kinds = module_folders(folder), [*WEIGHTS[0], *WEIGHTS[1]]
    inside = [name.rpartition("/") for name in available]
    return ["".join(name) for name in inside if name[0] in folders and any(fnmatch(name[2], each) for each in kinds)]


def _selected(available: dict[str, Any], descriptions: tuple[str, ...], weights: bool) -> list[str]:
    """Return the files to copy: configuration files, also in direct subfolders, and weights of one kind."""

    def matching(patterns: tuple[str, ...], depth: int) -> list[str]:
        names = [name for name in available if name and ".." not in name and name.count("/") <= depth]
        return [name for name in names if any(fnmatch(name.rpartition("/")[2], each) for each in patterns)]

    kinds = (matching(kind, 0) for kind in WEIGHTS)
    kept = next((kind for kind in kinds if kind), []) if weights else []
    return [*matching(descriptions, 1), *(name for name in kept if not name.startswith("consolidated"))]


def _state(info: dict[str, Any]) -> list[str]:
    """Return the metadata that identifies a version of a file."""
    return [str(info.get(key)) for key in ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")]


def _folder_name(url: str) -> str:
    return f"{url.rstrip('/').rpartition('/')[2] or 'model'}-{sha256(url.encode()).hexdigest()[:16]}"


def _known(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
