"""Sessions: a request continues the tokens of an earlier request without sending these tokens again.

A session keeps the prompt and output tokens of each ended request under the request's rid. A new request of the session
names one of these rids, and its prompt begins with the tokens kept under it. The prefix cache still has the pages of
these tokens, unless they were evicted.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from uuid import uuid4

from runtime.actors.live_requests import LiveRequest
from runtime.errors import InvalidRequest, PenstockError
from runtime.request import Request, SessionParams

MAX_SESSIONS = 1024
MAX_TOKENS = 2**24  # maximum number of tokens kept in all sessions; a token takes 4 bytes
MAX_NAME = 256


class _Turn:
    """The tokens of one request of a session. They are unknown while the request `is_live`."""

    __slots__ = ("is_live", "num_prompt", "parent", "tokens")

    def __init__(self, parent: _Turn | None) -> None:
        self.parent = parent  # the turn that this one continues; None if it continues nothing, or a forgotten turn
        self.is_live = True
        self.num_prompt = 0
        self.tokens: array[int] = array("i")


class _Session:
    __slots__ = ("capacity", "num_tokens", "owner", "turns")

    def __init__(self, owner: str, capacity: int) -> None:
        self.owner = owner
        self.capacity = capacity
        self.turns: OrderedDict[str, _Turn] = OrderedDict()  # by rid, oldest first
        self.num_tokens = 0


class Sessions:
    """The open sessions of an engine. Observes requests to keep their tokens when they end.

    If there are too many sessions (or tokens), the client that has the most sessions (or tokens) loses its least
    recently used session. A client that opens many sessions therefore loses only its own.
    """

    def __init__(self, bos_id: int | None) -> None:
        """Create the table. `bos_id` is the token that the tokenizer puts before each text. Continuations omit it."""
        self._bos_id = bos_id
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # least recently used first
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, capacity: int, name: str | None = None, owner: str = "") -> str:
        """Open a session for at most `capacity` tokens. Return its name.

        Raises `InvalidRequest` if a session of this name is open.
        """
        name = name or uuid4().hex
        if len(name) > MAX_NAME:
            raise InvalidRequest(f"session_id may have at most {MAX_NAME} characters.", param="session_id")
        if name in self._sessions:
            raise InvalidRequest(f"The session {name!r} is open already.", param="session_id")
        if capacity < 1:
            raise InvalidRequest("capacity_of_str_len must be positive.", param="capacity_of_str_len")
        while len(self._sessions) >= MAX_SESSIONS:
            self._close_oldest(lambda session: 1)
        self._sessions[name] = _Session(owner, capacity)
        return name

    def close(self, name: str, owner: str | None = None) -> None:
        """Close a session. Its requests continue. Raises `InvalidRequest` if no such session is open."""
        session = self._find(name, owner)
        del self._sessions[name]
        self._num_tokens -= session.num_tokens

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` if the request's session is not open, or lacks the request to continue."""
        params = request.session
        if params is None:
            return
        session = self._find(params.id, request.owner)
        if request.sampling.n > 1 or request.wants_embedding:
            raise InvalidRequest("A request of a session has one choice.", param="session_params")
        if request.media or request.prompt_media is not None:
            raise InvalidRequest("Sessions keep tokens only; send images without session_params.", param="image_data")
        if params.rid is not None:
            turn = session.turns.get(params.rid)
            if turn is None:
                raise InvalidRequest(f"The session has no request {params.rid[:80]!r}.", param="session_params")
            if turn.is_live:
                raise InvalidRequest(f"The request {params.rid[:80]!r} has not ended.", param="session_params")

    def continued(self, request: Request, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the earlier request that a request continues, followed by the request's own tokens.

        Raises `InvalidRequest` if the session was closed or its capacity is too small.
        """
        params = request.session
        if params is None:
            return tuple(ids)
        self.check(request)
        session = self._sessions[params.id]
        self._sessions.move_to_end(params.id)
        before = self._before(session, params)
        if before and ids and ids[0] == self._bos_id:
            ids = ids[1:]
        whole = (*before, *ids)
        if len(whole) > session.capacity:
            raise InvalidRequest(
                f"The request has {len(whole)} tokens, and the session {session.capacity}.", param="session_params"
            )
        turn = _Turn(None if params.rid is None else session.turns[params.rid])
        if params.replace:
            self._forget(session, turn.parent)
        if (old := session.turns.get(request.label)) is not None:
            for each in (turn, *session.turns.values()):
                if each.parent is old:
                    each.parent = old.parent
            self._drop(session, request.label)
        session.turns[request.label] = turn
        return whole

    def began(self, live: LiveRequest) -> None:
        return

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """Keep the tokens of an ended request, if it belongs to a session."""
        params = live.request.session
        session = None if params is None else self._sessions.get(params.id)
        turn = None if session is None else session.turns.get(live.request.label)
        if session is None or turn is None or not turn.is_live:
            return
        if error is not None or not live.sequences or not live.ends:
            del session.turns[live.request.label]
            return
        sequence, usage = live.sequences[0], live.ends[0].usage
        turn.tokens = array("i", sequence.ids[: sequence.num_prompt + usage.output])
        turn.num_prompt, turn.is_live = sequence.num_prompt, False
        self._count(session, len(turn.tokens))
        while session.num_tokens > session.capacity and len(session.turns) > 1:
            self._drop(session, next(iter(session.turns)))
        while self._num_tokens > MAX_TOKENS and len(self._sessions) > 1:
            self._close_oldest(lambda session: session.num_tokens)

    @staticmethod
    def _before(session: _Session, params: SessionParams) -> Sequence[int]:
        """Return the kept tokens that a new request continues."""
        if params.rid is None:
            return ()
        turn = session.turns[params.rid]
        tokens = turn.tokens[: turn.num_prompt] if params.drop_previous_output else turn.tokens
        return tokens[: params.offset] if params.offset else tokens

    def _forget(self, session: _Session, kept: _Turn | None) -> None:
        """Forget the ended requests that continue the request `kept`, directly or through others.

        If `kept` is None, forget all ended requests.
        """
        later = {kept}
        for rid, turn in list(session.turns.items()):  # a request comes after the one that it continues
            if kept is None or turn.parent in later:
                later.add(turn)
                if turn.is_live:
                    turn.parent = kept  # the requests between them are forgotten
                else:
                    self._drop(session, rid)

    def _find(self, name: str, owner: str | None) -> _Session:
        session = self._sessions.get(name)
        # The error is the same for another client's session, so that clients cannot probe for its name.
        if session is None or (owner is not None and session.owner != owner):
            raise InvalidRequest(f"The session {name[:80]!r} is not open.", param="session_params")
        return session

    def _drop(self, session: _Session, rid: str) -> None:
        turn = session.turns.pop(rid)
        self._count(session, -len(turn.tokens))
        turn.parent, turn.tokens = None, array("i")  # requests that continue it still refer to it

    def _count(self, session: _Session, num_tokens: int) -> None:
        session.num_tokens += num_tokens
        self._num_tokens += num_tokens

    def _close_oldest(self, weight: Callable[[_Session], int]) -> None:
        """Close the least recently used session of the owner whose sessions have the largest total weight."""
        weights: Counter[str] = Counter()
        for session in self._sessions.values():
            weights[session.owner] += weight(session)
        owner = max(weights, key=weights.__getitem__)
        name, session = next(each for each in self._sessions.items() if each[1].owner == owner)
        del self._sessions[name]
        self._num_tokens -= session.num_tokens
