"""Models in object stores and on web servers (s3://, gs://, https://, ...), copied to a local folder. Torch-free."""

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

# Of fsspec's, those that name files and nothing that would be run or unpacked.
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
WEIGHTS = (("*.safetensors",), ("*.bin", "*.pt"), ("*.gguf",))  # the first kind that is there


def is_url(path: str) -> bool:
    return "://" in path


def download(
    url: str, download_dir: str | None, descriptions: tuple[str, ...], *, weights: bool = True
) -> str:
    """The local folder with a copy of the model in this folder of a store; what is there already is not read again.

    Folders below it are not copied, but for descriptions and the weights of sentence-transformers' modules. Raises
    CheckpointError for a store that is not known, whose library is missing, or that does not answer.
    """
    store = url.partition("://")[0]
    if store not in STORES:
        raise CheckpointError(f"{url}: {store} is no store that models are read from ({', '.join(STORES)}).")
    try:
        import fsspec

        files, root = fsspec.core.url_to_fs(url)
        listed = files.find(root, maxdepth=2, detail=True)
    except ImportError as error:
        raise CheckpointError(f"{url} needs a library: pip install 'penstock[remote]' ({error}).") from error
    except Exception as error:  # whatever the store's library says
        raise CheckpointError(f"{url} cannot be read: {error!r}.") from error
    found = {path[len(root) :].lstrip("/"): info for path, info in listed.items()}
    wanted = _wanted(found, descriptions, weights)
    if "config.json" not in wanted and not any(name.endswith(".gguf") for name in wanted):
        raise CheckpointError(f"{url} holds no model: it has no config.json.")
    base = cache_folder("remote") if download_dir is None else Path(download_dir)
    folder = base / _folder_name(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _copy(files, root, wanted, found, folder)
        if weights:
            _copy(files, root, _weights_of_modules(folder, found), found, folder)
        for name in _known(folder).keys() - set(found):
            (folder / name).unlink(missing_ok=True)  # not there any more
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{url} cannot be copied to {folder}: {error!r}.") from error
    return str(folder)


def _copy(files: Any, root: str, names: list[str], found: dict[str, Any], folder: Path) -> None:
    """Copy what is not there yet, and note of each file which one it was."""
    known = _known(folder)
    for name in names:
        state = _state(found[name])
        if known.get(name) == state and (folder / name).is_file():
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        part = folder / f"{name}.{os.getpid()}.part"
        files.get_file(f"{root.rstrip('/')}/{name}", str(part))
        part.replace(folder / name)
        known[name] = state
        (folder / RECORD).write_text(json.dumps(known), encoding="utf-8")


def _weights_of_modules(folder: Path, found: dict[str, Any]) -> list[str]:
    """The weights in the folders of sentence-transformers' modules, of a copied model."""
    folders, kinds = module_folders(folder), [*WEIGHTS[0], *WEIGHTS[1]]
    inside = [name.rpartition("/") for name in found]
    return [
        "".join(name)
        for name in inside
        if name[0] in folders and any(fnmatch(name[2], each) for each in kinds)
    ]


def _wanted(found: dict[str, Any], descriptions: tuple[str, ...], weights: bool) -> list[str]:
    """Names below the folder: descriptions, one level deep, and weights of one kind."""

    def matching(patterns: tuple[str, ...], depth: int) -> list[str]:
        names = [name for name in found if name and ".." not in name and name.count("/") <= depth]
        return [name for name in names if any(fnmatch(name.rpartition("/")[2], each) for each in patterns)]

    kinds = (matching(kind, 0) for kind in WEIGHTS)
    kept = next((kind for kind in kinds if kind), []) if weights else []
    return [*matching(descriptions, 1), *(name for name in kept if not name.startswith("consolidated"))]


def _state(info: dict[str, Any]) -> list[str]:
    """What changes when a file does, as far as its store says it."""
    return [
        str(info.get(key)) for key in ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
    ]


def _folder_name(url: str) -> str:
    return f"{url.rstrip('/').rpartition('/')[2] or 'model'}-{sha256(url.encode()).hexdigest()[:16]}"


def _known(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
