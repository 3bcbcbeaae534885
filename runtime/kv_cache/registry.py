"""The registry of cache kinds, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime.kv_cache.kinds import PAGED, CacheKind, Specs
from runtime.kv_cache.states import StateKind
from runtime.kv_cache.windowed import WindowedPages

if TYPE_CHECKING:
    from runtime.config.plan import Plan
    from runtime.mesh.rank_info import RankInfo

KINDS: Mapping[str, type[CacheKind]] = {kind.name: kind for kind in (StateKind, WindowedPages)}


def make_kinds(specs: Specs, plan: Plan, num_pages: int) -> list[CacheKind]:
    """Create the cache kinds that the layers use, except "paged", for a prefix cache of `num_pages` pages."""
    size, max_drafts = plan.cache.page_size, plan.scheduler.max_drafts
    return [
        KINDS[name](kind_specs, KINDS[name].num_units(kind_specs, plan, num_pages), num_pages, size, max_drafts)
        for name, kind_specs in by_kind(specs, plan).items()
        if name != PAGED
    ]


def by_kind(specs: Specs, plan: Plan) -> dict[str, dict[Any, Any]]:
    """Group the layers' specs by cache kind. Layers of a kind that the plan does not use are in the group "paged"."""
    kinds: dict[str, dict[Any, Any]] = {PAGED: {}}
    for index, spec in specs.items():
        kinds.setdefault(spec.kind, {})[index] = spec
    for name, kind_specs in list(kinds.items()):
        if name != PAGED and not KINDS[name].used(kind_specs, plan):
            kinds[PAGED].update(kinds.pop(name))
    return kinds


def local_specs(specs: Specs, rank_info: RankInfo, num_layers: int) -> dict[int, Any]:
    """Return the specs of the layers on this rank, with the shapes of its tensor-parallel shard."""
    stage = rank_info.stage_layers(num_layers).layers
    return {index: spec.local(rank_info.tp_rank, rank_info.tp_size) for index, spec in specs.items() if index in stage}
