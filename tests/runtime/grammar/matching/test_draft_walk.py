"""The masks after drafts are those of an output that has the drafts, up to a draft that is not allowed."""

from __future__ import annotations

import asyncio
from random import Random

import numpy as np
import pytest

import grammars
from runtime.constraint import Constraint, DraftData, DraftedConstraint, HostData, Output, allows
from runtime.grammar.backends.with_llguidance import LLGuidanceBackend
from runtime.grammar.compiler import GrammarCompiler
from runtime.grammar.matching.position import Ends
from runtime.grammar_spec import Grammar, ThinkingLimit

GRAMMARS = [
    Grammar("regex", "(ab|ac){1,9}d+"),
    Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 1}'),
    Grammar("regex", "[a-d]+", begins_after="b\n"),
    Grammar("regex", "abcabcabcabcabc[x-z]{3}"),  # forced tokens
]
NUM_DRAFTS = 5


async def arrived(data: HostData) -> HostData:
    came, loop = asyncio.Event(), asyncio.get_running_loop()
    data.when_there(lambda: loop.call_soon_threadsafe(came.set))
    await asyncio.wait_for(came.wait(), 60)
    return data


async def data_after(constraint: Constraint, ids: list[int], num_before: int = 0) -> HostData:
    data = HostData()
    constraint.host_data_after(0, Output(ids, 0, num_before, len(ids)), data)
    return await arrived(data)


def same_mask(one: HostData, other: HostData) -> bool:
    if one.bitmask is None or other.bitmask is None:
        return one.bitmask is other.bitmask
    return np.array_equal(one.bitmask, other.bitmask)


def choose(random: Random, data: HostData) -> int:
    """Return a random token that the data allows, or one that ends the output if there is none."""
    vocab_size, eos_ids = grammars.tokenizer().vocab_size, grammars.tokenizer().eos_ids
    if data.bitmask is None:
        return random.randrange(60, 300)
    allowed = [token_id for token_id in range(vocab_size) if allows(data.bitmask, token_id)]
    return random.choice([token_id for token_id in allowed if token_id not in eos_ids] or [*eos_ids])


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("number", range(len(GRAMMARS)))
async def test_masks_after_drafts_are_those_of_the_output(number: int, thinks: bool) -> None:
    tokenizer = grammars.tokenizer()
    size, eos_ids = tokenizer.vocab_size, tokenizer.eos_ids
    compiler = GrammarCompiler(
        lambda: LLGuidanceBackend.load(tokenizer, size, eos_ids, None), tokenizer, size, eos_ids, max_forced=8
    )
    random, num_equal, num_skipped = Random(number), 0, 0

    async def make() -> DraftedConstraint:
        inner = await compiler.constraint(GRAMMARS[number], Ends(eos_ids, frozenset(), 3, avoid=False))
        made = compiler.limited(ThinkingLimit(4, None, "b"), inner) if thinks else inner
        assert made.takes_drafts
        return made

    try:
        for trial in range(8):
            constraint, ids = await make(), list[int]()
            first = await data_after(constraint, ids)
            while len(ids) < 1 + trial and not eos_ids & set(ids):
                ids.append(choose(random, first))
                first = await data_after(constraint, ids, len(ids) - 1)
            expected, proposed = [first], list[int]()
            for _ in range(NUM_DRAFTS):
                wrong = random.random() < 0.1 or expected[-1].failed
                proposed.append(random.randrange(size) if wrong else choose(random, expected[-1]))
                expected.append(await data_after(await make(), ids + proposed))
            drafts = DraftData(NUM_DRAFTS)
            if trial % 2:  # the ids may be known before or after the output
                drafts.propose(proposed)
            constraint.draft_data_after(0, Output(ids, 0, len(ids), len(ids)), first, drafts)
            drafts.propose(proposed)
            for token_id, before, wanted, data in zip(proposed, expected, expected[1:], drafts.after):
                await arrived(data)
                if before.failed or not (before.bitmask is None or allows(before.bitmask, token_id)):
                    break  # this draft is rejected
                if data.skipped:
                    num_skipped += 1
                    break
                assert same_mask(data, wanted)
                num_equal += 1
            # The drafts left the constraint unchanged.
            if not first.failed and not eos_ids & set(ids):
                ids.append(choose(random, first))
                goes_on = await data_after(constraint, ids, len(ids) - 1)
                assert same_mask(goes_on, await data_after(await make(), ids))
    finally:
        compiler.close()
    assert num_equal > 4
    assert num_skipped < num_equal
