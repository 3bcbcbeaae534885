"""A request router for Ray Serve, which chooses a replica by session, then by longest prefix, then by load."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an optional dependency.

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve.on_ray.prefix_table import PrefixTable
from serve.on_ray.prompt_key import PromptKey


class PrefixRouter(RequestRouter):
    """Sends requests with a common prefix to the same replica, unless this replica is much busier than others.

    All requests of a session go to the same replica, as long as this replica runs.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Create the `PrefixTable`. Ray Serve calls this before the first request."""
        self._table: PrefixTable[ReplicaID] = PrefixTable(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, followed by the others, the least loaded first.

        Ray tries the next replica if one accepts no request.
        """
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        known = self.replica_queue_len_cache
        loads = {each: known.get(each) or 0 for each in by_id}
        chosen = self._table.choose(key_of(pending_request), loads)
        if chosen is None:
            return []
        others = sorted((each for each in by_id if each != chosen), key=loads.__getitem__)
        return [[by_id[chosen]], *([by_id[each]] for each in others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which replica got the request. Ray Serve calls this for each request."""
        self._table.note(key_of(pending_request), replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica from the table. Ray Serve calls this when the replica has ended."""
        super().on_replica_actor_died(replica_id)
        self._table.keep([replica.replica_id for replica in self.curr_replicas.values()])


def key_of(request: PendingRequest | None) -> PromptKey:
    """Return the request's key, which is the first argument of `EngineReplica.answer`."""
    first = request.args[0] if request is not None and request.args else None
    return first if isinstance(first, PromptKey) else PromptKey()
