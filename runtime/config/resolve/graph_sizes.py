"""Sizes of captured steps, and the choice of a size for a step. Needs no torch and no GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

GIB = 1 << 30
STEP_BEYOND = 16  # distance between sizes above the largest default size
SMALL_GPU_BYTES, SMALL_GPU_LARGEST = 35 * GIB, 8
# (GPU memory, further sizes that a GPU with more than this memory captures)
BY_MEMORY = (
    (0, (1, 2, 4, 8, *range(16, 161, 8))),
    (90 * GIB, range(168, 257, 8)),
    (160 * GIB, range(272, 513, 16)),
)
# Default numbers of tokens of steps with prompts. From 64 tokens on, padding adds at most a quarter.
PROMPT_TOKENS = (
    *(8, 16, 32, 48, *range(64, 128, 16), *range(128, 256, 32)),
    *(*range(256, 1025, 64), *range(1280, 2049, 256)),
)
# Assumed (not measured) values for a step without graphs: the time to launch one layer, and the share of the GPU's peak
# performance that matrix products of a few hundred rows reach.
LAYER_LAUNCH_S = 250e-6
PEAK_SHARE = 0.5
# (compute capability, bfloat16 operations per second without sparsity), of a common GPU of this generation
PEAKS = (((10, 0), 2.25e15), ((9, 0), 9.89e14), ((8, 9), 2.4e14), ((8, 6), 1.4e14), ((8, 0), 3.12e14), ((0, 0), 6.5e13))
EXACT = (*range(1, 33), *range(48, 161, 16))  # default sizes if padding is off


@dataclass(frozen=True, slots=True)
class Buckets:
    """The captured sizes, ascending: numbers of rows of decode steps, or numbers of tokens of steps with prompts."""

    sizes: tuple[int, ...]
    padding: bool = True  # pad a batch to the next size

    def take(self, batch_size: int) -> int | None:
        """Return the graph size for a batch, or None if the batch runs eagerly."""
        index = bisect_left(self.sizes, batch_size)
        if batch_size < 1 or index == len(self.sizes):
            return None
        size = self.sizes[index]
        return size if self.padding or size == batch_size else None


def buckets(
    memory_bytes: int,
    max_running: int,
    *,
    sizes: Sequence[int] | None = None,
    largest: int | None = None,
    padding: bool = True,
) -> Buckets:
    """Return the sizes to capture on a GPU with this memory, for at most `max_running` rows.

    `sizes` (--cuda-graph-bs) replaces the default sizes. Otherwise the default sizes up to `largest`
    (--cuda-graph-max-bs) are used, and above the largest default size, sizes in steps of 16. Sizes larger than
    `max_running` are replaced by `max_running`.
    """
    if sizes is None:
        wanted = _default_sizes(memory_bytes, padding)
        if largest is None and memory_bytes < SMALL_GPU_BYTES:
            largest = SMALL_GPU_LARGEST
        if largest is not None:
            wanted = _up_to(wanted, largest)
    else:
        wanted = set(sizes)
    possible = {size for size in wanted if 1 <= size <= max_running}
    if len(possible) < len(wanted):
        possible.add(max_running)
    return Buckets(tuple(sorted(possible)), padding)


def launch_bound_tokens(capability: tuple[int, int], num_layers: int, num_weights: float) -> int:
    """Estimate the number of tokens up to which launching a step takes longer than computing it.

    `num_weights` is the number of weights that each token is multiplied with.
    """
    peak = next(peak for least, peak in PEAKS if capability >= least)
    return int(num_layers * LAYER_LAUNCH_S * peak * PEAK_SHARE / (2 * num_weights))


def prompt_sizes(largest: int) -> tuple[int, ...]:
    """Return the default numbers of tokens up to `largest`, and `largest` itself."""
    top = PROMPT_TOKENS[-1]
    further = range(top + 256, largest, 256)
    return tuple(sorted({size for size in (*PROMPT_TOKENS, *further) if size < largest} | {largest}))


def _default_sizes(memory_bytes: int, padding: bool) -> set[int]:
    if not padding:
        return set(EXACT)
    return {size for above, sizes in BY_MEMORY if memory_bytes > above for size in sizes}


def _up_to(sizes: set[int], largest: int) -> set[int]:
    top = max(sizes)
    beyond = range(top + STEP_BEYOND, largest, STEP_BEYOND)
    return {size for size in sizes | set(beyond) if size <= largest} | {largest}
