"""Description of this machine: processor, memory, GPUs and packages. It does not import torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Self

GIB = 1 << 30
PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "xgrammar",
    "outlines-core",
    "llguidance",
    "torchao",
)

PREBUILT = Path(__file__).parent / "cpp" / "prebuilt"  # compiled C++ kernels (`ops.cpp.prebuilt`)

NUMA_NODES = "/sys/devices/system/node"

# Attributes of the CUDA driver's cuDeviceGetAttribute.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU that is visible to this process."""

    name: str
    capability: tuple[int, int]  # compute capability, (9, 0) for Hopper
    memory_bytes: int  # total memory of the GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine. `Machine.probe()` describes this machine; tests and `explain` construct others."""

    system: str = "Linux"
    processor: str = "x86_64"
    num_cpus: int = 1  # CPUs that this process may use
    cpu_flags: frozenset[str] = frozenset()  # for example "avx512f", "amx_bf16"
    total_bytes: int = 0  # main memory, or the container's memory limit if that is smaller
    available_bytes: int = 0  # main memory that is available now
    numa_nodes: frozenset[int] = frozenset()  # NUMA nodes; empty if unknown, as on systems other than Linux
    gpus: tuple[Gpu, ...] = ()
    torch_cuda: str | None = None  # the CUDA version that the installed torch is built for
    packages: Mapping[str, str] = field(default_factory=dict)  # name -> version, for `PACKAGES`
    compiler: str | None = None  # path of a C++ compiler
    cuda_compiler: str | None = None  # path of CUDA's compiler nvcc
    prebuilt: bool = False  # whether the installed package contains compiled C++ kernels

    @property
    def has_cpp(self) -> bool:
        """Whether C++ kernels are available: compiled ones in the package, or a compiler."""
        return self.prebuilt or self.compiler is not None

    @classmethod
    def probe(cls) -> Self:
        """Return the description of this machine, within milliseconds. Unknown properties have default values."""
        total_bytes, available_bytes = _memory()
        return cls(
            system=platform.system(),
            processor=platform.machine(),
            num_cpus=_num_cpus(),
            cpu_flags=_cpu_flags(),
            total_bytes=total_bytes,
            available_bytes=available_bytes,
            numa_nodes=_numbers_in(_read(f"{NUMA_NODES}/online")),
            gpus=_gpus(),
            torch_cuda=_torch_cuda(),
            packages=_packages(),
            compiler=next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None),
            cuda_compiler=_cuda_compiler(),
            prebuilt=any(PREBUILT.glob("*.so")),
        )

    @classmethod
    def named(cls, name: str) -> Self:
        """Return a typical server with this GPU of `KNOWN_GPUS`, or without a GPU if the name is "cpu".

        Raises `KeyError` for other names.
        """
        return cls(
            num_cpus=16,
            cpu_flags=SERVER_CPU_FLAGS,
            total_bytes=128 * GIB,
            available_bytes=120 * GIB,
            numa_nodes=frozenset((0, 1)),
            gpus=(KNOWN_GPUS[name],) if name != "cpu" else (),
            torch_cuda="13.0" if name != "cpu" else None,
            cuda_compiler="/usr/local/cuda/bin/nvcc" if name != "cpu" else None,
            packages=EXTRAS if name == "cpu" else EXTRAS | CUDA_PACKAGES,
        )


# Packages of the typical servers that `Machine.named` returns: `CUDA_PACKAGES` are installed by the extra `cuda`,
# `EXTRAS` by other extras.
EXTRAS = {"xgrammar": "0.2.8", "outlines-core": "0.2.14"}
CUDA_PACKAGES = {"triton": "3.6.0", "flashinfer-python": "0.6.13"}

# Flags that all recent x86 server processors have.
SERVER_CPU_FLAGS = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})

KNOWN_GPUS: Mapping[str, Gpu] = {
    "t4": Gpu(name="Tesla T4", capability=(7, 5), memory_bytes=15 * GIB),
    "l4": Gpu(name="NVIDIA L4", capability=(8, 9), memory_bytes=22 * GIB),
    "a100": Gpu(name="NVIDIA A100 80GB", capability=(8, 0), memory_bytes=79 * GIB),
    "h100": Gpu(name="NVIDIA H100", capability=(9, 0), memory_bytes=79 * GIB),
    "h200": Gpu(name="NVIDIA H200", capability=(9, 0), memory_bytes=139 * GIB),
    "b200": Gpu(name="NVIDIA B200", capability=(10, 0), memory_bytes=178 * GIB),
}


def cache_folder(name: str) -> Path:
    """Return the folder of one of this user's caches, which may not exist yet.

    It is `$XDG_CACHE_HOME/penstock/NAME`, by default under `~/.cache`. Raises RuntimeError if the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / name


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def node_cpus(node: int) -> frozenset[int]:
    """Return the CPUs of a NUMA node. The set is empty if there is no such node."""
    return _numbers_in(_read(f"{NUMA_NODES}/node{node}/cpulist"))


def _numbers_in(text: str) -> frozenset[int]:
    """Return the numbers of a list such as "0-3,8", as Linux writes lists of CPUs and nodes."""
    ends = [[int(end) for end in part.split("-")] for part in text.strip().split(",") if part]
    return frozenset(number for part in ends for number in range(part[0], part[-1] + 1))


def _cpu_flags() -> frozenset[str]:
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _memory() -> tuple[int, int]:
    """Return (total, available) bytes of main memory, within the container's limit."""
    lines = re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    kilobytes = dict(lines)
    address_space = _address_space()
    total = int(kilobytes.get("MemTotal", 0)) * 1024 or _physical_bytes()
    available = int(kilobytes.get("MemAvailable", 0)) * 1024 or total
    limit, used = _container_memory()
    if limit is not None and limit < total:
        total, available = limit, max(0, min(available, limit - used))
    return total, min(available, address_space)


def _address_space() -> int:
    """Return the number of bytes that this process may still map (`ulimit -v`)."""
    try:
        import resource
    except ImportError:  # the module does not exist on Windows
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    pages = _read("/proc/self/statm").split()
    return max(0, limit - int(pages[0]) * os.sysconf("SC_PAGE_SIZE")) if pages else limit


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _container_memory() -> tuple[int | None, int]:
    """Return the memory (limit, used) of the control group in bytes, or (None, 0) if it has no limit.

    Reclaimable file pages do not count as used.
    """
    for folder, limit_file, used_file, reclaimable in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read(f"{folder}/{limit_file}").strip()
        if limit.isdigit():
            used = int(_read(f"{folder}/{used_file}").strip() or 0)
            match = re.search(rf"^{reclaimable} (\d+)$", _read(f"{folder}/memory.stat"), re.MULTILINE)
            return int(limit), used - (int(match[1]) if match else 0)
    return None, 0


def _gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that the CUDA driver lists (respecting CUDA_VISIBLE_DEVICES), without creating a CUDA context."""
    library = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(100)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        number = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    return Gpu(
        name=name.value.decode(errors="replace"),
        capability=(capability[0], capability[1]),
        memory_bytes=memory.value,
    )


def _cuda_compiler() -> str | None:
    """Return the path of nvcc. Like FlashInfer, search CUDA_HOME first, then PATH, then the usual folder."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    given = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    return next(filter(None, map(shutil.which, (*given, "nvcc", "/usr/local/cuda/bin/nvcc"))), None)


def _torch_cuda() -> str | None:
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = _read(str(Path(spec.origin).with_name("version.py")))
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", version, re.MULTILINE)
    return match[1] if match else None


def _packages() -> dict[str, str]:
    """Return the versions of the installed `PACKAGES`, without parsing all metadata, which takes 5 ms per package."""
    versions = {}
    for name in PACKAGES:
        try:
            lines = (metadata.distribution(name).read_text("METADATA") or "").splitlines()
        except metadata.PackageNotFoundError:
            continue
        versions[name] = next((line[9:] for line in lines if line.startswith("Version: ")), "")
    return versions


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
