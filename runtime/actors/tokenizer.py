"""The tokenizer actor: text to ids, batched, off the loop when it is long."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import anyio
import anyio.to_thread

from runtime.actors.mailbox import Mailbox
from runtime.errors import EngineFailure, InvalidRequest, PenstockError
from runtime.request import Request
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.tokenizer")

INLINE_CHARS = 2048  # about 0.5 ms of encoding; a thread's round trip costs as much
ENCODER_THREADS = 2


class TokenizerActor:
    """Reads requests with text or ids from `inbox`; hands them on with ids, or fails them.

    `admit` takes a request whose ids are known; `fail` takes a request id and the error for its sender.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        admit: Callable[[Request], None],
        fail: Callable[[int, PenstockError], None],
    ) -> None:
        self.inbox: Mailbox[Request] = Mailbox()
        self._tokenizer = tokenizer
        self._admit = admit
        self._fail = fail

    async def run(self) -> None:
        """Until cancelled."""
        limiter = anyio.CapacityLimiter(ENCODER_THREADS)
        async with anyio.create_task_group() as tasks:
            while True:
                short: list[Request] = []
                for request in await self.inbox.take_all():
                    if request.ids is not None:
                        self._admit(request)
                    elif len(request.text or "") <= INLINE_CHARS:
                        short.append(request)
                    else:
                        tasks.start_soon(self._encode_apart, request, limiter)
                for start in range(0, len(short), 8):  # some milliseconds of work at most between awaits
                    self._finish(short[start : start + 8])
                    await anyio.lowlevel.checkpoint()

    def _finish(self, requests: list[Request]) -> None:
        for request in requests:
            try:
                ids = self._encode(request)
            except PenstockError as error:
                self._fail(request.id, error)
            else:
                self._admit(replace(request, ids=ids))

    async def _encode_apart(self, request: Request, limiter: anyio.CapacityLimiter) -> None:
        try:
            ids = await anyio.to_thread.run_sync(self._encode, request, limiter=limiter)
        except PenstockError as error:
            self._fail(request.id, error)
        else:
            self._admit(replace(request, ids=ids))

    def _encode(self, request: Request) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise InvalidRequest("This engine has no tokenizer: send input_ids.", param="text")
        try:
            [ids] = self._tokenizer.encode_batch(
                [request.text or ""], add_special_tokens=request.add_special_tokens
            )
        except PenstockError:
            raise
        except Exception as error:  # a foreign library on a client's text: this request's border
            logger.exception("encoding request %s failed", request.label)
            raise EngineFailure("The prompt could not be encoded.") from error
        return tuple(ids)
