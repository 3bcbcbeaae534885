"""Compare every call of FlashInfer that Penstock makes with the signatures of the installed flashinfer.

The backends run small cases with fakes of FlashInfer, which record the calls. Needs no GPU and imports no FlashInfer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import recorded_flashinfer
from flashinfer_signatures import installed, signature
from kernel_cases.attention import SINGLE, Case, options, step
from ops.attention import with_fa3, with_flashinfer, with_trtllm, with_trtllm_mla
from ops.matmul.grouped import E2M1, GroupedWeight
from ops.matmul.rounded_rows import round_rows
from ops.moe import GroupedMixture, Mixture
from serve.bench import report

HALF = Case(dtype=torch.float16)
LATENT = Case(dtype=torch.bfloat16, num_heads=2, num_kv_heads=1, head_dim=576, page_size=32)


class Call(NamedTuple):
    """The shape of a call: its values do not matter to a signature."""

    name: str  # for example "flashinfer.mla.Wrapper.plan"
    num_positional: int  # including `self`
    keywords: frozenset[str]


def calls() -> set[Call]:
    """Return the calls that all backends make."""
    found: set[Call] = set()
    modules = {name: _recording(module, found) for name, module in recorded_flashinfer.modules().items()}
    with ExitStack() as patched:
        patched.enter_context(patch.dict(sys.modules, modules))
        for backend in (with_flashinfer, with_trtllm):
            patched.enter_context(patch.object(backend, "WORKSPACE_BYTES", 16))
        for make, case in _runs():
            attend, given = make(), step(case)
            if case.head_dim == LATENT.head_dim:
                given = given._replace(v_pool=given.k_pool)
            attend(*given, options(case))
            if {count for _, count in case.rows} == {1}:
                _capture(attend, given, case)
        _mix()
        _multiply()
    return found


def problems(package: Path) -> list[str]:
    """Return the calls that the installed package would not accept, with the reason."""
    found = []
    for call in sorted(calls(), key=str):
        try:
            keywords = dict.fromkeys(call.keywords)
            signature(package, call.name).bind(*[None] * call.num_positional, **keywords)
        except (LookupError, TypeError) as error:
            found.append(f"{call.name}: {error}")
    return found


def _runs() -> Iterator[tuple[Any, Case]]:
    for make in (with_flashinfer.make_attend, with_fa3.make_attend):
        yield make, HALF
        yield make, HALF._replace(rows=SINGLE)
        yield make, LATENT
        yield make, LATENT._replace(rows=SINGLE)
    yield with_flashinfer.make_attend, HALF._replace(pool_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0)
    yield with_trtllm.make_attend, HALF
    yield with_trtllm_mla.make_attend, LATENT


def _mix() -> None:
    from ops.moe import with_flashinfer as experts  # these modules import triton
    from ops.moe import with_trtllm_gen

    gate_up, down = torch.zeros(2, 16, 8, dtype=torch.bfloat16), torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    chosen = torch.zeros(3, 2, dtype=torch.int32)
    mixture = experts.prepare_experts(Mixture(gate_up, down))
    experts.mix(torch.zeros(3, 8, dtype=torch.bfloat16), mixture, torch.ones(3, 2), chosen, "silu")
    codes, scales = torch.zeros(2, 256, 128, dtype=torch.uint8), torch.ones(2, 256, 1)
    gate_up = GroupedWeight(codes, scales, bits=8, floating=True)
    down = gate_up._replace(codes=codes[:, :128], scales=scales[:, :128])
    in_blocks = GroupedMixture(gate_up, down)
    codes = torch.zeros(2, 256, 128, dtype=torch.uint8)
    gate_up = GroupedWeight(codes, torch.ones(2, 256, 4), table=E2M1, powers=True)
    down = gate_up._replace(codes=codes[:, :128], scales=gate_up.scales[:, :128])
    biases = (torch.zeros(2, size, dtype=torch.bfloat16) for size in (256, 128))
    in_mxfp4 = GroupedMixture(gate_up, down, *biases)
    x = round_rows(torch.zeros(3, 128, dtype=torch.bfloat16), 128)
    gate_up = gate_up._replace(scales=torch.ones(2, 256, 8), powers=False, input_scales=torch.ones(2, 1))
    down = gate_up._replace(codes=codes[:, :128], scales=gate_up.scales[:, :128])
    in_nvfp4 = GroupedMixture(gate_up, down)
    cases: list[tuple[Any, GroupedMixture, dict[str, bool]]] = [
        (experts, in_blocks, {}),
        (experts, in_mxfp4, {}),
        (with_trtllm_gen, in_blocks, {}),
        (experts, in_nvfp4, {}),
        (with_trtllm_gen, in_nvfp4, {}),
        (with_trtllm_gen, in_mxfp4, {"rounds": True}),
        (with_trtllm_gen, in_mxfp4, {"rounds": False}),
    ]
    for backend, given, more in cases:
        mixture = backend.prepare_grouped_experts(given, torch.bfloat16)
        activation = "clamped_swiglu" if given is in_mxfp4 else "silu"
        backend.mix(x, mixture, torch.ones(3, 2), chosen, activation, **more)


def _multiply() -> None:
    from ops.matmul import with_deepgemm, with_fp4, with_groupwise  # these modules import triton

    codes, x = torch.zeros(128, 128, dtype=torch.uint8), torch.zeros(3, 128, dtype=torch.bfloat16)
    weight = GroupedWeight(codes, torch.ones(128, 1), bits=8, floating=True)
    for backend in (with_deepgemm, with_groupwise):
        rows = round_rows(x, 128)  # torch rounds them, because a Triton kernel may not run here
        backend.linear(rows, backend.prepare_grouped(weight, x.dtype))
    weight = GroupedWeight(codes, torch.ones(128, 8), table=E2M1, input_scales=torch.ones(1))
    with_fp4.linear(x, with_fp4.prepare_grouped(weight, x.dtype))


def _capture(attend: Any, given: Any, case: Case) -> None:
    """Run a step as a capture does, then plan it again as a replay does."""
    captured = replace(given.inputs, replans={}, plan_cache={})
    attend(*given[:3], captured, options(case))
    for replan in (captured.replans or {}).values():
        replan(replace(given.inputs, plan_cache={}))


def _recording(module: ModuleType, found: set[Call]) -> ModuleType:
    """Return a copy of a fake module that adds each call to `found`."""
    copy = ModuleType(module.__name__)
    for name, each in vars(module).items():
        if name.startswith("__"):
            continue
        whole = f"{module.__name__}.{name}"
        if isinstance(each, type):
            methods = {
                method: _recorded(f"{whole}.{method}", getattr(each, method), found)
                for method in ("__init__", "plan", "run", "reset_workspace_buffer")
                if hasattr(each, method)
            }
            setattr(copy, name, type(name, (each,), methods))
        else:
            setattr(copy, name, _recorded(whole, each, found))
    return copy


def _recorded(name: str, run: Any, found: set[Call]) -> Any:
    def called(*args: Any, **keywords: Any) -> Any:
        found.add(Call(name, len(args), frozenset(keywords)))
        return run(*args, **keywords)

    return called


def main() -> int:
    """Print the comparison. Return 1 if the installed package would not accept a call."""
    package = installed()
    if package is None:
        report.say("flashinfer is not installed: nothing to compare.")
        return 0
    try:
        name = f"flashinfer-python {version('flashinfer-python')}"
    except PackageNotFoundError:
        name = str(package)
    wrong = problems(package)
    report.say(f"{len(calls())} kinds of calls compared with {name}: {len(wrong)} would not be accepted.")
    for each in wrong:
        report.say(f"error: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
