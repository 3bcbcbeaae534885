"""The protocol of a page store, and the checks around every store.

A store maps the key of a page (32 bytes) to its bytes. It holds the pages of one rank of one model; servers with equal
models and layouts may share it. A store may forget any page at any time, and may be wrong: `CheckedStore` adds a
checksum to each page and treats a page that does not match it as missing.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from runtime.errors import ConfigurationError

CHECKSUM_BYTES = 32


class StoreSpace(NamedTuple):
    """The pages of one rank of a model. Pages of different spaces are never mixed."""

    name: str  # hexadecimal digest of model and layout; part of file names
    rank: int
    num_ranks: int
    page_bytes: int  # bytes of each page on this rank, with the checksum


class PageStore(Protocol):
    """Keeps pages by key. Implement it for a store of your own (`--hicache-storage-backend dynamic`).

    The constructor gets a `StoreSpace` and the mapping of `--hicache-storage-backend-extra-config`. Methods block, are
    called from several threads, and may raise any exception, which counts as a miss.
    """

    def exists(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys have a page."""
        ...

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Read a page into these buffers, one after the other. Return False if there is no such page."""
        ...

    def set(self, key: bytes, parts: Sequence[memoryview | bytes]) -> None:
        """Keep a page, whose bytes are these parts one after the other. A reader never sees a part of it."""
        ...

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove these pages. Unknown keys are ignored."""
        ...

    def clear(self) -> None:
        """Remove all pages of this space."""
        ...

    def close(self) -> None:
        """Release what the store holds. No other method is running or follows."""
        ...


class CheckedStore:
    """Adds a checksum of key and bytes to each page, and verifies it at each read."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.num_corrupt = 0  # pages whose checksum was wrong
        self.closing = False  # whether calls in progress should end soon

    def get(self, key: bytes, page: memoryview) -> bool:
        """Read a page into the buffer and verify it. Return False if it is missing or wrong."""
        checksum = bytearray(CHECKSUM_BYTES)
        if not self.store.get(key, [page, memoryview(checksum)]):
            return False
        if _checksum(key, page) == checksum:
            return True
        self.num_corrupt += 1
        self.store.delete([key])
        return False

    def set(self, key: bytes, page: memoryview) -> None:
        """Keep a page with its checksum, unless the store has it."""
        if not self.store.exists([key]):
            self.store.set(key, [page, _checksum(key, page)])


def _checksum(key: bytes, page: memoryview) -> bytes:
    digest = sha256(key)
    digest.update(page)
    return digest.digest()


def check_config(backend: str, config: dict[str, Any]) -> None:
    """Raise `ConfigurationError` unless the settings fit the backend."""
    if backend in ("prefill", "decode"):  # their settings come from the plan
        return
    option = "--hicache-storage-backend-extra-config"
    texts, numbers = ("path", "module_path", "class_name"), ("max_gb", "threads", "prefetch_threshold")
    for name, value in config.items():
        if name in texts and not (isinstance(value, str) and value and "\0" not in value):
            raise ConfigurationError(f"{option}: {name} must be a text.")
        if name in numbers and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ConfigurationError(f"{option}: {name} must be a positive number.")
    if backend == "dynamic":
        for name in ("module_path", "class_name"):
            if name not in config:
                raise ConfigurationError(f"--hicache-storage-backend dynamic needs {name} in {option}.")
        return
    if unknown := sorted(config.keys() - {"path", *numbers}):
        known = ", ".join(("path", *numbers))
        raise ConfigurationError(f"{option}: {', '.join(unknown)} is unknown; the settings of {backend} are {known}.")
