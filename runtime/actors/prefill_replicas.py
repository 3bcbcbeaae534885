"""Disaggregation in one process: some replicas compute prompts, and the others generate the outputs.

The router gives each request to a decode replica. `PrefillReplicas` gives a prefill replica a second request with the
same prompt and one output token. The KV pages of the prompt are then sent as between separate servers
(`page_store/transfer_protocol.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.actors.live_requests import ABORTED, LiveRequest
from runtime.actors.output_stream import OutputStream
from runtime.errors import PenstockError
from runtime.kv_cache.page_keys import is_portable
from runtime.kv_cache.prefix_cache import reusable_tokens
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from runtime.sequence import Sequence

if TYPE_CHECKING:
    from runtime.actors.scheduler import SchedulerActor

ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0)


class PrefillReplicas:
    """Computes prompts on the prefill replicas.

    As a request observer, it aborts the prompt of a request that ends early. The decode replica computes a prompt
    itself in two cases: the request needs prompt log-probabilities, or less than one page of the prompt is missing from
    the cache.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # Prompts that prefill replicas compute, by the id of the original request, which waits for the pages.
        self._prompts: dict[int, LiveRequest] = {}

    def start(self, live: LiveRequest, prefill: Seq[SchedulerActor], decode: SchedulerActor) -> None:
        """Compute the prompt on the least busy prefill replica. The decode replica waits for its pages."""
        # Stops an earlier prompt of this request, which exists if the request moved from another decode replica.
        self.stop(live)
        first = live.sequences[0]
        num_missing = reusable_tokens(first) - decode.scheduler.num_cached(first)
        usable = [actor for actor in prefill if _is_attached(actor)]
        can_send = is_portable(first) and num_missing >= self._page_size and _is_attached(decode)
        _set_prefilled(live, bool(usable) and can_send)
        if usable and can_send:
            idlest = min(usable, key=self._num_tokens)
            self._prompts[live.request.id] = prompt = _prompt_of(live)
            idlest.admit(prompt)

    def _num_tokens(self, actor: SchedulerActor) -> int:
        """Return the number of prompt tokens that this prefill replica still has to compute."""
        prompts = [prompt for prompt in self._prompts.values() if prompt.scheduler is actor]
        return sum(len(prompt.sequences[0].ids) for prompt in prompts if prompt.sequences[0].finish is None)

    def give_up(self, dead: SchedulerActor, requests: Iterable[LiveRequest]) -> None:
        """Let the decode replicas compute the prompts that a failed prefill replica had not finished."""
        for live in requests:
            prompt = self._prompts.get(live.request.id)
            if prompt is not None and prompt.scheduler is dead:
                del self._prompts[live.request.id]
                _set_prefilled(live, False)

    def began(self, live: LiveRequest) -> None:
        """Do nothing: the token ids are not known yet."""

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """Stop computing the prompt of an ended request."""
        self.stop(live)

    def stop(self, live: LiveRequest) -> None:
        """Stop computing the prompt of this request on the prefill replica. Does nothing if it has been computed."""
        prompt = self._prompts.pop(live.request.id, None)
        if prompt is not None and prompt.scheduler is not None and prompt.sequences[0].finish is None:
            prompt.aborting = ABORTED
            prompt.scheduler.abort(prompt)


def _is_attached(actor: SchedulerActor) -> bool:
    return actor.storage is not None and actor.storage.attachment is not None


def _set_prefilled(live: LiveRequest, prefilled: bool) -> None:
    """Set whether the decode replica should wait for the pages of this request's prompt."""
    if live.request.caller.prefilled != prefilled:
        live.request = replace(live.request, caller=live.request.caller._replace(prefilled=prefilled))
    for sequence in live.sequences:
        sequence.request = live.request


def _prompt_of(live: LiveRequest) -> LiveRequest:
    """Return a request that computes the same prompt and one token.

    Its output is dropped, because the request is not in `LiveRequests`.
    """
    given, first = live.request, live.sequences[0]
    request = Request(
        ids=given.ids,
        sampling=ONE_TOKEN,
        namespace=given.namespace,
        adapter=given.adapter,
        row_values=given.row_values,
        priority=given.priority,
        follows=True,  # takes no place in the queue, because the original request has one
        prompt_media=given.prompt_media,
        counted=False,
        owner=given.owner,
    )
    prompt = LiveRequest(request, OutputStream(request.id, 1, lambda _: None))
    prompt.sequences = [
        Sequence(
            request,
            0,
            first.ids[: first.num_prompt],
            max_tokens=first.num_prompt + 1,
            stop_ids=first.stop_ids,
            seed=first.seed,
            namespace=first.namespace,
            urgency=first.urgency,
        )
    ]
    return prompt
