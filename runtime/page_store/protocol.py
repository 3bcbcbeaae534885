"""The protocol of page stores, and a wrapper that verifies checksums.

A store maps the key of a page (32 bytes) to the page's bytes. It holds the pages of one rank of one model. Servers with
the same model and page layout may share it. A store may lose any page at any time, and may return wrong data:
`CheckedStore` adds a checksum to each page, and treats a page with a wrong checksum as missing.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol, runtime_checkable
from zlib import crc32

from runtime.errors import ConfigurationError

CHECKSUM_BYTES = 32


class StoreSpace(NamedTuple):
    """Identifies the pages of one rank of a model. Pages of different spaces are never mixed."""

    name: str  # hexadecimal digest of model and page layout, used in file names
    rank: int  # index among the ranks that share the cache of a sequence
    num_ranks: int
    page_bytes: int  # bytes of a page on this rank, including the checksum
    # Attention group of the rank (--enable-dp-attention), or the rank's number if all ranks have the same pages. All
    # groups may share a store.
    group: int = 0
    num_groups: int = 1


class PageStore(Protocol):
    """Stores pages by key. Implement this protocol for your own store (`--hicache-storage-backend dynamic`).

    The constructor gets a `StoreSpace` and the mapping of `--hicache-storage-backend-extra-config`. Methods are called
    from several threads, and may block. They may raise any exception; the page then counts as missing, and the first
    exception is logged.
    """

    def exists(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys have a page."""
        ...

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Read a page into its consecutive buffers. Return False if the store does not have the page."""
        ...

    def set(self, key: bytes, parts: Sequence[memoryview | bytes]) -> None:
        """Store a page, whose bytes are the concatenated parts. Readers must never see an incomplete page."""
        ...

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove these pages. Unknown keys are ignored."""
        ...

    def clear(self) -> None:
        """Remove all pages of this space."""
        ...

    def close(self) -> None:
        """Release the store's resources. Called last, when no other method runs."""
        ...


@runtime_checkable
class ReadsMany(Protocol):
    """A store that can read several pages in one request, which saves round trips to another machine.

    `get` is then not called.
    """

    def get_many(self, keys: Sequence[bytes], pages: Sequence[Sequence[memoryview]]) -> int:
        """Read pages; `pages` has the buffers of each page. Return the number of leading pages that were read."""
        ...


class CheckedStore:
    """Wraps a store. Adds a checksum of key and bytes to each page, and verifies the checksum at each read."""

    def __init__(self, store: PageStore, *, quick: bool = False) -> None:
        """With `quick`, checksums are CRC-32, which detect transfer errors in half the time of SHA-256."""
        self.store = store
        self._checksum = _quick_checksum if quick else _checksum
        self.num_corrupt = 0  # number of pages whose checksum was wrong
        self.closing = False  # whether calls in progress should end soon

    def get(self, key: bytes, page: memoryview) -> bool:
        """Read a page into the buffer and verify it. Return False if it is missing or its checksum is wrong."""
        checksum = bytearray(CHECKSUM_BYTES)
        if not self.store.get(key, [page, memoryview(checksum)]):
            return False
        if self._checksum(key, page) == checksum:
            return True
        self.num_corrupt += 1
        self.store.delete([key])
        return False

    def get_many(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        """Read pages into their buffers. Return the number of leading pages that were found and intact."""
        if not isinstance(self.store, ReadsMany):
            for number, (key, page) in enumerate(zip(keys, pages, strict=True)):
                if self.closing or not self.get(key, page):
                    return number
            return len(keys)
        checksums = [bytearray(CHECKSUM_BYTES) for _ in keys]
        parts = [[page, memoryview(checksum)] for page, checksum in zip(pages, checksums, strict=True)]
        count: Any = self.store.get_many(keys, parts)
        if type(count) is not int or not 0 <= count <= len(keys):
            raise TypeError(f"get_many must return the number of leading pages that it read, not {count!r:.80}.")
        for number, (key, page, checksum) in enumerate(zip(keys[:count], pages, checksums)):
            if self._checksum(key, page) != checksum:
                self.num_corrupt += 1
                self.store.delete([key])
                return number
        return count

    def set(self, key: bytes, page: memoryview) -> None:
        """Store a page with its checksum, unless the store already has it."""
        if not self.store.exists([key]):
            self.store.set(key, [page, self._checksum(key, page)])


def _checksum(key: bytes, page: memoryview) -> bytes:
    digest = sha256(key)
    digest.update(page)
    return digest.digest()


def _quick_checksum(key: bytes, page: memoryview) -> bytes:
    return crc32(page, crc32(key)).to_bytes(CHECKSUM_BYTES, "little")


def check_config(backend: str, config: dict[str, Any]) -> None:
    """Raise `ConfigurationError` if the settings do not fit the backend."""
    if backend in ("prefill", "decode"):  # the plan sets the settings of these backends
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
