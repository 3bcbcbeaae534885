"""A store of the user whose methods do not fit the protocol is refused, and its first error is logged."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from runtime.errors import ConfigurationError
from runtime.mesh.rank_info import RankInfo
from runtime.page_store.opening import open_store
from runtime.page_store.protocol import StoreSpace
from runtime.worker.device import open_device
from runtime.worker.page_io import PageIO


class Store:
    """A store without pages."""

    answer: Any = 0  # what `get_many` returns

    def __init__(self, space: StoreSpace, config: dict[str, Any]) -> None: ...

    def exists(self, keys: Any) -> int:
        return 0

    def get(self, key: bytes, parts: Any) -> bool:
        return False

    def set(self, key: bytes, parts: Any) -> None:
        raise OSError("the network is down")

    def delete(self, keys: Any) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...

    def get_many(self, keys: Any, pages: Any) -> Any:
        return self.answer


class WithoutBuffers(Store):
    def get_many(self, keys: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 0


class Asynchronous(Store):
    async def exists(self, keys: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 0


class WithoutMethods:
    def __init__(self, space: StoreSpace, config: dict[str, Any]) -> None: ...


def config_of(name: str) -> dict[str, Any]:
    return {"module_path": __name__, "class_name": name}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WithoutBuffers", r"WithoutBuffers\.get_many\(keys, pages\) cannot be called: too many positional arguments"),
        ("Asynchronous", r"Asynchronous\.exists\(keys\) must not be a coroutine function"),
        ("WithoutMethods", r"the method WithoutMethods\.exists\(keys\) is missing"),
    ],
)
def test_methods_that_do_not_fit_are_refused(name: str, reason: str) -> None:
    assert __name__ in sys.modules
    with pytest.raises(ConfigurationError, match=reason):
        open_store("dynamic", StoreSpace("a", 0, 1, 64), config_of(name))


@pytest.fixture
def mover() -> Any:
    mover = PageIO([torch.zeros(4, 8)], open_device(torch.device("cpu")), RankInfo(rank=0, tp_size=1, pp_size=1))
    mover.attach("dynamic", "a", config_of("Store"))
    yield mover
    mover.detach()


KEYS = [b"a" * 32, b"b" * 32]


@pytest.mark.parametrize("answer", [True, [1], 3, -1, None])
def test_the_first_wrong_answer_is_logged(
    answer: Any, mover: PageIO, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Store, "answer", answer)
    for _ in range(2):
        assert mover.load(KEYS, [0, 1]).result(60)["count"] == 0
    assert [record.message.count("get_many must return the number") for record in caplog.records] == [1]


def test_the_first_error_of_a_save_is_logged(mover: PageIO, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert mover.save(KEYS, [0, 1]).result(60)["failed"] == 2
    assert [record.message.count("OSError: the network is down") for record in caplog.records] == [1]
    assert mover.load(KEYS, [0, 1]).result(60)["count"] == 0
