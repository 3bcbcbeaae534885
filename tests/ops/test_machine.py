"""What is found out about a machine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil
import pytest

import ops.machine
from ops.machine import KNOWN_GPUS, Gpu, Machine

PROBE = "import sys; from ops.machine import Machine; Machine.probe(); sys.exit('torch' in sys.modules)"


def test_probe_finds_memory_and_processors() -> None:
    machine = Machine.probe()
    assert 0 < machine.available_bytes <= machine.total_bytes <= psutil.virtual_memory().total
    assert 1 <= machine.num_cpus <= (psutil.cpu_count() or 1)
    assert machine.packages["torch"]


def test_probe_agrees_with_torch_about_the_gpus() -> None:
    import torch

    machine = Machine.probe()
    assert machine.torch_cuda == torch.version.cuda
    if torch.version.cuda is not None:
        assert len(machine.gpus) == torch.cuda.device_count()
        for index, gpu in enumerate(machine.gpus):
            properties = torch.cuda.get_device_properties(index)
            assert gpu.capability == (properties.major, properties.minor)
            assert gpu.name == properties.name


def test_probe_does_not_import_torch() -> None:
    assert subprocess.run([sys.executable, "-c", PROBE], check=False).returncode == 0


def test_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: 900000 kB\n",
        "/sys/fs/cgroup/memory.max": "512000000\n",
        "/sys/fs/cgroup/memory.current": "300000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 100000000\n",
    }
    monkeypatch.setattr(ops.machine, "_read", lambda path: files.get(path, ""))
    assert ops.machine._memory() == (512000000, 312000000)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert ops.machine._memory() == (1024000000, 921600000)


def test_flags_are_read_on_both_kinds_of_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("flags\t\t: fpu avx512f amx_bf16\n", "Features\t: fpu avx512f amx_bf16\n"):
        monkeypatch.setattr(ops.machine, "_read", lambda _path, line=line: f"processor : 0\n{line}")
        assert ops.machine._cpu_flags() == {"fpu", "avx512f", "amx_bf16"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cuda: Optional[str] = None\n", None),
        ("cuda: Optional[str] = '13.0'\n", "13.0"),
        ('cuda = "12.8"\n', "12.8"),
        ("", None),
    ],
)
def test_cuda_of_torch_is_read_from_its_files(monkeypatch: pytest.MonkeyPatch, text: str, version: str | None) -> None:
    monkeypatch.setattr(ops.machine, "_read", lambda _path: text)
    assert ops.machine._torch_cuda() == version


def test_named_machines_have_their_gpu() -> None:
    for name, gpu in KNOWN_GPUS.items():
        assert Machine.named(name).gpus == (gpu,)
    assert Machine.named("cpu").gpus == ()
    with pytest.raises(KeyError):
        Machine.named("abacus")


class FakeDriver:
    """Two GPUs, as the CUDA driver would show them."""

    names = (b"NVIDIA H200", b"NVIDIA L4")
    attributes = ({75: 9, 76: 0}, {75: 8, 76: 9})

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = 10 + index
        return 0

    def cuDeviceGetName(self, name: Any, _length: int, device: Any) -> int:  # noqa: N802
        name.value = self.names[device.value - 10]
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:  # noqa: N802
        memory._obj.value = device.value << 32
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: Any) -> int:  # noqa: N802
        number._obj.value = self.attributes[device.value - 10][attribute]
        return 0


def test_gpus_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.machine.ctypes, "CDLL", lambda _name: FakeDriver())
    assert ops.machine._gpus() == (
        Gpu(name="NVIDIA H200", capability=(9, 0), memory_bytes=10 << 32),
        Gpu(name="NVIDIA L4", capability=(8, 9), memory_bytes=11 << 32),
    )


def test_driver_that_does_not_start_shows_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDriver, "cuInit", lambda _self, _flags: 100)
    monkeypatch.setattr(ops.machine.ctypes, "CDLL", lambda _name: FakeDriver())
    assert ops.machine._gpus() == ()
