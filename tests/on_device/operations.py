"""Every operation on a device against `native` on the host, over the case tables and in the dtypes of models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kernel_cases import activation, attention, low_rank, matmul, moe, norm, recurrence, rope, sampling
from kernel_comparison import agree
from on_device.moved import Moved
from ops.backends import ATTENTION, BLOCK_PRODUCTS, EXPERTS, FP4_PRODUCTS, SAMPLING
from ops.machine import Machine
from ops.matmul import nvfp4
from ops.matmul.fused_weight import FusedWeight
from ops.matmul.grouped import E2M1, GroupedWeight
from ops.matmul.rounded_rows import round_rows
from ops.moe import GroupedMixture, Mixture
from ops.moe import native as native_moe
from ops.select import OPERATIONS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_CAPABILITY = (8, 9)
HOST_ONLY = ("with_onednn", "int8")  # `int8` does not support 4 bits
NO_TABLE = tuple(  # implemented by torch on a GPU
    operation for operation, (_, files) in OPERATIONS.items() if set(files) <= {"native", "with_cpp"}
)
EXACT = ("kv", "sampling")  # operations that copy, round or choose, so results must be equal
EXTRAS = ("penalized", "masked", "scored")  # functions of a table in addition to `outputs`
FUSED_DISTANCE = 0.08  # relative: FlashInfer's experts in float8, MXFP4 and NVFP4 round activations too
SLACK = 2.0  # the device's exponentials and sums differ from the host's

LONG = tuple((97 * row % 3000, 1) for row in range(32))
GQA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16}
# Sizes of real models, which are too slow for the interpreter.
LARGE: dict[str, dict[str, Any]] = {
    "activation": {"large": activation.Case("silu", (64, 2 * 14_336), BF16)},
    "attention": {
        "large, single tokens": attention.Case(LONG, **GQA),
        "large, pages of one": attention.Case(LONG, page_size=1, **GQA),
        "large, long rows": attention.Case(((0, 1500), (700, 300)), **GQA),
        "large, mixed": attention.Case((*LONG[:9], (0, 700), (2000, 1), (512, 200)), **GQA),
    },
    "low_rank": {
        f"large, {len(slots)} tokens": low_rank.Case(slots, (16, 0, 64), 64, 4096, (4096, 1024, 1024), BF16)
        for slots in ((1, 0, 3, 3, 2), (3,) * 500 + (0, 1, 2) * 50)
    },
    "matmul": {
        f"large, {rows} rows": matmul.Case(rows, 4096, 4096, 128, shifted=True, dtype=BF16) for rows in (1, 500)
    },
    "moe": {f"large, {tokens} tokens": moe.Case(tokens, 8, 2, 512, 256, dtype=BF16) for tokens in (3, 100)},
    "norm": {"large": norm.Case((256, 4096), BF16)},
    "rope": {"large": rope.Case(32, 8, 128, 128, dtype=BF16, positions=tuple(range(20)) * 16)},
    "recurrence": {
        "large": recurrence.Case(
            ((0, 1, 200), (1, 2, 1), (3, 4, 1), (5, 6, 1)),
            BF16,
            groups=16,
            heads=32,
            key_dim=128,
            value_dim=128,
            channels=8192,
        )
    },
    "sampling": {
        "large, greedy": sampling.Case({"greedy": True}, vocab_size=151_936),
        "large, all limits": sampling.Case({"top_k": 50, "top_p": 0.9, "temperature": 0.8}, 151_936),
    },
}


class Check(NamedTuple):
    """One case for one backend module."""

    operation: str
    file: str
    case: str

    def __str__(self) -> str:
        return "-".join(self)


def checks(*, large: bool) -> Iterator[Check]:
    """Return all checks for the backends that run on this machine's GPU, or on the host without a GPU."""
    for operation, (_, there) in OPERATIONS.items():
        files = runnable_files(operation)
        if operation not in NO_TABLE:
            for file in there:
                if file in files:
                    yield from (Check(operation, file, name) for name in cases(operation, large=large))
                    yield from (Check(operation, file, name) for name in extras(operation))


def one_of_each() -> list[Check]:
    """Return the first check of every operation, module and dtype, and the checks outside the tables."""
    found: dict[Any, Check] = {}
    for check in checks(large=False):
        case = cases(check.operation).get(check.case, check.case)
        kind = (getattr(case, "dtype", case), getattr(case, "pool_dtype", None))
        found.setdefault((check.operation, check.file, *map(str, kind)), check)
    return list(found.values())


def runnable_files(operation: str) -> set[str]:
    """Return the backend files of the operation that this machine's GPU runs, or the host without a GPU."""
    machine = Machine.probe()
    gpu = machine.gpus[0] if machine.gpus else None
    backends = [*ATTENTION.values(), *SAMPLING.values()]
    if operation == "moe":  # `compare_fused_experts` is about quantised experts of FlashInfer
        in_16_bits = [EXPERTS["flashinfer_cutlass"]] if has_compiled_flashinfer() else []
        backends = [ATTENTION["torch_native"], EXPERTS["triton"], *in_16_bits]
    elif operation == "matmul":  # of 4-bit weights; `compare_block_products` and `compare_fp4_products` take others
        backends = [ATTENTION["torch_native"], ATTENTION["triton"]]
    files = {backend.file for backend in backends if not backend.unmet(machine, gpu)} - set(HOST_ONLY)
    by_flashinfer = {b.file for b in backends if b.needs and b.needs.package == "flashinfer-python"}
    return files if compiles_flashinfer() else files - by_flashinfer


def has_compiled_flashinfer() -> bool:
    """Whether FlashInfer's kernels are installed as machine code. Compiling its experts takes longer than all tests."""
    return find_spec("flashinfer_jit_cache") is not None


def compiles_flashinfer() -> bool:
    """Whether FlashInfer can get its kernels: from CUDA's compiler, or from a package."""
    has_compiler = shutil.which("nvcc") is not None or "CUDA_HOME" in os.environ
    return has_compiler or find_spec("flashinfer_jit_cache") is not None


def cases(operation: str, *, large: bool = True) -> dict[str, Any]:
    """Return the table's cases, then each float32 case in the dtypes of GPUs and with a float8 cache."""
    found = dict(table(operation).CASES)
    for name, case in table(operation).CASES.items():
        if getattr(case, "dtype", None) == FP32:
            found |= {f"{name}, {str(dtype)[6:]}": _in(case, dtype) for dtype in (BF16, FP16)}
            if operation == "attention":
                found |= {
                    f"{name}, cached as {str(pool)[6:]}": case._replace(
                        dtype=BF16, pool_dtype=pool, k_scale=0.5, v_scale=2.0
                    )
                    for pool in (E4M3, E5M2)
                }
    return found | (LARGE.get(operation, {}) if large else {})


def _in(case: Any, dtype: torch.dtype) -> Any:
    pool = getattr(case, "pool_dtype", None)
    return case._replace(dtype=dtype, **({"pool_dtype": dtype} if pool == FP32 else {}))


def extras(operation: str) -> list[str]:
    return [name for name in EXTRAS if hasattr(table(operation), name)]


def table(operation: str) -> Any:
    return import_module(f"kernel_cases.{operation}")


def compare(check: Check, device: str) -> None:
    """Raise AssertionError if the device's results differ from `native`, and ValueError if the backend refuses the
    case.
    """
    operation, file, name = check
    found, wanted = (
        outputs(operation, name, backend)
        for backend in (Moved(_backend(operation, file), device), _backend(operation, "native"))
    )
    assert len(found) == len(wanted)
    if operation == "recurrence":
        assert recurrence.is_close(found, wanted), check
        return
    for one, other in zip(found, wanted):
        if operation in EXACT and not (name == "scored" and one.is_floating_point()) and name != "penalized":
            assert torch.equal(one, other), check
        else:
            agree([one], [other], SLACK)


def fp4_product_files() -> list[str]:
    """Return the files of FlashInfer's products in NVFP4 that this machine has as machine code."""
    machine = Machine.probe()
    if not machine.gpus or not has_compiled_flashinfer():
        return []
    gpu = machine.gpus[0]
    return [each.file for name, each in FP4_PRODUCTS.items() if name != "triton" and not each.unmet(machine, gpu)]


def compare_fp4_products(file: str, device: str) -> None:
    """Raise AssertionError if products in NVFP4 differ from those of `nvfp4.linear`, which rounds inputs in torch."""
    module: Any = import_module(f"ops.matmul.{file}")
    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(0, 16, (512, 1024), generator=generator, dtype=torch.uint8)
    scales = (40 * torch.rand(512, 64, generator=generator)).to(E4M3).float() * 3e-4
    inputs = torch.tensor([1e-3])
    weight = GroupedWeight(codes, scales, table=E2M1, input_scales=inputs)
    there = weight._replace(codes=codes.to(device), scales=scales.to(device), input_scales=inputs.to(device))
    packed = module.prepare_grouped(there, BF16)
    assert isinstance(packed, FusedWeight), "Triton would compute this product"
    for num_rows in (1, 5, 64, 300):
        x = torch.randn(num_rows, 1024, generator=generator).to(BF16)
        found, wanted = module.linear(x.to(device), packed).cpu().float(), nvfp4.linear(x.float(), weight)
        distance = (found - wanted).norm() / wanted.norm()
        assert distance < FUSED_DISTANCE, f"{file}, {num_rows} rows: {distance:.3f}"


def block_product_files() -> list[str]:
    """Return the files of FlashInfer's products with block-scaled weights that run on this machine."""
    machine = Machine.probe()
    gpu = machine.gpus[0] if machine.gpus else None
    runs = [each.file for name, each in BLOCK_PRODUCTS.items() if name != "triton" and not each.unmet(machine, gpu)]
    return runs if compiles_flashinfer() else []


def compare_block_products(file: str, device: str) -> None:
    """Raise AssertionError if products with block-scaled float8 weights differ from products in float64.

    Both have rows that are rounded to float8.
    """
    module: Any = import_module(f"ops.matmul.{file}")
    generator = torch.Generator().manual_seed(9)
    codes = torch.randn(512, 1024, generator=generator).to(E4M3).view(torch.uint8)
    scales = 0.5 + torch.rand(4, 8, generator=generator)
    weight = GroupedWeight(codes, scales.repeat_interleave(128, 0), bits=8, floating=True)
    packed = module.prepare_grouped(weight._replace(codes=codes.to(device), scales=weight.scales.to(device)), BF16)
    assert len(packed.parts.scales) == len(scales), "Triton would compute this product"
    wide = weight.dequantised().double().T
    for num_rows in (1, 5, 64, 300):
        x = (torch.randn(num_rows, 1024, generator=generator) / 32).to(BF16)
        rounded = round_rows(x, 128)
        rows = rounded.numbers.double() * rounded.scales.double().repeat_interleave(128, 1)
        found = module.linear(x.to(device), packed).cpu().double()
        torch.testing.assert_close(found, rows @ wide, rtol=2e-2, atol=2e-2)


def fused_expert_files() -> list[tuple[str, str]]:
    """Return (file, format) of FlashInfer's kernels for quantised experts that this machine has as machine code."""
    machine = Machine.probe()
    if not machine.gpus or not has_compiled_flashinfer():
        return []
    gpu = machine.gpus[0]
    runs = [each for each in EXPERTS.values() if each.formats and not each.unmet(machine, gpu)]
    major = gpu.capability[0]
    found = ((each.file_on.get(major, each.file), form) for each in runs for form in each.formats[major])
    return [pair for pair in dict.fromkeys(found) if pair[1] != "16 bits"]


def compare_fused_experts(file: str, form: str, device: str) -> None:
    """Raise AssertionError if quantised experts differ from those of `native` with dequantised weights in float32.

    In NVFP4, `native` rounds the inputs too.
    """
    module: Any = import_module(f"ops.moe.{file}")
    mixture, activation = moe.fused_experts(form), "clamped_swiglu" if form == "MXFP4" else "silu"
    prepared = module.prepare_grouped_experts(_moved(mixture, device), BF16)
    plain = native_moe.prepare_grouped_experts(mixture, torch.float32)
    wide = Mixture(*(None if each is None else each.float() for each in plain))  # pyright: ignore[reportArgumentType]
    generator, (num_experts, size, _) = torch.Generator().manual_seed(4), wide.down.shape
    for num_tokens in (1, 5, 64, 300):
        logits = torch.randn(num_tokens, num_experts, generator=generator)
        weights, chosen = native_moe.route(logits, 2, renormalise=True)
        x = torch.randn(num_tokens, size, generator=generator).to(BF16)
        if form == "NVFP4":
            wanted = native_moe.mix_rounded(x.float(), mixture, weights, chosen)
        else:
            wanted = native_moe.mix(x.float(), wide, weights, chosen, activation)
        is_rounded = device == "cpu" and form == "float8 blocks"  # a Triton kernel rounds rows on a GPU
        rows = round_rows(x, 128) if is_rounded else x.to(device)
        found = module.mix(rows, prepared, weights.to(device), chosen.to(device), activation).cpu().float()
        distance = (found - wanted).norm() / wanted.norm()
        assert distance < FUSED_DISTANCE, f"{file}, {form}, {num_tokens} tokens: {distance:.3f}"


def _moved(mixture: GroupedMixture, device: str) -> GroupedMixture:
    gate_up, down = (
        each._replace(
            codes=each.codes.to(device),
            scales=each.scales.to(device),
            input_scales=None if each.input_scales is None else each.input_scales.to(device),
        )
        for each in mixture[:2]
    )
    return GroupedMixture(gate_up, down, *(None if bias is None else bias.to(device) for bias in mixture[2:]))


def needs_e4m3(check: Check) -> bool:
    case = cases(check.operation).get(check.case)
    return getattr(case, "pool_dtype", None) == E4M3


def outputs(operation: str, name: str, backend: Any) -> list[torch.Tensor]:
    module = table(operation)
    if name not in EXTRAS:
        return module.outputs(backend, cases(operation)[name])
    result = getattr(module, name)(backend)
    return result if isinstance(result, list) else [result]


def _backend(operation: str, file: str) -> Any:
    module = import_module(f"ops.{operation}.{file}")
    if operation == "matmul":
        return matmul.of_module(module)
    # `attend` as an engine gets it, because some backends keep plans
    return SimpleNamespace(attend=module.make_attend()) if operation == "attention" else module
