"""C++ kernels that are compiled before or during installation: one library for each kind of processor.

`just wheel` compiles all these libraries into a wheel; `pip install .` compiles only the one for this machine. With a
library for its processor, a machine needs no compiler, and its first start is as fast as later ones. File names contain
a hash of the sources, so that a library of other sources is never loaded.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ops.cpp.build import COMMON_FLAGS, SOURCES, Lifeline, is_whole, make, source_files
from ops.machine import PREBUILT, Machine

RUNTIME_FLAGS = ("-static-libstdc++", "-static-libgcc")  # a machine without a compiler may have an older libstdc++


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of processor for which a library is compiled."""

    name: str
    machine: str  # as in `Machine.processor`
    needs: frozenset[str]  # CPU flags that the library requires, as in `Machine.cpu_flags`
    flags: tuple[str, ...]  # compiler flags of GCC and Clang

    def file_name(self, sources: Path = SOURCES) -> str:
        """Return the name of the library's file. It contains a hash of the sources."""
        digest = hashlib.sha256()
        for source in source_files(sources):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return f"{self.machine}-{self.name}-{digest.hexdigest()[:16]}.so"


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_AMX = _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_NEON = frozenset({"asimd", "asimdrdm", "atomics", "crc32"})  # Armv8.2: Graviton 2, Ampere Altra and newer
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
TARGETS = (  # for each machine, the fastest target first
    Target("amx", "x86_64", _AMX, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    Target("avx512-bf16", "x86_64", _AVX512_BF16, _BF16_FLAGS),
    Target("avx512", "x86_64", _AVX512, ("-march=x86-64-v4",)),
    Target("avx2", "x86_64", _AVX2, ("-march=x86-64-v3",)),
    Target("neon", "aarch64", _NEON, ("-march=armv8.2-a",)),
)


def best_target(machine: str, cpu_flags: Collection[str]) -> Target | None:
    """Return the best target that a processor supports, or None."""
    return next(_supported(machine, cpu_flags), None)


def find(machine: str, cpu_flags: Collection[str], folder: Path = PREBUILT) -> Path | None:
    """Return the path of the best library in the folder that a processor supports, or None."""
    if not folder.is_dir():
        return None
    paths = (folder / target.file_name() for target in _supported(machine, cpu_flags))
    return next(filter(is_whole, paths), None)


def _supported(machine: str, cpu_flags: Collection[str]) -> Iterator[Target]:
    """Yield the targets that a processor supports, the best first."""
    flags = set(cpu_flags)
    return (target for target in TARGETS if target.machine == machine and target.needs <= flags)


CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-g++"}  # by architecture; in Debian's package g++-aarch64-linux-gnu


def targets_of(choice: str, machine: Machine) -> tuple[list[Target], str | None]:
    """Return the targets of a wheel, and the path of the compiler for them (None if there is no compiler).

    `choice` is "this" (this processor), "all" (all targets of this architecture), "none", or an architecture such as
    "aarch64". Targets of another architecture need a cross compiler. Raises ValueError for an unknown choice, and if
    the cross compiler is missing.
    """
    kinds = {target.machine for target in TARGETS}
    if choice == "none":
        return [], None
    if choice == "this":
        best = best_target(machine.processor, machine.cpu_flags)
        return [best] if best else [], machine.compiler
    if choice != "all" and choice not in kinds:
        allowed = ", ".join(f"'{each}'" for each in ("this", "all", "none", *sorted(kinds)))
        raise ValueError(f"PENSTOCK_KERNELS is '{choice}', but must be one of {allowed}.")
    kind = machine.processor if choice == "all" else choice
    targets = [target for target in TARGETS if target.machine == kind]
    if kind == machine.processor:
        return targets, machine.compiler
    compiler = CROSS_COMPILERS.get(kind)
    if compiler is None or shutil.which(compiler) is None:
        advice = f"install the package g++-{kind}-linux-gnu of Debian" if compiler else f"build the wheel on {kind}"
        raise ValueError(
            f"PENSTOCK_KERNELS={choice} needs a C++ compiler for {kind} on this {machine.processor}: {advice}."
        )
    return targets, compiler


def compile_target(target: Target, compiler: str, folder: Path) -> Path:
    """Compile the library for a target into the folder, and return its path. Raises `BuildError` if this fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with Lifeline() as lifeline:
        flags = (*COMMON_FLAGS, *RUNTIME_FLAGS, *target.flags)
        return make(folder, target.file_name, compiler, flags, lifeline)
