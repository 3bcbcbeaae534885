from __future__ import annotations

from dataclasses import fields
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from cpp_kernels import library
from ops.attention import native
from ops.backends import ATTENTION, BLOCK_PRODUCTS, EXPERTS, FP4_PRODUCTS, SAMPLING
from ops.machine import Machine
from ops.select import OPERATIONS, Kernels, select


def test_native_is_chosen_where_nothing_is_said() -> None:
    assert select().attend is native.attend
    assert select({"attention": "native"}).attend is native.attend


def test_every_kernel_comes_from_one_operation() -> None:
    provided = [name for names, _ in OPERATIONS.values() for name in names]
    assert sorted([*provided, "backends", "launcher"]) == sorted(field.name for field in fields(Kernels))


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
    products = {**BLOCK_PRODUCTS, **{f"{name} in NVFP4": each for name, each in FP4_PRODUCTS.items()}}
    by_operation = {"attention": ATTENTION, "matmul": products, "moe": EXPERTS, "sampling": SAMPLING}
    for operation, declared in by_operation.items():
        for backend in declared.values():
            assert backend.file in OPERATIONS[operation][1]
            assert find_spec(f"ops.{operation}.{backend.file}") is not None


def test_each_engine_has_its_own_flashinfer() -> None:
    choices = {"attention": "with_flashinfer"}
    assert select(choices).attend is not select(choices).attend


def test_kernels_say_which_backends_they_are_of() -> None:
    assert set(select().backends.values()) == {"native"}
    chosen = select({"norm": "with_triton", "prefill_attention": "with_onednn"}).backends
    others = {**chosen, "norm": "native", "prefill_attention": "native"}
    assert (chosen["norm"], chosen["prefill_attention"]) == ("with_triton", "with_onednn")
    assert set(others.values()) == {"native"}


def test_kernels_say_which_arithmetic_they_use() -> None:
    description = select().description
    assert description.kernels == "torch"
    assert description.library == f"torch {torch.__version__}"
    assert description.num_threads == torch.get_num_threads()
    assert str(description) == ", ".join(
        ["torch", description.library, f"{description.num_threads} threads", description.instruction_set]
    )


def test_kernels_in_cpp_say_which_library_and_processor_they_use() -> None:
    path = library().path  # skips without a compiler
    description = select({"norm": "with_cpp"}, {"with_cpp": {"num_threads": 3}}).description
    assert (description.kernels, description.library, description.num_threads) == ("C++", path.name, 3)
    assert set(description.instruction_set.split()) <= {*Machine.probe().cpu_flags, "generic"}
