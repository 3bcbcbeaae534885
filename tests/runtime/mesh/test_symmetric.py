"""All-reduce through symmetric memory, with a fake of torch's: ranks are threads that read each other's buffers."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks_on_gloo import on_ranks
from runtime.mesh import symmetric
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.mesh.symmetric import MAX_BYTES, SymmetricSum

TIMEOUT_S = 60


class SharedMemory:
    """Fake of torch's symmetric memory and its kernel, for ranks that are threads of this process."""

    def __init__(self, buffers: list[Tensor], both: Barrier, error: float) -> None:
        self._buffers, self._both, self._error = buffers, both, error

    def empty_strided_p2p(
        self, size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device, name: str
    ) -> Tensor:
        assert stride == (1,)
        return torch.zeros(size, dtype=dtype, device=device)

    def rendezvous(self, buffer: Tensor, name: str) -> None:
        self._buffers.append(buffer)
        self._both.wait(TIMEOUT_S)

    def one_shot_all_reduce_copy(self, buffer: Tensor, x: Tensor, operation: str, name: str) -> Tensor:
        assert operation == "sum"
        assert buffer.shape == x.shape
        buffer.copy_(x)
        self._both.wait(TIMEOUT_S)
        total = sum(each[: x.nbytes].view(x.dtype).view(x.shape) for each in self._buffers)
        self._both.wait(TIMEOUT_S)
        return total + self._error  # type: ignore[return-value]


@pytest.fixture
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Replace torch's memory for axes of two ranks. Return a list that gets the axis name and shape of each sum."""
    sums: list[list[Any]] = []
    memory = SharedMemory([], Barrier(2), getattr(request, "param", 0.0))

    def reduce(buffer: Tensor, x: Tensor, *rest: str) -> Tensor:
        sums.append([rest[1], tuple(x.shape)])
        return memory.one_shot_all_reduce_copy(buffer, x, *rest)

    monkeypatch.setattr(symmetric, "_memory", lambda: memory)
    monkeypatch.setattr(symmetric, "_operations", lambda: SimpleNamespace(one_shot_all_reduce_copy=reduce))
    # Both ranks are in this process, which may register a name only once.
    monkeypatch.setattr(symmetric._C10D, "_register_process_group", lambda name, group: None)
    monkeypatch.setattr(symmetric._C10D, "_unregister_process_group", lambda name: None)
    monkeypatch.setattr("ranks_on_gloo.Mesh", lambda info, device: Mesh(info, device, symmetric=True))
    return sums


def ranks() -> list[RankInfo]:
    return [RankInfo(rank=rank, tp_size=2) for rank in range(2)]


def test_small_tensors_are_summed_in_shared_memory_and_others_by_the_group(
    tmp_path: Path, shared: list[list[Any]]
) -> None:
    given = [
        torch.ones(3, 8),
        torch.ones(4, 8, dtype=torch.bfloat16),
        torch.ones(3, 8, dtype=torch.float16),  # no such kernel
        torch.ones(3, dtype=torch.float32),  # 12 bytes
        torch.ones(4, 8).t(),  # not contiguous
        torch.ones(MAX_BYTES // 4 + 4),
        torch.ones(0, 8),
    ]

    def work(mesh: Mesh) -> list[Tensor]:
        axis = mesh.axis("tp")
        assert axis is mesh.axis("stage")
        return [axis.all_reduce(x.clone(memory_format=torch.preserve_format) * (axis.rank + 1)) for x in given]

    for found in on_ranks(tmp_path, ranks(), work):
        for total, x in zip(found, given, strict=True):
            assert torch.equal(total, 3 * x)
    test, *rest = shared[::2]
    assert test == ["penstock-tp0", (64,)]
    assert [shape for _, shape in rest] == [(3, 8), (4, 8)]


@pytest.mark.parametrize("shared", [0.5], indirect=True)
@pytest.mark.usefixtures("shared")
def test_a_wrong_sum_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the sum of a test is 3\.5, not 3\.0"):
        on_ranks(tmp_path, ranks(), lambda mesh: None)


def test_calls_fit_the_installed_torch() -> None:
    memory = symmetric._memory()
    assert "size: Tuple[int, ...], stride: Tuple[int, ...], dtype: torch.dtype, device: torch.device, group_name" in (
        memory.empty_strided_p2p.__doc__
    )
    assert "rendezvous(tensor: torch.Tensor, group_name" in memory.rendezvous.__doc__
    schema = symmetric._operations().one_shot_all_reduce_copy.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == ["symm_buffer", "local_input", "reduce_op", "group_name"]


def test_the_group_is_known_to_torch_by_its_name_until_the_memory_is_refused() -> None:
    groups = symmetric._C10D
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    seen: list[Any] = []

    class Refusing:
        def empty_strided_p2p(self, *args: Any) -> Tensor:
            seen.append(groups._resolve_process_group("penstock-tp7"))
            raise RuntimeError("no peer access")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "_memory", Refusing)
        with pytest.raises(RuntimeError, match="no peer access"):
            SymmetricSum("penstock-tp7", 1, 2, store, torch.device("cpu"))
    assert [(group.rank(), group.size()) for group in seen] == [(1, 2)]
    with pytest.raises(RuntimeError):
        groups._resolve_process_group("penstock-tp7")
