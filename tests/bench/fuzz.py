"""`just fuzz`: hostile requests on every route, next to seeded streams (R4 of docs/reliability.md).

The requests have bodies with wrong values in known fields, or wrong bytes anywhere. The demo model runs in this
process. The exit status is 1 for a 5xx other than 501, 503 and 504, for a stream whose output changed, or for lost
pages.
"""

from __future__ import annotations

import asyncio
import copy
import random
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from bench import PROGRAM
from bench.raw_http import ask, request, serving, status_of
from bench.soak import OPTIONS, settled
from runtime.sampling_params import SamplingParams
from serve.calls.chat_completions.schema import ChatBody
from serve.calls.generate.schema import GenerateBody
from serve.python.engine import Engine
from serve.server.app import ROUTES

KEY, CALM_KEY = "fuzz-key", "calm-key"
AT_ONCE, NEIGHBOURS = 32, 2
WHOLE_S, BROKEN_S = 5.0, 0.5  # timeouts of clients; a broken request may never be answered
CALM_S = 600.0  # timeout of a seeded stream, for an overloaded machine
ALLOWED = (501, 503, 504)
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
TALK = [
    *({"role": "system", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "Yes?"}),
    {"role": "user", "content": [{"type": "text", "text": "Well"}]},
]
BODIES: Mapping[str, dict[str, Any]] = {
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 4}},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/invocations": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/v1/messages": {"model": "default", "messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "default", "messages": MESSAGES},
    "/api/chat": {"model": "default", "messages": MESSAGES, "options": {"num_predict": 4}},
    "/api/generate": {"model": "default", "prompt": "Hi", "options": {"num_predict": 4}},
    "/v1/embeddings": {"model": "default", "input": ["Hi", "Ho"]},
    "/encode": {"text": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/abort_request": {"rid": "nobody"},
    "/parse_function_call": {"text": "Hi", "tool_call_parser": "qwen25", "tools": []},
    "/separate_reasoning": {"text": "Hi", "reasoning_parser": "qwen3"},
}
# Further fields of each route, whose values are changed at any depth.
DEEP: Mapping[str, dict[str, Any]] = {
    "/generate": {"sampling_params": {"max_new_tokens": 4, "json_schema": orjson.dumps(SCHEMA).decode()}},
    "/v1/completions": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "/v1/chat/completions": {
        "messages": TALK,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "/v1/responses": {
        "input": [
            *({"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},),
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            *MESSAGES,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"a": "b"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
        ],
        "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "look"},
    },
    "/api/chat": {"messages": TALK, "tools": TOOLS, "format": SCHEMA},
    "/api/generate": {"format": SCHEMA, "system": "Be brief."},
    "/parse_function_call": {
        "text": '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
        "tools": TOOLS,
    },
}
FIELDS = sorted(
    {*GenerateBody.__dataclass_fields__, *ChatBody.__dataclass_fields__, *SamplingParams.__dataclass_fields__}
    | {key for body in BODIES.values() for key in body}
)
VALUES: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2, 128, 2**31, 2**63 - 1, -(2**63), 0.5, 1e308, "", "Hi", "\0", "🚀" * 50),
    *("a" * 5000, "(" * 300, "(a+)+$", "{{ 1 }}", [], {}, [[]], [None], [1, "a"], [-1], [2**40], ["a"] * 70),
    *({"type": "json_schema"}, {"type": "object", "properties": {}}, {"a": {"b": {}}}, [{"role": "user"}]),
    *([{"type": "function"}], {"type": "regex", "pattern": "["}, MESSAGES, {"include_usage": True}),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog=f"{PROGRAM} fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    return asyncio.run(fuzz(asked.requests, asked.seed))


async def fuzz(num_requests: int, seed: int) -> int:
    """Run the study and print the results. Return 1 if a promise is broken."""
    draw = random.Random(seed)
    statuses: Counter[int | None] = Counter()
    wrong: list[bytes] = []
    changed = num_calm = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"fuzz {KEY}\ncalm {CALM_KEY}\n", encoding="utf-8")
        async with Engine(**OPTIONS, api_key_file=str(keys)) as engine, serving(engine) as port:
            expected = [await neighbour(port, number) for number in range(NEIGHBOURS)]
            ended = asyncio.Event()

            async def attack(count: int) -> None:
                for _ in range(count):
                    raw, wait_s = hostile(draw)
                    status = status_of(await ask(port, raw, wait_s))
                    statuses[status] += 1
                    if status is not None and status >= 500 and status not in ALLOWED:
                        wrong.append(raw)

            async def watch(number: int) -> None:
                nonlocal changed, num_calm
                while not ended.is_set():
                    found = await neighbour(port, number)
                    if found != expected[number]:
                        print(f"neighbour {number} got {found}, not {expected[number]}")
                        changed += 1
                    num_calm += 1

            watching = [asyncio.create_task(watch(number)) for number in range(NEIGHBOURS)]
            shares = [num_requests // AT_ONCE + (i < num_requests % AT_ONCE) for i in range(AT_ONCE)]
            await asyncio.gather(*(attack(share) for share in shares))
            ended.set()
            await asyncio.gather(*watching)
            await settled(engine)
            engine.core.check()
            healthy = status_of(await ask(port, request("GET", "/health", b""))) == 200
            kept = engine.status().num_used_pages == 0
    for raw in wrong[:5]:
        print(f"answered with a 5xx: {raw[:600]!r}")
    found = ", ".join(f"{status or 'none'}: {count}" for status, count in sorted(statuses.items(), key=str))
    print(f"{num_requests} requests in {time.monotonic() - began:.0f} s; statuses {found}")
    print(f"R4 wrong 5xx {len(wrong)}; neighbours changed {changed} of {num_calm}; healthy {healthy}")
    print(f"pages exact: {kept}")
    return int(bool(wrong or changed) or not (healthy and kept))


async def neighbour(port: int, number: int) -> list[bytes]:
    """Return the text and ids of a seeded stream, or the end of the answer if it is incomplete."""
    sampling = {"max_new_tokens": 24, "temperature": 1.0, "seed": number, "ignore_eos": True}
    body = {"text": "Once upon a time", "sampling_params": sampling, "stream": True, "incremental": True}
    answer = await ask(port, request("POST", "/generate", orjson.dumps(body), CALM_KEY), CALM_S)
    events = [line for line in answer.split(b"\n") if line.startswith(b'data: {"text"')]
    pieces = [orjson.loads(event[6:].rstrip()) for event in events]
    ids = [token_id for piece in pieces for token_id in piece["output_ids"]]
    if not answer.rstrip().endswith(b"data: [DONE]\n\n\r\n0"):
        return [answer[-600:]]
    return ["".join(piece["text"] for piece in pieces).encode(), orjson.dumps(ids)]


def hostile(draw: random.Random) -> tuple[bytes, float]:
    """Return a request, and its client's timeout."""
    spec = draw.choice(ROUTES)
    path = spec.path.replace("{response_id}", "resp_1").replace("{model:path}", "x/y")
    body = orjson.dumps(mutated(draw, spec.path))
    key = KEY if draw.random() < 0.95 else draw.choice([None, "wrong", ""])
    raw = request(draw.choice(spec.methods), path, body, key)
    if draw.random() < 0.5:
        return raw, WHOLE_S
    return broken(draw, raw), BROKEN_S


def change_inside(draw: random.Random, value: Any) -> None:
    """Set, duplicate or remove a value anywhere in a body."""
    while True:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.75:
            value = value[key]
        elif draw.random() < 0.2:
            del value[key]
            return
        elif isinstance(value, list) and draw.random() < 0.3:
            value *= draw.choice([2, 3, 40])
            return
        else:
            value[key] = copy.deepcopy(draw.choice(VALUES))
            return


def mutated(draw: random.Random, path: str) -> dict[str, Any]:
    """Return the route's body with invalid values in a few of its fields or of other known fields."""
    body = BODIES.get(path, BODIES["/generate"])
    found = {**body, "stream": draw.random() < 0.3}
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        found[draw.choice([*body, *FIELDS, "x"])] = draw.choice(VALUES)
    inner = found.get("sampling_params", found.get("options"))
    if isinstance(inner, dict) and draw.random() < 0.5:
        name = draw.choice(FIELDS)
        found["sampling_params" if "sampling_params" in found else "options"] = {
            **inner,
            name: draw.choice(VALUES),
        }
    if draw.random() < 0.4:
        found = orjson.loads(orjson.dumps({**found, **DEEP.get(path, {})}))
        for _ in range(draw.choice([0, 1, 1, 2])):
            change_inside(draw, found)
    if draw.random() < 0.1:
        found.pop(draw.choice(list(found)))
    return found


def broken(draw: random.Random, raw: bytes) -> bytes:
    """Return the request with bytes changed, removed, inserted, duplicated, or truncated."""
    data = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(data)) if data else 0
        kind = draw.randrange(5)
        if kind == 0 and data:
            data[at] = draw.randrange(256)
        elif kind == 1:
            del data[at : at + draw.randrange(1, 20)]
        elif kind == 2:
            data[at:at] = draw.randbytes(draw.randrange(1, 20))
        elif kind == 3:
            data[at:at] = data[at : at + draw.randrange(1, 200)]
        else:
            del data[max(1, at) :]
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())
