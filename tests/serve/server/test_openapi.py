"""The API description is complete and valid, and agrees with the server."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import orjson
import pytest

from serve.http.endpoint import BODIES
from serve.server import unsupported
from serve.server.app import ROUTES
from serve.server.openapi import document
from served_core import Served

DOCUMENT = document(ROUTES)
NO_BODY = {
    "transcribe",
    "translate",
    "upload",
    "stop_profile",
    "flush_cache",
    "freeze_collector",
    "clear_storage",
    "list_models",
    *("start_expert_record", "stop_expert_record", "dump_expert_record"),
    "cancel",
    "answer",
    *("reset_prefix_cache", "pause_requests", "resume_requests", "sleep", "wake_up"),
    *("start_expert_record", "stop_expert_record", "dump_expert_record"),
}
EASY = {"/generate", "/v1/completions", "/tokenize", "/detokenize"}  # routes for which random bodies are often valid
WITH_BODY = [path for path, each in DOCUMENT["paths"].items() if "requestBody" in each.get("post", {})]
KNOWN = {200, 400, 403, 404, 405, 413, 422, 501, 503}


def body_schema(path: str) -> dict[str, Any]:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**schema, "components": DOCUMENT["components"]}


def test_every_route_is_described_with_its_body() -> None:
    for spec in ROUTES:
        path = spec.path.replace(":path}", "}")
        for method in spec.methods:
            operation = DOCUMENT["paths"][path][method.lower()]
            takes_body = method in ("POST", "PUT") and spec.handler.__name__ not in NO_BODY
            assert ("requestBody" in operation) == takes_body, spec.path
            assert operation["summary"].endswith((".", ":")), spec.path
            assert ("501" in operation["responses"]) == (spec.handler is unsupported.answer)
    assert BODIES.keys() <= {spec.handler for spec in ROUTES}


def test_schemas_are_schemas() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object", name
    operations = [each for path in DOCUMENT["paths"].values() for each in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))


def test_bodies_are_told_right_from_wrong() -> None:
    schema = body_schema("/v1/chat/completions")
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    right = {"messages": [message], "temperature": 0.5, "stop": ["a"], "stream_options": None}
    jsonschema.validate(right, schema)
    for wrong in ({}, {"messages": []}, {**right, "temperature": "hot"}, {**right, "n": 1000}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


async def test_document_and_page_are_served(served: Served) -> None:
    assert (await served.http.get("/openapi.json")).json() == orjson.loads(
        orjson.dumps(DOCUMENT, option=orjson.OPT_NON_STR_KEYS)
    )
    page = await served.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<code>POST /v1/chat/completions</code>" in page.text
    assert "<a href='#/v1/chat/completions'>" in page.text
    assert "width=device-width" in page.text
    assert "<script" not in page.text


def made(schema: dict[str, Any], random: Random, depth: int = 0) -> Any:
    """Return a value of the schema, or sometimes a value of another type."""
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if random.random() < 0.03:
        return random.choice([None, True, -1, 10**30, 0.5, "", "\x00", [], [[[]]], {"a": {"b": None}}])
    if "anyOf" in schema:
        return made(random.choice(schema["anyOf"]), random, depth)
    if "enum" in schema:
        return random.choice(schema["enum"])
    low = schema.get("minimum", schema.get("exclusiveMinimum", -5))
    match schema.get("type"):
        case "object":
            return _made_object(schema, random, depth)
        case "array":
            return [made(schema["items"], random, depth + 1) for _ in range(random.choice([0, 1, 1, 2, 5]))]
        case "integer":
            return random.choice([0, 1, 2, int(max(low, -9)), random.randrange(-10, 600)])
        case "number":
            return random.choice([low, 0.5, 1.0, random.uniform(-2, 3)])
        case "boolean":
            return random.random() < 0.5
        case "string":
            return random.choice(["", "a", "user", "text", "Größe 🚀", "{", "x" * 300, "[a-z]+", "auto"])
    return random.choice([None, {}, [], "a", 1])


def _made_object(schema: dict[str, Any], random: Random, depth: int) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    rare = 0.5 if len(properties) < 6 else 4 / len(properties)
    found = {
        name: made(each, random, depth + 1)
        for name, each in properties.items()
        if (name in required and random.random() < 0.97) or random.random() < rare
    }
    if isinstance(schema.get("additionalProperties"), dict) and depth < 5:
        for name in random.sample(["1", "a", "7", "type"], random.randrange(3)):
            found[name] = made(schema["additionalProperties"], random, depth + 1)
    return found


async def fuzz(served: Served, path: str, num_bodies: int, seed: int) -> None:
    """Send random requests. Every answer must be documented, and every error must have the documented form."""
    error = {"$ref": "#/components/schemas/Error", "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(error)
    random, schema = Random(seed), body_schema(path)
    statuses = set()
    for _ in range(num_bodies):
        body = made(schema, random)
        if isinstance(body, dict):
            body.pop("lora_path", None)  # a server without adapters refuses all names
        raw = orjson.dumps(body) if _is_small(body) else json.dumps(body).encode()
        answer = await served.http.post(path, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code in KNOWN, (body, answer.text)
        statuses.add(answer.status_code)
        if answer.status_code >= 400 and not path.startswith("/api/"):
            validator.validate(answer.json())
    assert 200 in statuses or path not in EASY
    assert (await served.http.get("/health")).status_code == 200


def _is_small(value: Any) -> bool:
    return "1" + "0" * 30 not in repr(value)


@pytest.mark.parametrize("path", WITH_BODY)
async def test_bodies_made_from_the_schema_break_nothing(served: Served, path: str) -> None:
    await fuzz(served, path, 50 if path in EASY else 25, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_BODY)
async def test_many_bodies_made_from_the_schema_break_nothing(served: Served, path: str) -> None:
    await fuzz(served, path, 200 if path in EASY else 80, seed=2)
