"""A limit that a backend does not compute is computed by native, for the rows that use it."""

from __future__ import annotations

import logging
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cpp_kernels import backend as cpp_backend
from kernel_cases.sampling import OFF, rows
from ops.sampling import NO_LIMIT, Masks, SamplingArrays, fallback

NUM_ROWS, VOCAB_SIZE = 6, 300
USED: dict[str, Any] = {
    "top_n_sigma": 1e-6,
    "typical_p": 1e-3,
    "top_k": 1,
    "top_p": 1e-3,
    "min_p": 1.0,
    "xtc_probability": 1.0,
}  # so that each keeps one token only


def arrays(**fields: Any) -> SamplingArrays:
    return rows(NUM_ROWS, **{"temperature": 5.0, "uniform": 0.97, "xtc_threshold": 0.0, **fields})


def logits() -> Tensor:
    return torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=["native", "with_cpp", pytest.param("with_triton", marks=pytest.mark.interpreter)])
def module(request: pytest.FixtureRequest) -> ModuleType | Any:
    if request.param == "with_cpp":
        return cpp_backend("sampling", 2)
    return import_module(f"ops.sampling.{request.param}")


def test_every_limit_of_the_arrays_is_named() -> None:
    assert {"greedy", "temperature", "uniform", "xtc_threshold", *NO_LIMIT} == set(SamplingArrays._fields)
    assert NO_LIMIT.keys() == USED.keys()


@pytest.mark.parametrize("limit", NO_LIMIT)
def test_every_backend_obeys_every_limit(module: ModuleType, limit: str) -> None:
    x = logits()
    only = x.argmax(-1)
    if limit == "xtc_probability":
        only = x.argmin(-1)
    elif limit == "typical_p":
        surprise = -(x.double() / 5).log_softmax(-1)
        only = (surprise - (surprise.neg().exp() * surprise).sum(-1, keepdim=True)).abs().argmin(-1)
    assert only.tolist() != module.choose(x, arrays())[0].tolist()
    assert only.tolist() == module.choose(x, arrays(**{limit: USED[limit]}))[0].tolist()


@pytest.mark.parametrize("limit", NO_LIMIT)
def test_rows_without_the_limit_choose_as_in_a_step_without_it(module: ModuleType, limit: str) -> None:
    x = logits()
    off, used = NO_LIMIT[limit], USED[limit]
    mixed = module.choose(x, arrays(**{limit: [off, used, off, off, used, off]}))[0].tolist()
    plain, limited = (module.choose(x, arrays(**{limit: value}))[0].tolist() for value in (off, used))
    assert mixed == [plain[0], limited[1], plain[2], plain[3], limited[4], plain[5]]


def test_rows_for_native_see_the_masks(module: ModuleType) -> None:
    x = logits()
    bitmask = torch.full((2, -(-VOCAB_SIZE // 32)), 0, dtype=torch.int32)
    bitmask[:, 1] = 1  # token 32
    masks = Masks(torch.tensor([1, 5]), bitmask)
    top_k = [OFF, 3, OFF, 3, OFF, OFF]
    ids, sound = module.choose(x, arrays(top_k=top_k), None, masks)
    assert (ids[1], ids[5]) == (32, 32)
    assert sound.all()


def test_an_unsound_row_for_native_is_reported(module: ModuleType) -> None:
    x = logits()
    x[3, 7] = float("nan")
    ids, sound = module.choose(x, arrays(top_p=[1.0, 0.5, 1.0, 0.5, 1.0, 1.0]))
    assert sound.tolist() == [True, True, True, False, True, True]
    assert ids[3] == 0


def test_the_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fallback._log_once.cache_clear()
    choose = cpp_backend("sampling", 1).choose
    with caplog.at_level(logging.DEBUG, "ops.sampling.fallback"):
        for _ in range(3):
            choose(logits(), arrays(top_k=[OFF, 3, OFF, OFF, OFF, OFF]))
    [record] = caplog.records
    assert "top_k" in record.message
    assert "with_cpp" in record.message
