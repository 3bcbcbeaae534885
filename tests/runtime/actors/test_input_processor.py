from __future__ import annotations

from typing import Any

import pytest

import fake_core
import fake_runner
from runtime.actors.input_processor import InputProcessor
from runtime.constraint import HostData, Output
from runtime.errors import ContextOverflow, InvalidRequest
from runtime.request import LogprobParams, Request
from runtime.sampling_params import SamplingParams

PROCESSOR = InputProcessor(fake_core.make_plan(), fake_core.make_facts(eos_ids=frozenset({2})), None)


class CountedId(int):
    """A token id that counts its comparisons, to detect scans for the smallest and the largest id."""

    num_compared = 0

    def __lt__(self, other: int) -> bool:
        CountedId.num_compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        CountedId.num_compared += 1
        return int(self) > int(other)


def request(*ids: int, logprobs: LogprobParams | None = None, truncate: bool = False, **sampling: Any) -> Request:
    return Request(ids=ids, sampling=SamplingParams(**sampling), logprobs=logprobs, truncate=truncate)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (Request(), "text"),
        (request(), "input_ids"),
        (request(512), "input_ids"),
        (request(-1), "input_ids"),
        (request(3, stop_token_ids=frozenset({512})), "stop_token_ids"),
        (request(3, logit_bias={512: 1.0}), "logit_bias"),
        (request(3, logprobs=LogprobParams(token_ids=(512,))), "token_ids_logprob"),
        (request(3, allowed_token_ids=frozenset({512})), "allowed_token_ids"),
        (request(3, bad_words=("x",)), "bad_words"),
        (request(3, stop=("x",)), "stop"),
        (Request(ids=(3,), wants_embedding=True, sampling=SamplingParams(n=2)), "n"),
        (Request(ids=(3,), wants_embedding=True, logprobs=LogprobParams()), "return_logprob"),
    ],
)
def test_what_is_wrong_is_refused_at_once_by_its_name(wrong: Request, param: str):
    with pytest.raises(InvalidRequest) as caught:
        PROCESSOR.check(wrong)
    assert caught.value.param == param


def test_logprobs_behind_the_prompt_are_refused():
    with pytest.raises(InvalidRequest) as caught:
        PROCESSOR.prepare(request(1, 2, logprobs=LogprobParams(start=2)), (1, 2))
    assert caught.value.param == "logprob_start_len"


def test_a_prompt_is_scanned_once_however_many_choices_it_has():
    counts = []
    for n in (1, 64):
        CountedId.num_compared = 0
        ids = tuple(CountedId(3 + number) for number in range(100))
        asked = request(*ids, n=n)
        PROCESSOR.check(asked)
        _, sequences = PROCESSOR.prepare(asked, ids)
        fake_runner.Drive(vocab_size=512).add(*sequences)
        counts.append(CountedId.num_compared)
    assert counts[0] == counts[1] <= 4 * 100


def test_choices_have_seeds_of_their_own_and_end_at_the_models_tokens():
    asked = request(3, 4, n=3, seed=5, max_new_tokens=7)
    _, sequences = PROCESSOR.prepare(asked, (3, 4))
    assert len({sequence.seed for sequence in sequences}) == 3
    assert [(s.index, s.max_tokens, s.stop_ids) for s in sequences] == [(i, 9, {2}) for i in range(3)]


@pytest.mark.parametrize(("num_ids", "new"), [(513, 0), (512, 1), (510, 3)])
def test_what_exceeds_the_context_is_refused_or_cut(num_ids: int, new: int):
    ids = tuple([3] * num_ids)
    with pytest.raises(ContextOverflow):
        PROCESSOR.prepare(request(*ids, max_new_tokens=new), ids)
    fitted, [sequence] = PROCESSOR.prepare(request(*ids, max_new_tokens=new, truncate=True), ids)
    assert sequence.max_tokens == 512
    assert len(fitted.ids or ()) == sequence.num_prompt == min(num_ids, 512 - (new > 0))


def test_an_embedding_leaves_no_room_for_output():
    ids = tuple([3] * 512)
    _, [sequence] = PROCESSOR.prepare(Request(ids=ids, wants_embedding=True), ids)
    assert sequence.max_tokens == sequence.num_prompt == 512


def test_end_of_a_prompt_is_kept() -> None:
    long = tuple(range(10, 110)) * 10
    for keep, new, kept in (
        (5, 16, long[-5:]),
        (-1, 12, long[-500:]),
        (-1, None, long[-511:]),
        (4000, 16, None),
    ):
        asked = Request(ids=long, keep_last=keep, sampling=SamplingParams(max_new_tokens=new))
        PROCESSOR.check(asked)
        if kept is None:
            with pytest.raises(ContextOverflow):
                PROCESSOR.prepare(asked, long)
        else:
            found, [sequence] = PROCESSOR.prepare(asked, long)
            assert found.ids == tuple(sequence.ids) == kept


def test_allowed_tokens_make_a_mask() -> None:
    asked = request(3, allowed_token_ids=frozenset({0, 31, 32, 511}))
    found, _ = PROCESSOR.prepare(asked, (3,))
    assert found.constraint is not None
    data = HostData()
    found.constraint.host_data_after(0, Output([3], 1, 0, 0), data)
    bitmask = data.bitmask
    assert bitmask is not None
    assert (str(bitmask.dtype), len(bitmask)) == ("int32", 16)
    assert [token for token in range(512) if bitmask[token // 32] >> (token % 32) & 1] == [0, 31, 32, 511]
