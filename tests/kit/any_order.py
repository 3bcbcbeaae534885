"""A machine of random events: every page is accounted for, outputs equal those computed alone, all requests end."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_runner import Drive, make_plan, make_sequence, reference_embedding
from fake_storage import FAULTS, FakeStorage, FaultyStore
from late_host_data import LateForcedTokens, LateHostData
from runtime.actors.sessions import Sessions
from runtime.constraint import Output
from runtime.errors import ContextOverflow, StepFailed
from runtime.kv_cache.host_tier import POLICIES
from runtime.kv_cache.storage_tier import StorageTier
from runtime.replay.player import replay
from runtime.request import Adapter, Delta, Finish, LogprobParams, Request, Service, SessionParams
from runtime.sampling_params import SamplingParams
from runtime.scheduler import budget
from runtime.sequence import Sequence
from scripted_drafts import script_drafts

VOCAB = 5  # small, so that prompts share prefixes by chance and outputs contain stop ids


class AnyOrder(RuleBasedStateMachine):
    drive: Drive
    records = False  # whether a record of the schedule is written and replayed
    record: Path | None = None
    stores = False  # whether every machine has a store
    storage: FakeStorage | None = None
    num_steps = 0  # of all examples

    @initialize(
        page_size=st.sampled_from([1, 1, 1, 4, 4, 4, 16, 64]),
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
        storage=st.sampled_from([None, "waits", "waits", "goes on"]),
        pinnable_share=st.sampled_from([0.0, 0.5]),
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
        storage: str | None,
        pinnable_share: float,
        **plan: Any,
    ):
        self.late = LateHostData(VOCAB, is_held=lambda output_ids: True)
        self.added: list[Sequence] = []
        # sequences that were ended from outside: aborted, stopped early, lost, broken
        self.interrupted: dict[Sequence, str] = {}
        self.stretch = max(1, page_size // 4)  # prompts are longer if pages are larger
        num_tokens *= self.stretch
        if self.stores:
            window, num_states = None, 0
        # shrinks the estimate for long outputs, of which admission reserves only a part
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(budget, "RESERVED_OUTPUT_TOKENS", reserved)
        self.max_drafts = max_drafts
        if self.records:
            self.max_drafts = 0  # the record does not have the test's own drafts
            self.folder = TemporaryDirectory()
            self.record = Path(self.folder.name) / "record"
        if num_states:
            plan["draft_topk"] = 1
        plan |= {"new_token_ratio": ratio, "min_new_token_ratio": 0.0, "max_drafts": self.max_drafts}
        if window is not None or num_states:
            num_host_pages = num_tier_pages = 0
        if self.records:
            storage = None
        if self.stores:
            storage, num_tier_pages, prefix = storage or "waits", max(3, num_tier_pages), True
        self.drive = Drive(
            make_plan(**plan),
            num_pages=num_tokens // page_size,
            page_size=page_size,
            prefix=prefix,
            depth=depth,
            vocab_size=VOCAB,
            window=window,
            num_windowed=int(windowed_share * num_tokens // page_size),
            num_states=max(num_states, 2 + max_drafts) if num_states else 0,  # at least those of one sequence
            num_host_pages=num_host_pages,
            num_tier_pages=num_tier_pages,
            write_policy=write_policy,
            step_pages=step_pages,
            num_pinnable=int(pinnable_share * num_tokens // page_size),
            storage=None if storage is None else lambda tier: StorageTier(tier, waits=storage == "waits"),
            record=self.record,
        )
        if self.drive.cache.storage is not None:
            self.storage = FakeStorage(self.drive.cache.storage, self.drive.scheduler, self.drive.runner, FaultyStore())
            self.drive.on_idle = self.storage.work
        self.sessions = Sessions(None)
        self.session_names = [self.sessions.open(2**20) for _ in range(2)]
        self.turns: dict[str, dict[str, list[int]]] = {name: {} for name in self.session_names}
        # Label of each request of a session -> label of the request that it continued.
        self.continued: dict[str, dict[str, str | None]] = {name: {} for name in self.session_names}
        self.unended: list[Sequence] = []  # sequences of sessions that have not ended
        self.stored: list[list[int]] = []  # prompts in the store
        if self.stores and self.storage is not None:
            self._fill_store(self.storage)
            faults, work = cycle([None, *FAULTS, None]), self.storage.work
            self.drive.on_idle = lambda: work(next(faults))
        if not depth:  # a sequence must not have another step in flight if a step may bring several tokens
            self.drive.runner.tokens_per_step = tokens_per_step

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
        pin=st.sampled_from([None, None, "first", "second"]),
        owner=st.sampled_from(["", "other"]),
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
        owner: str,
        pin: str | None,
        **values: Any,
    ):
        if values["adapter"] is not None:
            values["namespace"] = (values["namespace"], values["adapter"].name)
        prompt = self._stretched(prompt)
        if repeat % 3 == 0 and self.added:  # continue an earlier conversation
            length = (14 + repeat % 8) * self.stretch
            prompt = (self.added[repeat % len(self.added)].ids + prompt)[:length]
        elif repeat % 3 == 1 and self.stored:
            prompt = self.stored[repeat % len(self.stored)] + prompt[:2]
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
            owner=owner,
            service=Service(pin=pin),
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
        self._enqueue(*choices)

    def _fill_store(self, storage: FakeStorage) -> None:
        """Store some prompts, and empty the caches."""
        for number in range(4):
            self.stored.append(self._stretched([number % 2, number // 2, *[number % 2] * 8]))
            self.drive.add(make_sequence(self.stored[-1], max_new_tokens=1))
            self.drive.run()
            while storage.work():
                pass
        assert self.drive.scheduler.flush()

    def _stretched(self, prompt: list[int]) -> list[int]:
        return [token for token in prompt for _ in range(self.stretch)]

    def _enqueue(self, *choices: Sequence) -> bool:
        """Queue the choices of a request. Return False if its prompt is too long."""
        first = choices[0]
        needed = first.num_prompt + (first.max_tokens > first.num_prompt)
        if needed > self.drive.cache.num_tokens:
            with pytest.raises(ContextOverflow):
                self.drive.add(*choices)
            return False
        self.drive.add(*choices)
        self.added += choices
        script_drafts(self.drive.scheduler, self.drive.expected, VOCAB, self.max_drafts)
        return True

    @rule(
        which=st.integers(0, 1000),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        max_new_tokens=st.integers(1, 6),
        offset=st.sampled_from([0, 0, 3, -2]),
        replace=st.booleans(),
        drop_output=st.booleans(),
    )
    def add_to_session(
        self, which: int, prompt: list[int], max_new_tokens: int, offset: int, replace: bool, drop_output: bool
    ):
        name = self.session_names[which % 2]
        turns = self.turns[name]
        rid = [None, *turns][which // 2 % (1 + len(turns))]
        params = SessionParams(name, rid, offset, replace, drop_output)
        request = Request(
            sampling=SamplingParams(max_new_tokens=max_new_tokens), session=params, label=f"{len(self.added)} {which}"
        )
        ids = self.sessions.continued(request, self._stretched(prompt))
        before: list[int] = []
        if rid is not None:
            before = turns[rid][: -1 - int(turns[rid][-1])] if drop_output else turns[rid][:-1]
            before = before[:offset] if offset else before
        assert list(ids) == before + self._stretched(prompt)
        if replace:  # forget the ended requests that continue `rid`, directly or through others
            for later in [label for label in turns if rid in self._earlier(name, label)]:
                del turns[later]
        self.continued[name][request.label] = rid
        sequence = make_sequence(ids, request=request)
        if self._enqueue(sequence):
            self.unended.append(sequence)

    def _earlier(self, name: str, label: str) -> list[str | None]:
        """Return the requests that a request continues, directly or through others. The last one is None."""
        found = [self.continued[name][label]]
        while found[-1] is not None:
            found.append(self.continued[name][found[-1]])
        return found

    @invariant()
    def end_turns(self):
        """Tell the sessions which requests have ended. A turn is kept as its tokens and the number of output tokens."""
        for sequence in [each for each in getattr(self, "unended", ()) if each.finish is not None]:
            self.unended.remove(sequence)
            params, label = sequence.request.session, sequence.request.label
            assert params is not None
            deltas = [d for d in self.drive.deltas if d.request_id == sequence.request.id and d.finish is not None]
            error = StepFailed("") if sequence in self.interrupted or not deltas else None
            live: Any = SimpleNamespace(request=sequence.request, sequences=[sequence], ends=deltas)
            self.sessions.ended(live, error)
            if error is None:
                output = self.drive.expected(sequence)
                prompt = sequence.ids[: sequence.num_prompt]
                self.turns[params.id][label] = [*prompt, *output, len(output)]

    @precondition(lambda self: self.storage is not None)
    @rule(
        event=st.sampled_from(["begin_load", "begin_load", "begin_save", "begin_save", "end", "end", "wait", "clear"]),
        fault=st.sampled_from([None, None, None, *FAULTS]),
    )
    def move_pages(self, event: str, fault: str | None):
        assert self.storage is not None
        if event == "end":
            self.storage.end(fault)
        elif event == "wait":
            self.storage.give_up_waiting()
        else:
            getattr(self.storage, event)()
        self.drive.scheduler.check()

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

    @rule(fault=st.sampled_from([None, None, *FAULTS]))
    def run_a_while(self, fault: str | None):
        for _ in range(12):
            if self.drive.step() is None and self.storage is not None:
                self.storage.work(fault)

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
        lost = self.drive.scheduler.fail(self._drop())
        assert [s for s in alive if s.finish is not None] == [s for s in alive if s.request.id in lost]
        self.interrupted |= {s: "lost" for s in alive if s.request.id in lost}
        self.drive.scheduler.check()
        assert self.drive.cache.num_free == self.drive.cache.num_pages

    @precondition(lambda self: self.drive.runner.num_in_flight)
    @rule()
    def run_out_of_memory(self):
        alive = [sequence for sequence in self.added if sequence.finish is None]
        batches = self._drop()
        lost = self.drive.scheduler.give_up_newest(batches)
        in_step = {s.request.id for s in batches[0].sequences if s in alive}
        assert lost == ([max(in_step)] if in_step else [])
        self.interrupted |= {s: "lost" for s in alive if s.request.id in lost}
        self.drive.scheduler.check()
        assert self.drive.cache.num_free == self.drive.cache.num_pages

    def _drop(self) -> list[Any]:
        return self.drive.runner.drop(() if self.storage is None else self.storage.pages_in_use())

    def teardown(self):
        if not hasattr(self, "drive"):
            return
        self.late.deliver_all()
        work = sum(sequence.max_tokens for sequence in self.added)
        try:
            self.drive.run(max_steps=100 + 4 * work + 20 * len(self.added))
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
        if self.storage is not None:
            self._restart(self.storage)
        AnyOrder.num_steps += self.drive.num_steps
        assert self.drive.scheduler.flush()
        assert self.drive.cache.num_free == self.drive.cache.num_pages
        assert self.drive.cache.host is None or not self.drive.cache.host.num_used

    def _restart(self, storage: FakeStorage) -> None:
        """Empty the caches, and compute some prompts again with the stored pages."""
        while storage.work():
            pass
        assert self.drive.scheduler.flush()
        self.drive.scheduler.check()
        self.drive.runner.failed_requests.clear()
        for old in self.added[:3]:
            if old.constraint is None and not old.request.wants_embedding and old.request.adapter is None:
                again = make_sequence(old.ids[: old.num_prompt], seed=old.seed, namespace=old.namespace)
                if again.num_prompt < self.drive.cache.num_tokens:
                    self.drive.add(again)
                    self.drive.run()
                    self._check_complete(again, [d for d in self.drive.deltas if d.request_id == again.request.id])
        while storage.work():
            pass

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


class StoredOrder(AnyOrder):
    """The same with a host tier and a store."""

    stores = True


class RecordedOrder(AnyOrder):
    """The same with a record, whose replay makes the same decisions."""

    records = True
