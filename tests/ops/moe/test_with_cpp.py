"""Mixtures of experts in C++."""

from __future__ import annotations

import pytest
import torch

from cpp_kernels import DTYPES, LESSER, THREADS, backend, drawn
from kernel_cases.moe import CASES, FOUR_BITS, Case, expected, inputs, outputs
from kernel_comparison import agree
from ops.activation import ACTIVATIONS
from ops.matmul.grouped import GroupedWeight, round_experts
from ops.matmul.with_cpp import PackedWeight, PackedWeight4, PackedWeight8
from ops.moe import GroupedMixture, Grouping, Mixture, native

MANY = {
    "a prompt": Case(300, 8, 3, 64, 48),
    "every size odd but the width": Case(5, 7, 3, 34, 17),
    "one expert takes more than a block": Case(600, 3, 1, 32, 16, favourite=1, renormalise=False),
}
TYPED = {
    f"{name}, {dtype}": case._replace(dtype=dtype)
    for name, case in {**CASES, **MANY}.items()
    if case.dtype != torch.float16
    for dtype in DTYPES
}


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("case", TYPED.values(), ids=TYPED)
def test_kernels_follow_the_formula(case: Case, num_threads: int) -> None:
    found = outputs(backend("moe", num_threads), case)
    wanted = outputs(native, case)  # experts chosen by logits with the same rounding
    agree(found, wanted)
    if case.dtype == torch.float32:
        agree(found, expected(case))
    assert isinstance(backend("moe").prepare_experts(Mixture(*inputs(case)[2:])).gate_up, PackedWeight)


@pytest.mark.slow
@pytest.mark.parametrize("march", LESSER.values(), ids=LESSER)
def test_lesser_processors_compute_the_same(march: tuple[str, ...]) -> None:
    for case in (CASES["a few tokens"], MANY["a prompt"]):
        agree(outputs(backend("moe", 2, *march), case), outputs(native, case))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_may_have_biases(dtype: torch.dtype, activation: str) -> None:
    logits, x, gate_up, down = inputs(Case(9, dtype=dtype, activation=activation))
    mixture = Mixture(gate_up, down, drawn(6, 40, dtype=dtype), drawn(6, 24, dtype=dtype))
    ours = backend("moe", 2)
    weights, experts = native.route(logits, 2, renormalise=True)
    found = ours.mix(x, ours.prepare_experts(mixture), weights, experts, activation)
    agree([found], [native.mix(x, mixture, weights, experts, activation)], slack=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_8_bits_are_near(dtype: torch.dtype) -> None:
    logits, x, gate_up, down = inputs(Case(40, 6, 2, 70, 72, dtype=dtype))
    ours, mixture = backend("moe", 2), Mixture(gate_up, down)
    weights, experts = native.route(logits, 2, renormalise=True)
    prepared = ours.prepare_experts(mixture, bits=8)
    assert isinstance(prepared.down, PackedWeight8)
    found, wanted = (
        each.mix(x, weight, weights, experts, "silu") for each, weight in ((ours, prepared), (native, mixture))
    )
    assert (found - wanted).abs().max() < 0.04 * wanted.abs().max()
    assert (found - wanted).abs().max() > 0


@pytest.mark.parametrize("rounded_rows", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_4_bits_are_those_of_their_groups(dtype: torch.dtype, shifted: bool, rounded_rows: bool) -> None:
    logits, x, gate_up, down = inputs(Case(40, 6, 2, 64, 48, dtype=dtype))
    parts = [round_experts(weight, 16)._replace(rounded_rows=rounded_rows) for weight in (gate_up, down)]
    if shifted:
        parts = [part._replace(shifts=0.1 * torch.randn_like(part.scales).half().float()) for part in parts]
    parts = [part._replace(scales=part.scales.half().float()) for part in parts]  # scales in 16 bits, like the kernels
    biases = (drawn(6, 96, dtype=dtype), drawn(6, 64, dtype=dtype))
    mixture = GroupedMixture(parts[0], parts[1], *biases)
    weights, experts = native.route(logits, 2, renormalise=True)
    wanted = native.mix(
        x.float(),
        native.prepare_grouped_experts(mixture._replace(**_floats(*biases)), torch.float32),
        weights,
        experts,
        "silu",
    )
    ours = backend("moe", 2)
    prepared = ours.prepare_grouped_experts(mixture, dtype)
    assert isinstance(prepared.gate_up, PackedWeight4)
    assert isinstance(prepared.down, PackedWeight4)
    found = ours.mix(x, prepared, weights, experts, "silu")
    bound = 0.02 if rounded_rows or dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=bound * float(wanted.abs().max()))
    alone = ours.mix(x[7:8], prepared, weights[7:8], experts[7:8], "silu")
    assert torch.equal(alone[0], found[7])


def _floats(gate_up_bias: torch.Tensor, down_bias: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"gate_up_bias": gate_up_bias.float(), "down_bias": down_bias.float()}


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("grouping", [None, Grouping(4, 2, 1), Grouping(4, 2, 2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_chosen_from_the_best_groups(
    dtype: torch.dtype, biased: bool, grouping: Grouping | None, scoring: str
) -> None:
    logits, bias = drawn(33, 24, dtype=dtype), drawn(24) if biased else None
    ways = {"renormalise": biased, "scoring": scoring, "bias": bias, "grouping": grouping, "scale": 2.5}
    weights, experts = backend("moe", 2).route(logits, 3, **ways)
    wanted, chosen = native.route(logits, 3, **ways)
    assert torch.equal(experts, chosen)
    agree([weights], [wanted])


def test_a_token_gives_the_same_alone_and_among_others_on_any_threads() -> None:
    logits, x, gate_up, down = inputs(Case(70, 6, 3, 64, 64, dtype=torch.bfloat16))
    together = None
    for num_threads in THREADS:
        ours = backend("moe", num_threads)
        mixture = ours.prepare_experts(Mixture(gate_up, down))
        weights, experts = ours.route(logits, 3, renormalise=True)
        found = ours.mix(x, mixture, weights, experts, "silu")
        assert together is None or torch.equal(found, together)
        together = found
        for row in (0, 37, 69):
            one = slice(row, row + 1)
            alone = ours.mix(x[one], mixture, weights[one], experts[one], "silu")
            assert torch.equal(alone[0], together[row])


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits = torch.randn(3, 6)
    logits[1] = torch.nan
    weights, experts = backend("moe").route(logits, 2, renormalise=True)
    assert (experts.min() >= 0) & (experts.max() < 6)
    assert weights[1].isnan().all()
    assert not weights[[0, 2]].isnan().any()


def test_no_tokens_give_nothing() -> None:
    _, _, gate_up, down = inputs(Case())
    ours = backend("moe")
    nothing = torch.empty(0, 2)
    assert ours.mix(
        torch.empty(0, 24), ours.prepare_experts(Mixture(gate_up, down)), nothing, nothing.int(), "silu"
    ).shape == (0, 24)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_expert_in_4_bits_is_read_back(dtype: torch.dtype, form: str) -> None:
    generator, wanted = torch.Generator().manual_seed(2), FOUR_BITS[form]

    def draw(out_size: int, in_size: int) -> GroupedWeight:
        codes = torch.randint(0, 16, (3, out_size, in_size), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(-9, -6, (3, out_size, in_size // wanted.group), generator=generator)
        return GroupedWeight(codes, exponents.float().exp2(), table=wanted.table, powers=wanted.powers)

    ours, mixture = backend("moe"), GroupedMixture(draw(192, 160), draw(160, 96))
    prepared, plain = ours.prepare_grouped_experts(mixture, dtype), native.prepare_grouped_experts(mixture, dtype)
    assert isinstance(prepared.gate_up, PackedWeight4)
    for expert in range(3):
        one = ours.one_expert(prepared, expert, 160, 96)
        assert torch.equal(one.gate_up[0], plain.gate_up[expert])
        assert torch.equal(one.down[0], plain.down[expert])
