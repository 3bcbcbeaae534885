"""Allocates memory in the background, before steps write to it."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from itertools import count

from torch import Tensor

CHUNK_BYTES = 1 << 21
POPULATE = 23  # MADV_POPULATE_WRITE of Linux 5.14: allocate these pages without changing their content


def allocate_early(tensors: Iterable[Tensor], first: int) -> threading.Thread:
    """Start a thread that allocates the memory of each tensor's rows from `first` on. Return the thread.

    Otherwise, a step that is the first to write to a page of memory waits until the system has allocated the page.
    The first rows of all tensors come first. The thread uses at most half of a core. It ends when all memory
    is allocated or a tensor is freed. With Linux before 5.14 it ends at once.
    """
    starts = [(weakref.ref(tensor), tensor[:first].nbytes) for tensor in tensors]
    thread = threading.Thread(target=_allocate, args=(starts,), daemon=True, name="penstock-memory")
    thread.start()
    return thread


def _allocate(starts: Sequence[tuple[weakref.ref[Tensor], int]]) -> None:
    """Allocate the bytes of each tensor from an offset on. In turn, each tensor gets one chunk of memory."""
    library = ctypes.CDLL(None)  # its calls release the GIL
    for done in count(step=CHUNK_BYTES):
        has_more = False
        for reference, start in starts:
            began = time.monotonic()
            tensor = reference()
            if tensor is None:
                return
            size = min(CHUNK_BYTES, tensor.nbytes - start - done)
            if size > 0:
                has_more = True
                address = tensor.data_ptr() + start + done
                begin = address // mmap.PAGESIZE * mmap.PAGESIZE
                if library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + size - begin), POPULATE):
                    return
            del tensor  # so that it can be freed during the pause
            time.sleep(time.monotonic() - began)
        if not has_more:
            return
