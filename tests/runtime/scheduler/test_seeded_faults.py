"""The machines of `any_order` find each of these faults, which are put into the source on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from textwrap import dedent
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import run_state_machine_as_test

from any_order import AnyOrder, StoredOrder
from runtime.actors.sessions import Sessions
from runtime.kv_cache import page_keys, prefix_cache
from runtime.kv_cache.host_pool import HostPool
from runtime.kv_cache.host_tier import HostTier
from runtime.kv_cache.pins import Pins
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.radix_tree import RadixTree
from runtime.kv_cache.storage_tier import StorageTier
from runtime.page_store.protocol import CheckedStore
from runtime.scheduler.batch_builder import BatchBuilder
from runtime.scheduler.scheduler import Scheduler

MAX_EXAMPLES = 3000


class Fault(NamedTuple):
    place: Any  # class or module
    name: str  # of its function
    old: str
    new: str
    machine: type[AnyOrder] = AnyOrder


FAULTS = {
    "eviction frees pages that are locked": Fault(
        RadixTree, "_count_lock", "current.locks += 1", "current.locks += bool(current.children) or not current.locks"
    ),
    "a retracted sequence starts before its last token is known": Fault(
        BatchBuilder, "_admit", "if sequence.num_pending:", "if False:"
    ),
    "the last known token is taken from the cache": Fault(
        prefix_cache, "reusable_tokens", "len(sequence.ids) - 1", "len(sequence.ids)"
    ),
    "a token that will be computed again is shared": Fault(
        prefix_cache, "_num_settled", "- (sequence.constraint is not None)", ""
    ),
    "replaced pages are freed too early": Fault(
        BatchBuilder, "_compute", "step.duplicates.append((sequence, duplicates))", "self._cache.free(duplicates.pages)"
    ),
    "namespaces share pages on the host": Fault(page_keys, "_root", "repr(namespace)", '""'),
    "pages are copied back from the wrong place": Fault(
        HostPool, "swap_in", "start = len(sequence.pages)", "start = len(sequence.pages) - 1"
    ),
    "a host page is reused while it is being restored": Fault(
        HostTier, "keep", "self._kept = frozenset(keys)", "self._kept = frozenset()", StoredOrder
    ),
    "a host page is reused while it is being saved": Fault(
        StorageTier, "detained", "self.saving.get(key) is not entry", "True", StoredOrder
    ),
    "pages enter the tier although the store did not have them": Fault(
        StorageTier,
        "end_load",
        "for number in reversed(range(count)):",
        "for number in reversed(range(len(pages))):",
        StoredOrder,
    ),
    "checksums are not compared": Fault(CheckedStore, "get", "_checksum(key, page) == checksum", "True", StoredOrder),
    "a store keeps pages whose KV may be wrong": Fault(
        StorageTier,
        "drop_unsaved",
        "(self._new, self._copied, self._ready, *(each for _, each in self._pushed))",
        "(self._new,)",
        StoredOrder,
    ),
    "evicted pages stay pinned": Fault(Pins, "settle", "if not lost:", "if lost:"),
    "sessions keep too many tokens": Fault(Sessions, "_before", "tokens[: params.offset]", "tokens[:]"),
    "recomputed sequences count old steps": Fault(
        Scheduler, "_recompute", "sequence.num_pending = sequence.num_superseded = ", "sequence.num_superseded = "
    ),
    "a discarded prefix stays in the tree": Fault(
        PrefixCache, "discard", "self._free_shared(pages)", "self.free(pages[1:])"
    ),
}


def put(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Replace a function by one in which `fault.old`, which occurs once, reads `fault.new`."""
    function: Callable[..., Any] = getattr(fault.place, fault.name)
    source = dedent(inspect.getsource(function))
    assert source.count(fault.old) == 1
    found: dict[str, Any] = {}
    names = inspect.getmodule(function).__dict__  # type: ignore[union-attr]
    exec(compile(source.replace(fault.old, fault.new), "<fault>", "exec"), names, found)
    monkeypatch.setattr(fault.place, fault.name, found[fault.name])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_the_machine_finds_a_fault(name: str, monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch, FAULTS[name])
    few = settings(
        max_examples=MAX_EXAMPLES,
        stateful_step_count=50,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    found: Exception | None = None
    try:
        run_state_machine_as_test(FAULTS[name].machine, settings=few)
    except Exception as error:  # a check, an assertion or a wrong token
        found = error
    assert found is not None
    # These errors come from the fault's own code or the test's settings, not from a check that detects the fault.
    assert not isinstance(found, HypothesisException | NameError | SyntaxError)
