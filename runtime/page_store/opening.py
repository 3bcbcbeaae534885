"""Opens the page store of a storage backend."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from inspect import iscoroutinefunction, signature
from typing import Any

from runtime.errors import ConfigurationError
from runtime.page_store.files import FileStore
from runtime.page_store.offered_pages import LocalPages, OfferedPages
from runtime.page_store.peer_pages import PeerPages
from runtime.page_store.protocol import PageStore, StoreSpace

# Name of each method of `PageStore` and `ReadsMany` -> its positional parameters.
METHODS = {
    "exists": ("keys",),
    "get": ("key", "parts"),
    "set": ("key", "parts"),
    "delete": ("keys",),
    "clear": (),
    "close": (),
    "get_many": ("keys", "pages"),
}
OPTIONAL = ("get_many",)


def open_store(backend: str, space: StoreSpace, config: dict[str, Any], local: LocalPages | None = None) -> PageStore:
    """Open the page store of this backend. Raises `ConfigurationError` if it cannot be used.

    `local` are the pages that prefill replicas of the engine offer in this process.
    """
    if backend == "file":
        return FileStore(space, config)
    if backend == "prefill":
        return OfferedPages(space, config, local)
    if backend == "decode":
        return PeerPages(space, config, local)
    try:
        make = getattr(import_module(config["module_path"]), config["class_name"])
        store = make(space, config)
    except Exception as error:  # an error of the user's own class
        raise ConfigurationError(f"--hicache-storage-backend dynamic: {type(error).__name__}: {error}.") from error
    _check_methods(store)
    return store


def _check_methods(store: Any) -> None:
    """Raise `ConfigurationError` unless Penstock can call the methods of a user's store."""
    for name, parameters in METHODS.items():
        method = getattr(store, name, None)
        if method is None and name in OPTIONAL:
            continue
        call = f"{type(store).__name__}.{name}({', '.join(parameters)})"
        if not callable(method):
            raise ConfigurationError(f"--hicache-storage-backend dynamic: the method {call} is missing.")
        if iscoroutinefunction(method):
            raise ConfigurationError(f"--hicache-storage-backend dynamic: {call} must not be a coroutine function.")
        with suppress(ValueError):  # raised if the method has no signature, for example one written in C
            try:
                signature(method).bind(*parameters)
            except TypeError as error:
                raise ConfigurationError(
                    f"--hicache-storage-backend dynamic: {call} cannot be called: {error}."
                ) from error
