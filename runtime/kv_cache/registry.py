"""Which kinds of caches there are beside the pages that all sequences have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime.kv_cache.kinds import PAGED, CacheKind, Specs
from runtime.kv_cache.states import StateKind
from runtime.kv_cache.windowed import WindowedPages

if TYPE_CHECKING:
    from runtime.config.plan import Plan

KINDS: Mapping[str, type[CacheKind]] = {kind.name: kind for kind in (StateKind, WindowedPages)}


def make_kinds(specs: Specs, plan: Plan, num_pages: int) -> list[CacheKind]:
    """The kinds that a model's layers have beside the pages, for a prefix cache of so many pages."""
    return [
        KINDS[name](own, KINDS[name].num_units(own, plan, num_pages), num_pages, plan.cache.page_size)
        for name, own in by_kind(specs, plan).items()
        if name != PAGED
    ]


def by_kind(specs: Specs, plan: Plan) -> dict[str, dict[int, Any]]:
    """The layers by the kind of cache that they have here: "paged" always, others where the plan uses them."""
    found: dict[str, dict[int, Any]] = {PAGED: {}}
    for index, spec in specs.items():
        found.setdefault(spec.kind, {})[index] = spec
    for name, own in list(found.items()):
        if name != PAGED and not KINDS[name].used(own, plan):
            found[PAGED].update(found.pop(name))
    return found
