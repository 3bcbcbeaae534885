"""Opens the page store of a storage backend."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from runtime.errors import ConfigurationError
from runtime.page_store.files import FileStore
from runtime.page_store.peers import OfferedPages, PeerPages
from runtime.page_store.protocol import PageStore, StoreSpace


def open_store(backend: str, space: StoreSpace, config: dict[str, Any]) -> PageStore:
    """Open the page store of this backend. Raises `ConfigurationError` if it cannot be used."""
    if backend == "file":
        return FileStore(space, config)
    if backend == "prefill":
        return OfferedPages(space, config)
    if backend == "decode":
        return PeerPages(space, config)
    try:
        make = getattr(import_module(config["module_path"]), config["class_name"])
        return make(space, config)
    except Exception as error:  # an error of the user's own class
        raise ConfigurationError(f"--hicache-storage-backend dynamic: {type(error).__name__}: {error}.") from error
