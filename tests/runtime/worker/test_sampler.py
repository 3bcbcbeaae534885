"""The sampler over several steps of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fake_device import LateDevice
from late_host_data import bitmask
from ops.sampling import native
from runtime.batch import UNKNOWN, Batch, Bias, Drafts, FreshSequence, Penalties, Sampling
from runtime.constraint import HostData
from runtime.request import LogprobParams
from runtime.sampling_params import ROW_ARRAYS, RowArray
from runtime.speculative.model_drafts import DRAFT
from runtime.worker.device import CpuDevice
from runtime.worker.sampler import PENALTIES, HostTokens, Sampled, Sampler, check_row_arrays
from runtime.worker.step_inputs import NOT_STAGED, Staged

VOCAB = 50
CPU = CpuDevice()
INF = float("inf")


def sampling(
    count: int,
    bias: Bias | None = None,
    penalties: Penalties | None = None,
    logprobs: tuple[LogprobParams | None, ...] | None = None,
    rates: tuple[float, float, float] = (0.4, 0.6, 1.5),
    host_data: dict[int, HostData] | None = None,
    **fields: ArrayLike,
) -> Batch:
    """Return `Sampling` with `count` rows. Each field, or each of its `params`, is one value for all rows or one per
    row.
    """
    values: dict[str, Any] = {"greedy": False, "uniform": 0.5} | fields
    kinds = {"top_k": np.int32, "greedy": np.bool_}
    arrays = {n: np.array(np.broadcast_to(v, count), kinds.get(n, np.float32)) for n, v in values.items()}
    greedy, uniform = arrays.pop("greedy"), arrays.pop("uniform")
    if penalties is not None:
        arrays |= {name: np.full(count, rate, np.float32) for name, rate in zip(PENALTIES, rates)}
    rows = np.arange(count, dtype=np.int32)
    return batch_of(
        Sampling(
            rows,
            rows,
            greedy,
            uniform,
            arrays,
            bias=bias,
            penalties=penalties,
            logprobs=logprobs,
            host_data=host_data or {},
        )
    )


def batch_of(sampling: Sampling, token_ids: Sequence[int] | None = None) -> Batch:
    """Return a batch of single-token rows that all sample. UNKNOWN in `token_ids` is known only on the device."""
    count = len(sampling.row_of)
    zeros = np.zeros(count, np.int32)
    return Batch(
        number=0,
        sequences=(),
        starts=zeros,
        counts=zeros + 1,
        sequence_indices=np.arange(count, dtype=np.int32),
        token_ids=zeros if token_ids is None else np.array(token_ids, np.int32),
        page_table=zeros[:, None],
        sampling=sampling,
    )


def penalties(rows: Sequence[int], sequence_indices: Sequence[int], fresh: Sequence[FreshSequence] = ()) -> Penalties:
    return Penalties(np.array(rows, np.int64), np.array(sequence_indices, np.int64), tuple(fresh))


def fresh(sequence_index: int, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> FreshSequence:
    return FreshSequence(sequence_index, np.array(prompt, np.int32), np.array(output, np.int32))


def bias(*entries: tuple[int, int, float]) -> Bias:
    rows, ids, values = zip(*entries)
    return Bias(np.array(rows, np.int64), np.array(ids, np.int64), np.array(values, np.float32))


def read(sampled: Sampled) -> HostTokens:
    return sampled.read([tensor.clone() for tensor in sampled.tensors()])


def random_logits(count: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def test_penalties_over_steps_equal_counting_from_scratch() -> None:
    running, scratch = Sampler(VOCAB, 8, CPU), Sampler(VOCAB, 8, CPU)
    prompts = {3: [1, 2, 2, 7], 5: [9], 0: []}
    outputs: dict[int, list[int]] = {sequence_index: [] for sequence_index in prompts}
    rng = np.random.default_rng(0)
    for step in range(25):
        # A sequence may miss a step, the rows' order changes, and the first row has no penalties.
        sequence_indices = [
            sequence_index
            for sequence_index in rng.permutation(list(prompts)).tolist()
            if step == 0 or rng.random() < 0.8
        ]
        rows, uniform = list(range(1, len(sequence_indices) + 1)), rng.random(len(sequence_indices) + 1)
        logits = random_logits(len(sequence_indices) + 1, step)
        known = [
            fresh(sequence_index, prompts[sequence_index], outputs[sequence_index])
            for sequence_index in sequence_indices
        ]
        news = known if step == 0 else []
        one = sampling(len(logits), uniform=uniform, penalties=penalties(rows, sequence_indices, news))
        two = sampling(len(logits), uniform=uniform, penalties=penalties(rows, sequence_indices, known))
        ids = running.sample(logits.clone(), one).ids.tolist()
        assert ids == scratch.sample(logits.clone(), two).ids.tolist()
        for sequence_index, token_id in zip(sequence_indices, ids[1:]):
            outputs[sequence_index].append(token_id)


def test_frequency_penalty_counts_the_tokens_sampled_before() -> None:
    sampler, start = Sampler(4, 1, CPU), [fresh(0)]
    ids = []
    for _ in range(6):
        p = penalties([0], [0], start)
        step = sampling(1, greedy=True, penalties=p, rates=(1.0, 0.0, 1.0))
        ids += sampler.sample(torch.tensor([[0.0, 2.5, 1.2, -9.0]]), step).ids.tolist()
        start = []
    assert ids == [1, 1, 2, 1, 2, 0]  # 2.5, 1.5, 1.2 (0.5 for 1), 0.5, 0.2 (-0.5 for 1), 0


def test_repetition_penalty_sees_the_prompt_and_presence_does_not() -> None:
    logits = torch.tensor([[1.0, 0.9]])
    for rates, expected in [((0.0, 0.0, 2.0), 1), ((2.0, 2.0, 1.0), 0)]:
        p = penalties([0], [0], [fresh(0, prompt=[0, 999])])
        assert Sampler(2, 1, CPU).sample(
            logits.clone(), sampling(1, greedy=True, penalties=p, rates=rates)
        ).ids.tolist() == [expected]


@pytest.mark.parametrize("rates", [(2.0, 2.0, 1.0), (0.0, 0.0, 2.0)])
def test_a_new_sequence_in_a_slot_starts_without_the_old_ones_tokens(
    rates: tuple[float, float, float],
) -> None:
    sampler, logits = Sampler(2, 4, CPU), torch.tensor([[1.0, 0.9]])

    def choose(*start: FreshSequence) -> list[int]:
        step = sampling(1, greedy=True, penalties=penalties([0], [2], start), rates=rates)
        return sampler.sample(logits.clone(), step).ids.tolist()

    assert choose(fresh(2, prompt=[0], output=[0])) == [1]
    assert choose(fresh(2)) == [0]
    assert choose() == [1]


def test_only_slots_that_ask_take_memory() -> None:
    sampler = Sampler(VOCAB, 100, CPU)
    seen = sampler._seen
    sampler.sample(random_logits(2), sampling(2))
    assert len(seen.counts) == 0
    for sequence_index, rows in [(90, 1), (7, 2), (55, 4), (90, 4), (1, 4), (2, 8)]:
        sampler.sample(
            random_logits(1), sampling(1, penalties=penalties([0], [sequence_index], [fresh(sequence_index)]))
        )
        assert len(seen.counts) == len(seen.in_prompt) == rows


def test_the_pool_never_outgrows_the_slots() -> None:
    sampler = Sampler(VOCAB, 3, CPU)
    for sequence_index in range(3):
        sampler.sample(
            random_logits(1), sampling(1, penalties=penalties([0], [sequence_index], [fresh(sequence_index)]))
        )
    assert len(sampler._seen.counts) == 3


def test_a_slot_cannot_start_from_a_token_that_only_the_device_knows() -> None:
    p = penalties([0], [0], [fresh(0, output=[4, -1])])
    with pytest.raises(ValueError, match="known tokens"):
        Sampler(VOCAB, 1, CPU).sample(random_logits(1), sampling(1, penalties=p))


def test_bias_adds_forbids_and_adds_up() -> None:
    entries = bias((0, 3, 50.0), (1, 3, 50.0), (1, 4, 90.0), (1, 4, -INF), (2, 5, 30.0), (2, 5, 30.0), (2, 6, 45.0))
    ids = Sampler(VOCAB, 1, CPU).sample(random_logits(4), sampling(4, greedy=True, bias=entries)).ids.tolist()
    assert ids == [3, 3, 5, int(random_logits(4)[3].argmax())]


def test_bias_comes_after_penalties() -> None:
    p = penalties([0], [0], [fresh(0, output=[0])])
    logits = torch.tensor([[-1.0, 3.5]])  # -1 * 2 + 6 = 4; bias first would give (-1 + 6) / 2 = 2.5
    step = sampling(1, greedy=True, penalties=p, bias=bias((0, 0, 6.0)), rates=(0.0, 0.0, 2.0))
    assert Sampler(2, 1, CPU).sample(logits, step).ids.tolist() == [0]


def test_forbidding_everything_breaks_the_row_only() -> None:
    entries = bias(*((1, token_id, -INF) for token_id in range(VOCAB)))
    asked = (LogprobParams(),) * 3
    tokens = read(Sampler(VOCAB, 1, CPU).sample(random_logits(3), sampling(3, bias=entries, logprobs=asked)))
    alone = read(Sampler(VOCAB, 1, CPU).sample(random_logits(3), sampling(3, logprobs=asked)))
    assert tokens.failed == [1]
    assert tokens.logprobs is not None
    assert alone.logprobs is not None
    assert tokens.logprobs[1] is None
    assert [tokens.tokens[0], tokens.tokens[2]] == [alone.tokens[0], alone.tokens[2]]
    assert [tokens.logprobs[0], tokens.logprobs[2]] == [alone.logprobs[0], alone.logprobs[2]]


def test_rows_that_ask_get_logprobs_before_truncation() -> None:
    logits = random_logits(4, seed=5)
    asked = (LogprobParams(top=3), None, LogprobParams(token_ids=(8, 2)), LogprobParams())
    step = sampling(
        4,
        greedy=[True, True, False, False],
        temperature=[0.0, 0.0, 0.5, 2.0],
        top_k=[1, 1, 2, 2**30],
        logprobs=asked,
        bias=bias((2, 8, 1.5)),
    )
    tokens = read(Sampler(VOCAB, 1, CPU).sample(logits.clone(), step))
    logits[2, 8] += 1.5
    expected = (logits.double() / torch.tensor([1, 1, 0.5, 2.0])[:, None]).log_softmax(-1)
    assert tokens.logprobs is not None
    first, second, third, fourth = tokens.logprobs
    assert second is None
    assert first is not None and third is not None and fourth is not None  # noqa: PT018
    order = logits[0].argsort(descending=True)[:3].tolist()
    assert [[token_id for _, token_id in top or []] for top in first.top] == [order]
    assert [p for p, _ in first.top[0] or []] == pytest.approx(expected[0, order].tolist(), rel=1e-5)
    assert (first.requested, third.top, fourth.top, fourth.requested) == ([], [], [], [])
    requested = third.requested[0] or []
    assert [token_id for _, token_id in requested] == [8, 2]
    assert [p for p, _ in requested] == pytest.approx(expected[2, [8, 2]].tolist(), rel=1e-5)
    for row, scores in [(0, first), (2, third), (3, fourth)]:
        chosen = expected[row, tokens.tokens[row][0]].item()
        assert scores.chosen == [(pytest.approx(chosen, rel=1e-5), tokens.tokens[row][0])]


@pytest.mark.parametrize("asking", [(0,), (0, 1, 2)])
def test_raw_logprobs_are_of_the_logits_before_anything_changes_them(asking: tuple[int, ...]) -> None:
    logits = random_logits(3, seed=5)
    step = sampling(
        3,
        temperature=[0.5, 2.0, 1.0],
        logprobs=tuple(LogprobParams(token_ids=(8,)) if row in asking else None for row in range(3)),
        bias=bias((0, 8, 4.0), (1, 8, -INF)),
        penalties=penalties([0], [0], [fresh(0, output=[1, 2])]),
        rates=(0.5, 0.5, 2.0),
        host_data={2: arrived(4, 5)},
    )
    tokens = read(Sampler(VOCAB, 1, CPU, raw_logprobs=True).sample(logits.clone(), step))
    processed = read(Sampler(VOCAB, 1, CPU).sample(logits.clone(), step))
    assert tokens.tokens == processed.tokens
    assert tokens.logprobs is not None
    expected = logits.double().log_softmax(-1)
    for row in asking:
        [found] = [tokens.logprobs[row]]
        assert found is not None
        [token_id] = tokens.tokens[row]
        assert found.chosen == [(pytest.approx(expected[row, token_id].item(), rel=1e-5), token_id)]
        assert found.requested == [[(pytest.approx(expected[row, 8].item(), rel=1e-5), 8)]]


def test_a_forbidden_token_has_a_logprob_that_json_can_say() -> None:
    step = sampling(1, bias=bias((0, 7, -INF)), logprobs=(LogprobParams(token_ids=(7,)),))
    tokens = read(Sampler(VOCAB, 1, CPU).sample(random_logits(1), step))
    assert tokens.logprobs is not None
    assert tokens.logprobs[0] is not None
    assert tokens.logprobs[0].requested == [[(float(np.finfo(np.float32).min), 7)]]


def test_nobody_asking_for_logprobs_gives_none() -> None:
    assert read(Sampler(VOCAB, 1, CPU).sample(random_logits(2), sampling(2))).logprobs is None
    step = sampling(2, logprobs=(None, None))
    assert read(Sampler(VOCAB, 1, CPU).sample(random_logits(2), step)).logprobs is None


def given(bitmask: Any = None, process: Any = None) -> HostData:
    data = HostData()
    data.give(bitmask, process=process)
    return data


def failed() -> HostData:
    data = HostData()
    data.fail()
    return data


def arrived(*allowed: int, process: Any = None, vocab_size: int = VOCAB) -> HostData:
    """Return host data that has arrived: a mask of these tokens, if any are given, and a processor."""
    return given(bitmask(list(allowed), vocab_size) if allowed else None, process)


class NoHostOperands(TorchDispatchMode):
    """Refuses operations on device tensors with host tensors, because each would be a separate copy."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        owned = [self._device.owns(tensor) for tensor in tensors]
        if any(owned) and not self._device.moving:
            assert all(is_own or not tensor.dim() for is_own, tensor in zip(owned, tensors)), func
        return func(*args, **(kwargs or {}))


def every_kind_of_step() -> Batch:
    """Return rows with every kind of truncation in mixed order, with penalties, biases and logprobs."""
    return sampling(
        8,
        greedy=[True, False, False, False, False, False, True, False],
        temperature=[1, 1, 2, 0.5, 1, 1, 1, 1],
        top_k=[2**30, 2**30, 5, 2**30, 2000, 2**30, 2**30, 7],
        top_p=[1, 1, 1, 0.7, 1, 1, 1, 0.9],
        min_p=[0, 0, 0, 0, 0, 0.2, 0, 0],
        uniform=[0.5, 0.1, 0.9, 0.3, 0.7, 0.6, 0.2, 0.8],
        bias=bias((1, 3, 4.0), (6, 9, -INF)),
        penalties=penalties([0, 4], [2, 1], [fresh(2, [5, 6], [7]), fresh(1, [999, 8])]),
        logprobs=(None, LogprobParams(top=2), None, LogprobParams(token_ids=(4, 5, 6)), *[None] * 4),
        host_data={
            3: arrived(*range(0, 3000, 7), vocab_size=3000),
            5: arrived(process=lambda logits: logits.mul_(-1.0)),
            6: arrived(40, 2999, vocab_size=3000),
        },
    )


@pytest.mark.parametrize("haste", [0.0, 0.5])
def test_a_step_brings_everything_to_the_device_in_one_copy(haste: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device, vocab_size = LateDevice(Random(1), haste), 3000
    uploads: list[Tensor] = []
    upload = device.upload
    monkeypatch.setattr(device, "upload", lambda host: uploads.append(host) or upload(host))
    logits = random_logits(8, vocab_size=vocab_size)
    expected = read(Sampler(vocab_size, 4, CPU).sample(logits.clone(), every_kind_of_step()))
    monkeypatch.setattr(native, "_is_host", lambda _logits: False)
    with torch.inference_mode(), device.forward():
        sampler = Sampler(vocab_size, 4, device)
        there = torch.empty(logits.shape, device=device.torch_device)
        there.copy_(logits)
        with NoHostOperands(device):
            sampled = sampler.sample(there, every_kind_of_step())
    host, copied = device.download(sampled.tensors())
    copied.wait()
    assert sampled.read(host) == expected
    assert len(uploads) == 1


def test_an_operand_of_the_host_is_noticed() -> None:
    device = LateDevice(Random(1))
    with device.forward(), NoHostOperands(device), pytest.raises(AssertionError):
        torch.zeros(3, device=device.torch_device)[torch.tensor([1])]


# --- rows that wait for host data ---


def test_a_mask_leaves_its_row_the_allowed_tokens_and_other_rows_alone() -> None:
    logits = random_logits(3)
    plain = read(Sampler(VOCAB, 3, CPU).sample(logits.clone(), sampling(3, greedy=True)))
    data = {1: arrived(4, 33, 40)}
    found = read(Sampler(VOCAB, 3, CPU).sample(logits.clone(), sampling(3, greedy=True, host_data=data)))
    best = max((4, 33, 40), key=lambda token_id: logits[1, token_id].item())
    assert found.tokens == [plain.tokens[0], [best], plain.tokens[2]]
    assert found.failed == []


def test_a_processor_changes_its_row_after_biases_and_before_the_mask() -> None:
    seen: list[float] = []

    def process(logits: Tensor) -> None:
        seen.append(logits[7].item())
        logits[9] = 200.0
        logits[7] = 100.0

    logits = torch.zeros(2, VOCAB)
    data = {1: arrived(7, 8, process=process)}
    step = sampling(2, greedy=True, bias=bias((1, 7, 3.0)), host_data=data)
    assert read(Sampler(VOCAB, 2, CPU).sample(logits, step)).tokens == [[0], [7]]
    assert seen == [3.0]


def test_a_mask_without_tokens_fails_its_row_only() -> None:
    nothing = given(np.zeros(2, np.int32))
    step = sampling(3, greedy=True, host_data={2: nothing})
    found = read(Sampler(VOCAB, 3, CPU).sample(random_logits(3), step))
    assert found.failed == found.stuck == [2]
    assert (
        found.tokens[:2] == read(Sampler(VOCAB, 3, CPU).sample(random_logits(3), sampling(3, greedy=True))).tokens[:2]
    )


def broken_processor(logits: Tensor) -> None:
    raise RuntimeError("of the request's own making")


@pytest.mark.parametrize(
    "data",
    [
        failed(),
        given(process=broken_processor),
        given(np.zeros(1, np.int32)),
        given(np.zeros(2, np.int64)),
    ],
    ids=["error", "processor", "short mask", "mask of another type"],
)
def test_a_constraint_that_fails_costs_its_row_only(data: HostData) -> None:
    step = sampling(2, greedy=True, host_data={0: data})
    found = read(Sampler(VOCAB, 2, CPU).sample(random_logits(2), step))
    assert found.failed == found.stuck == [0]


def test_logits_that_are_not_finite_are_no_fault_of_the_mask() -> None:
    logits = random_logits(2)
    logits[1] = float("nan")
    found = read(Sampler(VOCAB, 2, CPU).sample(logits, sampling(2, greedy=True, host_data={1: arrived(5)})))
    assert (found.failed, found.stuck) == ([1], [])


def test_a_row_whose_data_is_late_yields_nothing_until_its_last_token_is_known_again() -> None:
    sampler, late = Sampler(VOCAB, 2, CPU), HostData()
    asked = (LogprobParams(), LogprobParams())

    def step(data: HostData, token_id: int) -> HostTokens:
        made = sampling(2, greedy=True, host_data={1: data}, logprobs=asked)
        assert made.sampling is not None
        return read(sampler.sample(random_logits(2), batch_of(made.sampling, [UNKNOWN, token_id])))

    plain = read(Sampler(VOCAB, 2, CPU).sample(random_logits(2), sampling(2, greedy=True))).tokens
    missed = step(late, 3)
    assert (missed.tokens, missed.failed) == ([plain[0], []], [])
    assert missed.logprobs is not None
    assert missed.logprobs[1] is None
    assert step(arrived(5), UNKNOWN).tokens == [plain[0], []]  # launched after the token that did not arrive
    assert step(arrived(5), 3).tokens == [plain[0], [5]]
    assert step(arrived(6), UNKNOWN).tokens == [plain[0], [6]]


def test_penalties_do_not_count_a_token_that_did_not_come() -> None:
    sampler, late = Sampler(4, 1, CPU), HostData()

    def step(data: HostData, *start: FreshSequence) -> list[list[int]]:
        p = penalties([0], [0], start)
        made = sampling(1, greedy=True, penalties=p, rates=(9.0, 0.0, 1.0), host_data={0: data})
        return read(sampler.sample(torch.tensor([[0.3, 0.2, 0.1, 0.0]]), made)).tokens

    assert step(late, fresh(0, output=[1])) == [[]]
    assert step(arrived()) == [[0]]
    assert step(arrived()) == [[2]]


def test_penalties_count_draft_tokens_that_only_the_device_knows_beside_a_constraint() -> None:
    """A row of two draft tokens, and a row whose mask makes the step's arrays late."""
    known = [1, 5, 7, 2]  # the first row's last token and draft tokens; the second row's last token

    def chosen(token_ids: list[int], staged: Staged) -> list[list[int]]:
        made = sampling(
            4,
            greedy=True,
            penalties=penalties([0, 1, 2], [0, 0, 0], [fresh(0)]),
            rates=(9.0, 0.0, 1.0),
            host_data={3: arrived(6)},
        ).sampling
        batch = Batch(
            number=0,
            sequences=(),
            starts=np.zeros(2, np.int32),
            counts=np.array([3, 1], np.int32),
            sequence_indices=np.arange(2, dtype=np.int32),
            token_ids=np.array(token_ids, np.int32),
            page_table=np.zeros((2, 1), np.int32),
            sampling=replace(made, row_of=np.array([0, 0, 0, 1], np.int32)) if made is not None else None,
            drafts=Drafts(np.array([0], np.int32), np.array([2], np.int32)),
        )
        logits = torch.zeros(4, VOCAB)
        logits[:, 5], logits[:, 7] = 2.0, 1.0
        return read(Sampler(VOCAB, 4, CPU).sample(logits, batch, staged)).tokens

    expected = chosen(known, NOT_STAGED)
    assert expected == [[5], [7], [0], [6]]
    on_device = Staged(NOT_STAGED.host, NOT_STAGED.on_device, torch.tensor(known))
    assert chosen([known[0], DRAFT, DRAFT, known[3]], on_device) == expected


def test_data_that_comes_while_the_forward_runs_is_used() -> None:
    class Forward:
        """A fake forward that ends when its data has been delivered and its state was read once more."""

        num_looks = 0

        def is_reached(self) -> bool:
            self.num_looks += 1
            if self.num_looks == 5:
                late.give(arrived(8).bitmask)
            return self.num_looks > 5

    late = HostData()
    device = CpuDevice()
    device.record = Forward  # pyright: ignore[reportAttributeAccessIssue]
    step = sampling(1, greedy=True, host_data={0: late})
    assert read(Sampler(VOCAB, 1, device).sample(random_logits(1), step)).tokens == [[8]]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({**ROW_ARRAYS, "top_a": RowArray("float32", 0.0)}, "SamplingArrays has no field top_a"),
        ({**ROW_ARRAYS, "min_p": RowArray("float32", -1.0)}, "min_p is off at 0 in ops.sampling, not at -1"),
        ({name: ROW_ARRAYS[name] for name in ROW_ARRAYS if name != "min_p"}, "The sampler needs min_p"),
    ],
)
def test_a_parameter_that_the_sampler_would_ignore_is_an_error_at_import(declared: dict[str, RowArray], message: str):
    with pytest.raises(TypeError, match=message):
        check_row_arrays(declared)
