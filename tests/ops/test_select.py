from __future__ import annotations

from dataclasses import fields
from functools import partial
from importlib.util import find_spec

import pytest

from ops.attention import native
from ops.backends import ATTENTION, SAMPLING
from ops.select import OPERATIONS, Kernels, select


def test_native_is_chosen_where_nothing_is_said() -> None:
    assert select().attend is native.attend
    assert select({"attention": "native"}).attend is native.attend


def test_every_kernel_comes_from_one_operation() -> None:
    provided = [name for names, _ in OPERATIONS.values() for name in names]
    assert sorted([*provided, "executor"]) == sorted(field.name for field in fields(Kernels))


@pytest.mark.parametrize("choices", [{"attention": "magic"}, {"teleport": "native"}])
def test_what_does_not_exist_is_refused_by_name(choices) -> None:
    with pytest.raises(ValueError, match="magic|teleport"):
        select(choices)


def test_prompts_may_have_a_backend_of_their_own() -> None:
    with pytest.raises(ValueError, match="magic"):
        select({"prefill_attention": "magic"})
    same = select({"attention": "native", "prefill_attention": "native"})
    assert same.attend is native.attend


def test_settings_reach_the_backend_they_name() -> None:
    pytest.importorskip("triton")
    bound = select({"attention": "with_triton"}, {"with_triton": {"num_kv_splits": 2}}).attend
    assert isinstance(bound, partial)
    assert bound.keywords["num_kv_splits"] == 2


def test_every_backend_has_its_file() -> None:
    for operation, declared in (("attention", ATTENTION), ("sampling", SAMPLING)):
        for backend in declared.values():
            assert backend.file in OPERATIONS[operation][1]
            assert find_spec(f"ops.{operation}.{backend.file}") is not None


def test_each_engine_has_its_own_flashinfer() -> None:
    choices = {"attention": "with_flashinfer"}
    assert select(choices).attend is not select(choices).attend
