"""For every order of events, every page is accounted for, outputs equal those computed alone, and all requests end."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fake_runner import Drive, make_plan, make_sequence, reference_embedding
from late_host_data import LateForcedTokens, LateHostData
from runtime.constraint import Output
from runtime.errors import ContextOverflow
from runtime.kv_cache.host_tier import POLICIES
from runtime.replay.player import replay
from runtime.request import Adapter, Delta, Finish, LogprobParams, Request
from runtime.scheduler import budget
from runtime.sequence import Sequence
from scripted_drafts import script_drafts

VOCAB = 5  # small, so that prompts share prefixes by chance and outputs contain stop ids


class AnyOrder(RuleBasedStateMachine):
    drive: Drive
    records = False  # whether a record of the schedule is written and replayed
    record: Path | None = None

    @initialize(
        page_size=st.sampled_from([1, 4]),
        num_tokens=st.sampled_from([12, 20, 32, 64]),
        max_running=st.sampled_from([1, 3, 8]),
        chunk_tokens=st.sampled_from([None, 4, 8]),
        max_prefill_tokens=st.sampled_from([4, 10, 100]),
        mixed=st.booleans(),
        prefix=st.booleans(),
        depth=st.integers(0, 2),
        tokens_per_step=st.sampled_from([1, 3]),
        ratio=st.sampled_from([0.0, 0.0, 0.5]),
        policy=st.sampled_from(["fcfs", "lpm", "lof", "random", "dfs-weight"]),
        reserved=st.sampled_from([1, 4, 4096]),
        priorities=st.booleans(),
        max_new_sequences=st.sampled_from([None, None, 1]),
        window=st.sampled_from([None, None, 1, 3, 6, 11]),
        num_states=st.sampled_from([0, 0, 2, 7, 40]),
        windowed_share=st.sampled_from([0.0, 0.5, 1.0]),
        max_forced=st.sampled_from([0, 8]),
        max_drafts=st.sampled_from([0, 1, 3, 8]),
        max_step_drafts=st.sampled_from([2, 256]),
        overlap_drafts=st.booleans(),
        overlap_draws=st.booleans(),
        draft_methods=st.sampled_from(["lookup", "model", "both"]),
        draft_topk=st.sampled_from([1, 1, 2, 3]),
        max_tree_drafts=st.sampled_from([2, 6, 24]),
        forced_share=st.sampled_from([0.0, 0.0, 1.0]),
        num_host_pages=st.sampled_from([0, 0, 1, 5, 100]),
        num_tier_pages=st.sampled_from([0, 1, 3, 12, 100]),
        write_policy=st.sampled_from(POLICIES),
        step_pages=st.sampled_from([1, 2, 64]),
        adapter_slots=st.sampled_from([1, 2, 8]),
        adapters_fifo=st.booleans(),
    )
    def start(
        self,
        *,
        page_size: int,
        num_tokens: int,
        prefix: bool,
        depth: int,
        tokens_per_step: int,
        ratio: float,
        reserved: int,
        window: int | None,
        windowed_share: float,
        num_states: int,
        num_host_pages: int,
        num_tier_pages: int,
        write_policy: str,
        step_pages: int,
        max_drafts: int,
        **plan: Any,
    ):
        # shrinks the estimate for long outputs, of which admission reserves only a part
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(budget, "RESERVED_OUTPUT_TOKENS", reserved)
        # recurrent states can go back by one token only
        self.max_drafts = min(max_drafts, 1) if num_states else max_drafts
        if self.records:
            self.max_drafts = 0  # the record does not have the test's own drafts
            self.folder = TemporaryDirectory()
            self.record = Path(self.folder.name) / "record"
        if num_states or window is not None:
            plan["draft_topk"] = 1
        plan |= {"new_token_ratio": ratio, "min_new_token_ratio": 0.0, "max_drafts": self.max_drafts}
        self.drive = Drive(
            make_plan(**plan),
            num_pages=num_tokens // page_size,
            page_size=page_size,
            prefix=prefix,
            depth=depth,
            vocab_size=VOCAB,
            window=window,
            num_windowed=int(windowed_share * num_tokens // page_size),
            num_states=num_states,
            num_host_pages=0 if window is not None or num_states else num_host_pages,
            num_tier_pages=0 if window is not None or num_states else num_tier_pages,
            write_policy=write_policy,
            step_pages=step_pages,
            record=self.record,
        )
        if not depth:  # a sequence must not have another step in flight if a step may bring several tokens
            self.drive.runner.tokens_per_step = tokens_per_step
        self.late = LateHostData(VOCAB, is_held=lambda output_ids: True)
        self.added: list[Sequence] = []
        # sequences that were ended from outside: aborted, stopped early, lost, broken
        self.interrupted: dict[Sequence, str] = {}

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        repeat=st.integers(0, 1000),
        max_new_tokens=st.integers(0, 3) | st.integers(8, 40),
        stop_ids=st.sampled_from([(), (), (3,)]),
        num_choices=st.sampled_from([1, 1, 2, 3]),
        seed=st.integers(0, 2),
        namespace=st.sampled_from([None, "salt"]),
        adapter=st.sampled_from([None, None, None, *(Adapter(number, str(number), "") for number in (1, 2, 3))]),
        urgency=st.sampled_from([0, 0, 5, 20, 40]),
        logprob_start=st.sampled_from([-1, -1, 0, 3]),
        wants_embedding=st.sampled_from([False, False, False, True]),
        constrained=st.sampled_from([False, True]),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
    )
    def add(
        self,
        *,
        prompt: list[int],
        repeat: int,
        num_choices: int,
        seed: int,
        logprob_start: int,
        wants_embedding: bool,
        constrained: bool,
        **values: Any,
    ):
        if values["adapter"] is not None:
            values["namespace"] = (values["namespace"], values["adapter"].name)
        if repeat % 3 == 0 and self.added:  # continue an earlier conversation
            prompt = (self.added[repeat % len(self.added)].ids + prompt)[: 14 + repeat % 8]
        logprobs = LogprobParams(start=logprob_start) if 0 <= logprob_start < len(prompt) else None
        if wants_embedding:
            num_choices = 1
        choices: list[Sequence] = []

        def forced(choice: int, output: Output) -> tuple[int, ...]:
            """Return up to five of the choice's next tokens at some positions."""
            count = (7 * output.num_output + 3 * choice + repeat) % 6
            return tuple(self.drive.expected(choices[choice])[output.num_output :][:count])

        first = make_sequence(
            prompt,
            seed=seed,
            logprobs=logprobs,
            n=num_choices,
            wants_embedding=wants_embedding,
            constraint=LateForcedTokens(self.late, forced) if constrained and not wants_embedding else None,
            **values,
        )
        shared = {name: values[name] for name in ("stop_ids", "namespace", "urgency")}
        others = [
            make_sequence(prompt, index=i, seed=seed + i, request=first.request, **shared)
            for i in range(1, num_choices)
        ]
        choices += [first, *others]
        needed = len(prompt) + (values["max_new_tokens"] > 0 and not wants_embedding)
        if needed > self.drive.cache.num_tokens:
            with pytest.raises(ContextOverflow):
                self.drive.add(first, *others)
        else:
            self.drive.add(first, *others)
            self.added += [first, *others]
            script_drafts(self.drive.scheduler, self.drive.expected, VOCAB, self.max_drafts)

    @precondition(lambda self: self.late.num_held)
    @rule(which=st.integers(0, 1000))
    def deliver_host_data(self, which: int):
        self.late.deliver(which % self.late.num_held)

    @rule(is_held=st.booleans())
    def hold_host_data(self, is_held: bool):
        self.late.is_held = lambda output_ids: is_held

    @rule(step_s=st.sampled_from([None, 0.0, 1.0]))
    def note_step_time(self, step_s: float | None):
        """Record step times, on which appending or sampling of forced tokens depends."""
        self.drive.scheduler.note_step_time(step_s)

    @rule(num_steps=st.integers(1, 3))
    def step(self, num_steps: int):
        for _ in range(num_steps):
            self.drive.step()

    @rule()
    def run_a_while(self):
        for _ in range(12):
            self.drive.step()

    @precondition(lambda self: self.drive.runner.num_in_flight)
    @rule()
    def apply_early(self):
        self.drive.apply()

    @precondition(lambda self: self.added)
    @rule(which=st.integers(0, 1000), how=st.sampled_from(["abort", "end_choice", "fail"]))
    def interrupt(self, which: int, how: str):
        sequence = self.added[which % len(self.added)]
        if how == "abort":
            self._abort(sequence.request)
        elif how == "end_choice":
            self._end_choice(sequence)
        else:
            self._interrupt([s for s in self.added if s.request is sequence.request], "failed")
            self.drive.runner.failed_requests.add(sequence.request.id)

    def _abort(self, request: Request):
        choices = [s for s in self.added if s.request is request]
        self._interrupt(choices, "aborted")
        self.drive.deltas += self.drive.scheduler.abort(choices, Finish("abort", message="gone"))
        self.drive.scheduler.check()

    def _end_choice(self, sequence: Sequence):
        self._interrupt([sequence], "stopped")
        self.drive.scheduler.end(sequence)
        self.drive.scheduler.check()

    @rule(flush=st.booleans())
    def flush_or_fail(self, flush: bool):
        if flush:
            busy = self.drive.scheduler.num_waiting + self.drive.scheduler.num_running
            assert self.drive.scheduler.flush() == (busy == 0)
            self.drive.scheduler.check()
            return
        alive = [sequence for sequence in self.added if sequence.finish is None]
        lost = self.drive.scheduler.fail(self.drive.runner.drop())
        assert [s for s in alive if s.finish is not None] == [s for s in alive if s.request.id in lost]
        self.interrupted |= {s: "lost" for s in alive if s.request.id in lost}
        self.drive.scheduler.check()
        assert self.drive.cache.num_free == self.drive.cache.num_pages

    @precondition(lambda self: self.drive.runner.num_in_flight)
    @rule()
    def run_out_of_memory(self):
        alive = [sequence for sequence in self.added if sequence.finish is None]
        batches = self.drive.runner.drop()
        lost = self.drive.scheduler.give_up_newest(batches)
        in_step = {s.request.id for s in batches[0].sequences if s in alive}
        assert lost == ([max(in_step)] if in_step else [])
        self.interrupted |= {s: "lost" for s in alive if s.request.id in lost}
        self.drive.scheduler.check()
        assert self.drive.cache.num_free == self.drive.cache.num_pages

    def teardown(self):
        if not hasattr(self, "drive"):
            return
        self.late.deliver_all()
        work = sum(sequence.max_tokens for sequence in self.added)
        try:
            self.drive.run(max_steps=100 + 4 * work)
            if self.record is not None:
                counts = replay(self.record)
                assert counts.tokens == sum(len(delta.ids) for delta in self.drive.deltas)
                assert counts.failures == []
        finally:
            self.patch.undo()
        for sequence in self.added:
            deltas = [d for d in self.drive.deltas if d[:2] == (sequence.request.id, sequence.index)]
            if sequence in self.interrupted:
                self._check_interrupted(sequence, deltas)
            else:
                self._check_complete(sequence, deltas)
        assert self.drive.cache.num_used == 0
        assert self.drive.scheduler.flush()
        assert self.drive.cache.num_free == self.drive.cache.num_pages
        assert self.drive.cache.host is None or not self.drive.cache.host.num_used

    def _interrupt(self, sequences: list[Sequence], how: str) -> None:
        for sequence in sequences:
            if sequence.finish is None:
                self.interrupted[sequence] = how

    def _check_interrupted(self, sequence: Sequence, deltas: list[Delta]) -> None:
        how, output = self.interrupted[sequence], self.drive.output(sequence)
        assert output == self.drive.expected(sequence)[: len(output)]
        assert len([d for d in deltas if d.finish]) == (how in ("aborted", "failed"))

    def _check_complete(self, sequence: Sequence, deltas: list[Delta]) -> None:
        expected = self.drive.expected(sequence)
        assert self.drive.output(sequence) == expected
        if sequence.request.wants_embedding:
            (delta,) = deltas
            assert (delta.finish, delta.embedding) == (Finish("stop"), reference_embedding(sequence))
            return
        assert [d.finish is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
        stopped = bool(expected) and expected[-1] in sequence.stop_ids
        finish = deltas[-1].finish
        assert finish is not None
        assert finish.kind == ("stop" if stopped else "length")
        assert deltas[-1].usage[:2] == (sequence.num_prompt, len(expected))
        params = sequence.request.logprobs
        if params is not None:
            ids = sequence.ids[params.start : sequence.num_prompt]
            found = [d.prompt_logprobs.chosen for d in deltas if d.prompt_logprobs is not None]
            assert found == [[(None, ids[0]), *((-float(token), token) for token in ids[1:])]]


AnyOrder.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestAnyOrder = AnyOrder.TestCase


class RecordedOrder(AnyOrder):
    """The same with a record, whose replay makes the same decisions."""

    records = True


RecordedOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestRecordedOrder = RecordedOrder.TestCase
