"""`/v1/responses`: create, retrieve, delete, cancel, list input items, and count the tokens of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.actors.output_stream import OutputStream
from runtime.errors import InvalidRequest, Overloaded
from serve.calls.body import off_loop
from serve.calls.chat_completions.schema import NAMES
from serve.calls.client import CLIENT
from serve.calls.prompts import of_client
from serve.http.endpoint import decodes, json_response, list_page, read_all_or_disconnect, read_body
from serve.http.errors import ErrorFormat, openai_body
from serve.http.sse import EventStream
from serve.openai.responses.answer import FRAMING, Response, ResponseEvents
from serve.openai.responses.call import ResponseCall, call_of, input_prompt
from serve.openai.responses.schema import InputBody, ResponsesBody, read_input_body, read_responses_body
from serve.openai.responses.store import ResponseStore, StoredResponse

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

MAX_BACKGROUND = 256  # maximum number of responses that are being computed in the background
MAX_LISTED = 100

ERROR_FORMAT = ErrorFormat(
    openai_body,
    {
        **NAMES,
        "text": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_new_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format.schema",
    },
)


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Stores the response of one call, if the body's `store` is true."""

    store: ResponseStore
    call: ResponseCall
    owner: str

    def stored(self, response: dict[str, Any], messages: Sequence[Mapping[str, Any]]) -> StoredResponse:
        call = self.call
        return StoredResponse(response, self.owner, call.input_items, messages, call.num_bytes)

    def keep(self, response: Response, ended: dict[str, Any]) -> None:
        if self.call.body.store:
            self.store.put(self.stored(ended, [*self.call.conversation, response.message()]))


@decodes(ResponsesBody)
async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Answer a conversation: as one JSON object, as a stream of events, or in the background."""
    store, owner = _store(http), CLIENT.get().name
    body = await read_body(http, partial(read_responses_body, core))
    previous = _previous(store, owner, body)
    make = partial(call_of, core, body, previous, partial(store.find_item, owner=owner))
    # An earlier conversation or truncation may take long, so these calls are read in a thread.
    small = previous is None and body.truncation == "disabled" and len(body.input) < MAX_LISTED
    call = await off_loop(make, small=small)
    response = Response(call.head, call.prepared, core.tokenizer, call.custom_tools, call.namespaces)
    keeper = _Keeper(store, call, owner)
    if body.background:
        return json_response(await _begin(core, keeper, response))
    streams = await core.submit_all(of_client(core, [call.prepared.request]))
    if body.stream:
        events = ResponseEvents(response, partial(keeper.keep, response))
        failing = replace(ERROR_FORMAT, stream_event=events.failing)
        return EventStream(streams, events, failing, framing=FRAMING)
    [[chunk]] = await read_all_or_disconnect(streams, http.receive)
    response.feed(chunk)
    ended = response.ended()
    keeper.keep(response, ended)
    return json_response(ended)


@decodes(InputBody)
async def count_input_tokens(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the number of prompt tokens of a body."""
    store, owner = _store(http), CLIENT.get().name
    body = await read_body(http, partial(read_input_body, core))
    previous = _previous(store, owner, body)
    count = partial(input_prompt, core, body, previous, partial(store.find_item, owner=owner))
    prompt = await off_loop(count, small=False)
    return json_response({"object": "response.input_tokens", "input_tokens": len(await prompt.ids(core))})


def _previous(store: ResponseStore, owner: str, body: InputBody) -> StoredResponse | None:
    """Return the stored response that `previous_response_id` names, or None if the field is not set.

    Raises `InvalidRequest` if that response does not exist or is not completed yet.
    """
    if body.previous_response_id is None:
        return None
    previous = store.find(body.previous_response_id, owner)
    if previous is None or previous.task is not None:
        what = "is not completed yet" if previous else "not found"
        raise InvalidRequest(
            f"Previous response with id '{body.previous_response_id[:200]}' {what}.",
            param="previous_response_id",
        )
    return previous


# --- background responses ---


async def _begin(core: EngineCore, keeper: _Keeper, response: Response) -> dict[str, Any]:
    """Start to compute a response in the background, and return it with the status in_progress.

    Raises `Overloaded` if too many background responses are running.
    """
    store = keeper.store
    if store.num_running >= MAX_BACKGROUND:
        raise Overloaded("Too many responses are computed in the background.", retry_after_s=5)
    [stream] = await core.submit_all(of_client(core, [keeper.call.prepared.request]))
    begun = response.begun()
    stored = keeper.stored(begun, keeper.call.conversation)
    stored.task = asyncio.create_task(_compute(stream, response, keeper, stored), name="penstock-response")
    store.put(stored)
    return begun


async def _compute(stream: OutputStream, response: Response, keeper: _Keeper, stored: StoredResponse) -> None:
    """Read the output until it ends or is cancelled, and store the response."""
    try:
        async with aclosing(stream.chunks()) as arrivals:
            async for chunks in arrivals:
                for chunk in chunks:
                    response.feed(chunk)
        ended = response.ended()
    except asyncio.CancelledError:
        stream.close()  # needed if the task was cancelled before its first step
        ended = response.ended(cancelled=True)
    except Exception as error:  # an error must not affect other responses
        ended = response.failed(ERROR_FORMAT.failure(error))
    stored.task = None
    stored.response = ended
    stored.messages = [*keeper.call.conversation, response.message()]
    keeper.store.update(stored)


# --- stored responses ---


async def retrieve(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return a stored response."""
    if http.query_params.get("stream", "false").lower() not in ("", "0", "false"):
        raise InvalidRequest("stream is not supported here; poll the response.", param="stream")
    return json_response(_find(http).response)


async def delete(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Delete a stored response. If it is still being computed in the background, cancel it."""
    stored = _find(http)
    _store(http).delete(stored.id, stored.owner)
    return json_response({"id": stored.id, "object": "response", "deleted": True})


async def cancel(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Cancel a background response. A response that has ended stays unchanged."""
    stored = _find(http)
    if not stored.response["background"]:
        raise InvalidRequest("Only background responses can be cancelled.", param="response_id")
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait([stored.task])
    return json_response(stored.response)


async def list_input_items(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the input items of a stored response, newest first unless `order=asc`."""
    items = list(reversed(_find(http).input_items))
    return list_page(http, items, limit=20, max_limit=MAX_LISTED)


def _find(http: HttpRequest) -> StoredResponse:
    return _store(http).get(http.path_params["response_id"], CLIENT.get().name)


def _store(http: HttpRequest) -> ResponseStore:
    return http.app.state.responses
