"""Every kernel on the device against `native` on the host: the interpreter's cases, more dtypes, larger shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from on_device.operations import Check


def test_the_kernel_equals_native(check: Check, device: str) -> None:
    import torch

    from on_device.operations import E4M3_CAPABILITY, compare, needs_e4m3

    if needs_e4m3(check) and device != "cpu" and torch.cuda.get_device_capability() < E4M3_CAPABILITY:
        pytest.skip("this GPU has no float8 e4m3")
    try:
        compare(check, device)
    except ValueError as refusal:
        assert check.file != "native"
        pytest.skip(str(refusal))


def test_flashinfers_block_products_equal_those_in_float64(device: str) -> None:
    from on_device.operations import block_product_files, compare_block_products

    files = block_product_files()
    if not files:
        pytest.skip("this machine cannot run FlashInfer's products")
    for file in files:
        compare_block_products(file, device)


def test_flashinfers_products_in_nvfp4_equal_those_of_rounded_inputs(device: str) -> None:
    from on_device.operations import compare_fp4_products, fp4_product_files

    files = fp4_product_files()
    if not files:
        pytest.skip("this machine has no compiled kernels of FlashInfer for products in NVFP4")
    for file in files:
        compare_fp4_products(file, device)


def test_flashinfers_quantised_experts_equal_the_dequantised_ones(device: str) -> None:
    from on_device.operations import compare_fused_experts, fused_expert_files

    files = fused_expert_files()
    if not files:
        pytest.skip("this machine has no compiled kernels of FlashInfer for quantised experts")
    for file, form in files:
        compare_fused_experts(file, form, device)


def test_single_tokens_have_the_same_bits_alone_and_in_a_batch(device: str) -> None:
    from on_device.batching import bits_differ

    assert not bits_differ(device, "native" if device == "cpu" else "with_triton")
