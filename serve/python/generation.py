"""Continue a generation token by token, fork it, rewind it, append to it, and compare possible continuations."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeVar

from runtime.actors.output_stream import read_all
from runtime.errors import InvalidRequest
from runtime.request import Chunk, Finish, Request
from runtime.tokenizer.tokenizer import Tokenizer
from serve.background import background_tasks
from serve.calls.generate.schema import requests_of
from serve.python import html
from serve.python.arguments import as_json, generate_body
from serve.python.display import briefly_interrupted
from serve.python.hooks import OnLogits, with_hook
from serve.python.templates import RequestTemplates

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Result = TypeVar("Result")
Method = Literal["sum", "token_length_normalized", "greedy", "unconditional_likelihood_normalized"]
WARM_S = 60.0  # seconds for which a tool call keeps its generation's pages recently used
TOUCH_S = 0.25  # seconds between two updates of these pages' last use
SEED_STEP = 1_000_003
FORMAT = "penstock-generation-1"


class Token(NamedTuple):
    """A token of an output. `text` is the text that it adds, or "" if the token ends within a character.

    `logprob` is its log-probability, or None if the generation was opened without `logprobs=True`.
    """

    id: int
    text: str
    logprob: float | None = None


class Score(NamedTuple):
    """The log-probability of a text as the continuation of a generation. `logprob` is the sum over `tokens`."""

    logprob: float
    tokens: list[Token]

    @property
    def per_token(self) -> float:
        """The average log-probability of a token."""
        return self.logprob / len(self.tokens)

    def _repr_html_(self) -> str:
        return html.tokens((token.text, token.logprob) for token in self.tokens)


class Choice(str):
    """The text that `select` chose, a `str`.

    `scores` maps each choice to its score. `tokens` maps each choice to its tokens with their log-probabilities.
    """

    scores: dict[str, float]
    tokens: dict[str, list[Token]]

    def __new__(cls, text: str, scores: dict[str, float], tokens: dict[str, list[Token]]) -> Self:
        chosen = super().__new__(cls, text)
        chosen.scores, chosen.tokens = scores, tokens
        return chosen

    def _repr_html_(self) -> str:
        return html.scores(self.scores, self)


class Engine(Protocol):
    """The part of an engine that a generation uses."""

    @property
    def core(self) -> EngineCore: ...
    @property
    def templates(self) -> RequestTemplates: ...


class Generation:
    """A sequence of tokens that the engine continues. `engine.open(prompt)` returns one.

        g = engine.open("Once upon a time", temperature=0)
        async for token in g:              # leaving the loop keeps the tokens that were yielded
            print(token.text, end="")
        await g.generate(8)                # at most 8 further tokens; returns their text
        one, two = g.fork(2)               # both share the pages of all tokens so far
        g.rewind(3)                        # removes the last 3 tokens
        g.append(" The end.")
        await g.select(["yes", "no"])      # appends the likelier text

    The prefix cache keeps the keys and values of the tokens while it has space, so each call computes only new tokens
    and the tokens of the last, incomplete page. If pages were evicted, they are computed again, with equal results.

    Several greedy calls give the same tokens as one request. With a `seed`, each call derives its seed from `seed` and
    the number of tokens so far; forks use different seeds.

    `ids` are all tokens. `text` is the text after the prompt. `finish` is the reason why the last call ended (None
    before the first call). Only one call may run at a time: a second one raises `InvalidRequest`. Cancelling a call
    frees its request.
    """

    def __init__(
        self,
        engine: Engine,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        logprobs: bool = False,
        heal: bool = False,
    ) -> None:
        self._engine = engine
        self.ids: list[int] = list(ids)
        self.num_prompt = len(self.ids)
        self.sampling: dict[str, Any] = dict(sampling)
        self.options: dict[str, Any] = dict(options)  # further fields of the request, for example `lora_path`
        self.logprobs = logprobs
        self.on_logits: OnLogits | None = None  # called before each further token; see `Engine.generate`
        self.finish: Finish | None = None
        self.num_cached = 0  # prompt tokens of the last call that came from the prefix cache
        self._logprobs: dict[int, float] = {}  # index into `ids` -> log-probability of this generated token, if known
        self._heals = heal
        self._branch = 0  # number from which seeds are derived; different in each fork
        self._busy = False
        self._turn = 0  # number of calls so far, with which a loop over tokens detects other calls

    # --- what is known ---

    @property
    def text(self) -> str:
        """The text after the prompt, both generated and appended."""
        return self._tokenizer.decode(self.ids[self.num_prompt :])

    @property
    def full_text(self) -> str:
        """The text of all tokens."""
        return self._tokenizer.decode(self.ids)

    @property
    def finished(self) -> bool:
        """Whether the model ended the text. `append` and `rewind` reset this to False."""
        return self.finish is not None and self.finish.kind == "stop"

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        end = f", finish={self.finish.kind!r}" if self.finish else ""
        return f"Generation({self.num_prompt} prompt tokens, {len(self.ids) - self.num_prompt} after it{end})"

    def _repr_html_(self) -> str:
        prompt = self._tokenizer.decode(self.ids[: self.num_prompt])
        end = "" if self.finish is None else f"ended by {self.finish.kind}"
        pieces = self._pieces() if self._logprobs else None
        output = html.text(self.text) if pieces is None else html.tokens(pieces)
        rows = [("prompt", html.text(prompt)), ("output", output), ("tokens", f"{len(self.ids)} {end}")]
        return html.table(rows)

    def _pieces(self) -> Iterator[tuple[str, float | None]]:
        """Yield the text and the log-probability of each token after the prompt."""
        decoder = self._tokenizer.decoder(self.ids[max(0, self.num_prompt - 8) : self.num_prompt])
        for index in range(self.num_prompt, len(self.ids)):
            yield decoder.push([self.ids[index]]), self._logprobs.get(index)

    def _add(self, token_id: int, logprob: float | None) -> None:
        """Append a generated token."""
        if logprob is not None:
            self._logprobs[len(self.ids)] = logprob
        self.ids.append(token_id)

    def _forget(self) -> None:
        """Forget the log-probabilities of tokens that were removed."""
        self._logprobs = {index: each for index, each in self._logprobs.items() if index < len(self.ids)}

    # --- continuing ---

    def __aiter__(self) -> AsyncGenerator[Token, None]:
        return self.tokens()

    async def tokens(self, max_new_tokens: int | None = None, **sampling: Any) -> AsyncGenerator[Token, None]:
        """Yield further tokens, and append each token to `ids` when it is yielded.

        `sampling` overrides the generation's sampling parameters for this call. Leaving the loop aborts the request and
        discards tokens that were not yielded.
        """
        with _Busy(self) as busy:
            if (healed := await self._heal()) is not None:
                yield busy.paused(healed)
                busy.resume()
            request = self._request(max_new_tokens, sampling)
            decoder = self._tokenizer.decoder(self.ids[-8:])
            async with aclosing(self._core.submit(request).chunks()) as arrivals:
                held = _Held(decoder.push, request)
                async for [chunk] in arrivals:
                    self.num_cached = chunk.usage.cached
                    for token in held.after(chunk):
                        self._add(token.id, token.logprob)
                        yield busy.paused(token)
                        busy.resume()
                    if chunk.finish is None:
                        continue
                    for token_id in self._encode(held.rest) if held.rest else ():
                        self.ids.append(token_id)
                        yield busy.paused(Token(token_id, self._tokenizer.token_text(token_id)))
                        busy.resume()
                    self.finish = chunk.finish

    @briefly_interrupted
    async def generate(self, max_new_tokens: int | None = None, **sampling: Any) -> str:
        """Continue until the model stops, or for at most `max_new_tokens` tokens, and return the new text."""
        with _Busy(self):
            start = len(self.ids)
            healed = await self._heal()
            request = self._request(max_new_tokens, sampling)
            [[chunk]] = await read_all([self._core.submit(request)])
            self._take(chunk, request)
            new = chunk.text if chunk.finish is not None and isinstance(chunk.finish.matched, str) else None
            if healed is None:
                return chunk.text if new is None else new
            return healed.text + self._tokenizer.decode(self.ids[start:]) if new is None else healed.text + new

    def _take(self, chunk: Chunk, request: Request) -> None:
        self.num_cached = chunk.usage.cached
        logprobs = chunk.logprobs.chosen if chunk.logprobs is not None else ()
        for place, token_id in enumerate(_without_stop(chunk, request)):
            self._add(token_id, logprobs[place][0] if logprobs else None)
        if chunk.finish is not None:
            self._end(chunk.finish, request)

    def _end(self, finish: Finish, request: Request) -> None:
        self.finish = finish
        if isinstance(finish.matched, str) and not request.sampling.no_stop_trim:
            self._cut_before(finish.matched, len(request.ids or ()))

    def _cut_before(self, stop: str, start: int) -> None:
        """Remove the stop string and the text after it from the tokens that were generated after index `start`."""
        text = self._tokenizer.decode(self.ids[start:])
        kept = text[: text.index(stop)] if stop in text else text
        while len(self.ids) > start and len(self._tokenizer.decode(self.ids[start:])) > len(kept):
            self.ids.pop()
        self._forget()
        rest = kept[len(self._tokenizer.decode(self.ids[start:])) :]
        if rest:
            self.ids += self._encode(rest)

    async def _heal(self) -> Token | None:
        """Sample the last token of the prompt again, from the tokens whose text begins with its text.

        If the prompt's text ends in the middle of a word, its last token may be one that the model would not choose.
        Returns the new token, with the text that it adds to the old token, or None if the last token is not sampled
        again.
        """
        if not self._heals or not self.ids or len(self.ids) < 2:
            return None
        self._heals = False
        tokenizer = self._tokenizer
        old = tokenizer.token_bytes(self.ids[-1])
        if not old or self.ids[-1] in tokenizer.special_ids:
            return None
        longer = [i for i in range(tokenizer.vocab_size) if (tokenizer.token_bytes(i) or b"").startswith(old)]
        last = self.ids.pop()
        request = self._request(1, {"allowed_token_ids": longer, "ignore_eos": True})
        try:
            [[chunk]] = await read_all([self._core.submit(request)])
        except BaseException:
            self.ids.append(last)
            raise
        self.ids += chunk.ids or [last]
        self.num_prompt = min(self.num_prompt, len(self.ids))
        beyond = (tokenizer.token_bytes(self.ids[-1]) or b"")[len(old) :]
        return Token(self.ids[-1], beyond.decode(errors="replace"))

    # --- changing ---

    def fork(self, n: int = 1) -> list[Generation]:
        """Return `n` independent copies, which share the KV cache pages of the tokens so far."""
        if n < 1:
            raise InvalidRequest(f"fork makes at least one copy, not {n}.", param="n")
        forks = []
        for number in range(n):
            copy = Generation(
                self._engine, self.ids, self.sampling, options=self.options, logprobs=self.logprobs, heal=self._heals
            )
            copy.num_prompt, copy.finish, copy.on_logits = self.num_prompt, self.finish, self.on_logits
            copy._branch = self._branch * 31 + number + 1
            copy._logprobs = dict(self._logprobs)
            forks.append(copy)
        return forks

    def rewind(self, n: int) -> None:
        """Remove the last `n` tokens. Raises `InvalidRequest` if no token would remain."""
        if not 0 <= n < len(self.ids):
            raise InvalidRequest(f"rewind takes back 0 to {len(self.ids) - 1} tokens here, not {n}.", param="n")
        self._check_idle()
        if n:
            del self.ids[-n:]
            self._forget()
        self.num_prompt = min(self.num_prompt, len(self.ids))
        self.finish = None

    def append(self, text_or_ids: str | Sequence[int]) -> None:
        """Append a text or token ids. They are part of `text`, like generated tokens."""
        self._check_idle()
        self.ids += self._encode(text_or_ids) if isinstance(text_or_ids, str) else as_json(text_or_ids)
        self.finish = None

    # --- comparing ---

    @briefly_interrupted
    async def select(
        self, choices: Sequence[str], *, method: Method = "token_length_normalized", append: bool = True
    ) -> Choice:
        """Return the text in `choices` that is the likeliest continuation, and append it unless `append` is False.

        `method` chooses the score of a text: "sum", the sum of its tokens' log-probabilities;
        "token_length_normalized", their average; "greedy", the text that greedy decoding restricted to the choices
        finds; or "unconditional_likelihood_normalized", the average difference to the log-probabilities of the same
        tokens without this context. The result is a `str` whose attribute `scores` has every score. Raises
        `InvalidRequest` if there are no choices, or if one is empty.
        """
        if not choices:
            raise InvalidRequest("select needs at least one choice.", param="choices")
        if method not in ("sum", "token_length_normalized", "greedy", "unconditional_likelihood_normalized"):
            raise InvalidRequest(f"There is no method {method!r} of select.", param="method")
        with _Busy(self):
            encoded = [self._encode_choice(choice) for choice in choices]
            scores = await self._scores(self.ids, encoded)
            if method == "sum":
                values = [sum(each) for each in scores]
            elif method == "unconditional_likelihood_normalized":
                bos = self._tokenizer.bos_id
                alone = await self._scores([] if bos is None else [bos], encoded)
                pairs = zip(scores, alone, strict=True)
                values = [_average(x - y for x, y in zip(a[-len(b) :], b, strict=True)) for a, b in pairs]
            elif method == "greedy":
                values = _greedy(encoded, scores)
            else:
                values = [_average(each) for each in scores]
            best = max(range(len(choices)), key=values.__getitem__)
            if append:
                self.ids += encoded[best]
                self.finish = None
        text_of = self._tokenizer.token_text
        tokens = {
            choice: [Token(i, text_of(i), each) for i, each in zip(ids[-len(logprobs) :], logprobs, strict=True)]
            for choice, ids, logprobs in zip(choices, encoded, scores, strict=True)
        }
        return Choice(choices[best], dict(zip(choices, values, strict=True)), tokens)

    @briefly_interrupted
    async def score(self, text_or_ids: str | Sequence[int]) -> Score:
        """Return the log-probability of a text, or of token ids, as the continuation. Nothing is appended."""
        ids = self._encode_choice(text_or_ids)
        with _Busy(self):
            [logprobs] = await self._scores(self.ids, [ids])
        tokenizer = self._tokenizer
        tokens = [Token(i, tokenizer.token_text(i), each) for i, each in zip(ids, logprobs, strict=True)]
        return Score(sum(logprobs), tokens)

    async def _scores(self, context: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return, for each text, the log-probabilities of its tokens after the context.

        If the context is empty, the first token of each text has no log-probability and is left out.
        """
        start = max(0, len(context) - 1)
        body = generate_body(
            None,
            {"max_new_tokens": 0, "temperature": 0},
            [[*context, *ids] for ids in texts],
            {**self.options, "return_logprob": True, "logprob_start_len": start},
        )
        requests = requests_of(body, self._core)
        answers = await read_all(await self._core.submit_all(requests))
        found = []
        for [chunk] in answers:
            if chunk.prompt_logprobs is None:
                raise InvalidRequest("The request was aborted before its result was computed.")
            found.append([logprob or 0.0 for logprob, _ in chunk.prompt_logprobs.chosen[1:]])
        return found

    def _encode_choice(self, choice: str | Sequence[int]) -> list[int]:
        ids = self._encode(choice) if isinstance(choice, str) else as_json(choice)
        if not ids:
            raise InvalidRequest("A text to score must not be empty.", param="choices")
        return ids

    # --- keeping ---

    async def tool(self, call: Awaitable[Result], *, warm_s: float = WARM_S) -> Result:
        """Await `call`, for example a tool call, and keep this generation's KV cache pages in the cache meanwhile.

        For up to `warm_s` seconds, the pages count as recently used, so that pages of others are evicted first.
        If requests need all memory, these pages are evicted too.
        """

        async def touch() -> None:
            for _ in range(max(1, round(warm_s / TOUCH_S))):
                self._core.touch_prefix(self._request(0, {}))
                await asyncio.sleep(TOUCH_S)

        async with background_tasks(touch()):
            return await call

    def save(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the generation as JSON values, and write them to `path` if it is given. `engine.load` continues it."""
        values = {
            "format": FORMAT,
            "ids": self.ids,
            "num_prompt": self.num_prompt,
            "sampling": as_json(self.sampling),
            "options": as_json(self.options),
            "logprobs": self.logprobs,
            "branch": self._branch,
        }
        if path is not None:
            Path(path).write_text(json.dumps(values))
        return values

    @classmethod
    def load(cls, engine: Engine, saved: Mapping[str, Any] | str | Path) -> Generation:
        """Return a saved generation. Raises `InvalidRequest` if `saved` does not come from `save`."""
        if not isinstance(saved, Mapping):
            try:
                saved = json.loads(Path(saved).read_text())
            except ValueError:
                saved = {}
        if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
            raise InvalidRequest("This is not a saved generation.", param="path")
        try:
            ids = [int(each) for each in saved["ids"]]
            made = cls(
                engine,
                ids,
                dict(saved["sampling"]),
                options=dict(saved["options"]),
                logprobs=bool(saved["logprobs"]),
            )
            made.num_prompt, made._branch = int(saved["num_prompt"]), int(saved["branch"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"This is not a saved generation: {error!r}.", param="path") from None
        return made

    # --- requests ---

    @property
    def _core(self) -> EngineCore:
        return self._engine.core

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._engine.core.tokenizer
        if tokenizer is None:
            raise InvalidRequest("The engine was started without a tokenizer (skip_tokenizer_init).")
        return tokenizer

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def _request(self, max_new_tokens: int | None, sampling: Mapping[str, Any]) -> Request:
        parameters = {**self.sampling, **sampling}
        if max_new_tokens is not None:
            parameters["max_new_tokens"] = max_new_tokens
        if parameters.get("n", 1) != 1:
            raise InvalidRequest("A generation has one output; use fork for several.", param="n")
        seed = parameters.get("seed")
        if seed is not None:
            position = len(self.ids) - self.num_prompt
            parameters["seed"] = (seed + SEED_STEP * self._branch + position) % 2**63
        options = {**self.options, "return_logprob": True} if self.logprobs else self.options
        request = self._engine.templates.request(self._core, self.ids, parameters, options)
        [request] = with_hook([request], self.on_logits)
        if request.returns_parts:
            name = "return_hidden_states" if request.returns_hidden else "return_routed_experts"
            raise InvalidRequest(f"A generation does not support {name}; use Engine.generate.", param=name)
        return request

    def _check_idle(self) -> None:
        """Begin a call or change, and count it. Raises `InvalidRequest` if another call is running."""
        if self._busy:
            raise InvalidRequest("This generation is being continued by another call; fork it to do both.")
        self._turn += 1


class _Held:
    """Delays tokens until the engine has delivered their text, because their text may be part of a stop string."""

    def __init__(self, text_of: Callable[[list[int]], str], request: Request) -> None:
        self._text_of = text_of
        self._request = request
        self._tokens: deque[Token] = deque()
        self._num_free = 0  # number of characters of the tokens in `_tokens` that the engine has delivered

    def after(self, chunk: Chunk) -> Iterator[Token]:
        """Add a chunk, and yield the tokens whose text has now been delivered."""
        logprobs = chunk.logprobs.chosen if chunk.logprobs is not None else ()
        for place, token_id in enumerate(_without_stop(chunk, self._request)):
            logprob = logprobs[place][0] if logprobs else None
            self._tokens.append(Token(token_id, self._text_of([token_id]), logprob))
        self._num_free += len(chunk.text)
        ended = chunk.finish is not None and not isinstance(chunk.finish.matched, str)
        while self._tokens and (
            ended or not self._request.sampling.stop or len(self._tokens[0].text) <= self._num_free
        ):
            token = self._tokens.popleft()
            self._num_free -= len(token.text)
            yield token

    @property
    def rest(self) -> str:
        """The part of a token's text before the stop string, for the token in which the stop string begins."""
        return self._tokens[0].text[: self._num_free] if self._tokens else ""


class _Busy:
    """Context manager that marks a generation as busy while a call runs.

    While the caller handles a token of a loop, the generation is not busy: the caller may have left the loop, and
    Python may close the iterator much later. If another call uses the generation meanwhile, the loop cannot continue.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __enter__(self) -> Self:
        generation = self._generation
        generation._check_idle()
        generation._busy = True
        self._turn = generation._turn
        return self

    def __exit__(self, *exception: object) -> None:
        if self._generation._turn == self._turn:
            self._generation._busy = False

    def paused(self, token: Token) -> Token:
        """Return `token`, and allow other calls while the caller handles it."""
        self._generation._busy = False
        return token

    def resume(self) -> None:
        """Continue the loop. Raises `InvalidRequest` if another call used the generation meanwhile."""
        if self._generation._turn != self._turn:
            raise InvalidRequest("The generation was changed during this loop over its tokens; begin a new loop.")
        self._generation._busy = True


def _without_stop(chunk: Chunk, request: Request) -> list[int]:
    """Return the chunk's token ids, without the stop token that ended the text, if any."""
    matched = None if chunk.finish is None else chunk.finish.matched
    if isinstance(matched, int) and chunk.ids and chunk.ids[-1] == matched and not request.sampling.no_stop_trim:
        return chunk.ids[:-1]
    return chunk.ids


def _average(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _greedy(encoded: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> list[float]:
    """Return 1.0 for the choice that greedy decoding restricted to the choices finds, and 0.0 for the others.

    At each position, only the choices with the likeliest token remain. If a remaining choice has no further token, the
    remaining choice with the highest average log-probability is the result.
    """
    left, place = set(range(len(encoded))), 0
    while len(left) > 1:
        ended = [index for index in left if len(encoded[index]) <= place]
        if ended:
            best = max(left, key=lambda index: _average(scores[index]))
            left = {best}
            break
        top = max(scores[index][place] for index in left)
        token = next(encoded[index][place] for index in left if scores[index][place] == top)
        left = {index for index in left if encoded[index][place] == token}
        place += 1
        if len({tuple(encoded[index]) for index in left}) == 1:
            left = {min(left)}
    return [float(index in left) for index in range(len(encoded))]
