"""Checks of compiled Triton kernels. Each returns the faults of the machine code, so that a test can check it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from compiled_kernels import SHARED_BYTES, buffers, inspect, machine_code, machine_text

MULTIPROCESSORS = 132  # of an H100
REGISTERS = 2**16  # of a multiprocessor


class Wanted(NamedTuple):
    """Properties of a kernel's code on a Hopper GPU."""

    buffers: Mapping[
        str, int
    ] = {}  # shape of a tile -> minimum number of its buffers, so that loads and products overlap
    blocks: int = 1  # minimum number of thread blocks that fit into a multiprocessor
    wide_copies: bool = False  # whether copies to shared memory have 128 bits
    units: str = ""  # matrix instruction that the code must use: "HGMMA" or "QGMMA"
    no_conversions: bool = False  # no conversions from integers: they run at a sixteenth of the speed
    spilled_bytes: int = 0
    elements: int = 0  # elements that a thread processes per iteration of its longest loop; 0: not checked
    per_element: float = 0.0  # largest number of instructions per element


DECODE = Wanted({"64x128xbf16": 2}, blocks=3, wide_copies=True)  # heads of 128 dimensions
# Products of few rows with 4-bit integers. A thread converts 64 weights per iteration, as in `WORDS`.
FOUR_BITS = Wanted({"32x128xi8": 2}, blocks=3, wide_copies=True, no_conversions=True, elements=64, per_element=9.0)
# Products of few rows with e2m1 weights, in words of eight codes.
WORDS = Wanted(
    {"64x16xi32": 2},
    blocks=5,
    wide_copies=True,
    units="HGMMA",
    no_conversions=True,
    elements=64,
    per_element=4.9,
)


def faults(kernel: Any, wanted: Wanted, folder: Path) -> list[str]:
    """Return the wanted properties that the kernel's code does not have."""
    code, found, missing = machine_code(kernel, folder), inspect(kernel, folder), []
    threads = 32 * kernel.metadata.num_warps
    for shape, count in wanted.buffers.items():
        if (there := buffers(kernel, shape)) < count:
            missing.append(f"buffers: {there} of {shape}, not {count}")
    if wanted.blocks * threads * found.registers > REGISTERS:
        missing.append(f"registers: {found.registers} per thread allow fewer than {wanted.blocks} blocks")
    if wanted.blocks * found.shared_bytes > SHARED_BYTES[90]:
        missing.append(f"shared memory: {found.shared_bytes} bytes allow fewer than {wanted.blocks} blocks")
    if found.spilled_bytes > wanted.spilled_bytes:
        missing.append(f"spills: {found.spilled_bytes} bytes per thread")
    if wanted.wide_copies and not any("LDGSTS" in line and "128" in line for line in code):
        missing.append("copies: none has 128 bits")
    if wanted.units and not any(line.lstrip().startswith(wanted.units) for line in code):
        missing.append(f"units: no {wanted.units}")
    if wanted.no_conversions and any("I2F" in line for line in code):
        missing.append("conversions: from integers")
    if wanted.elements and longest_loop(kernel, folder) > wanted.elements * wanted.per_element:
        missing.append(f"instructions: {longest_loop(kernel, folder) / wanted.elements:.1f} per element")
    return missing


def too_few_programs(grid: tuple[int, ...]) -> list[str]:
    """Return a fault if a launch leaves more than a quarter of an H100's multiprocessors idle."""
    programs = 1
    for size in grid:
        programs *= size
    return [f"programs: {programs}"] if programs < 3 * MULTIPROCESSORS // 4 else []


def longest_loop(kernel: Any, folder: Path) -> int:
    """Return the number of instructions of the longest loop: from the target of a backward branch to the branch."""
    labels: dict[str, int] = {}
    count = longest = 0
    for line in machine_text(kernel, folder).splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            target = re.search(r"BRA\S* .*?(\.L_x_\d+)", instruction[1])
            if target and target[1] in labels:
                longest = max(longest, count - labels[target[1]])
    return longest
