"""`/openapi.json` and `/docs`: describe the routes and bodies, from the dataclasses that decode the bodies."""

from __future__ import annotations

import html
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp

import serve
from runtime.sampling_params import MAX_INT32, Api, parameters
from serve.calls.decode import Length, Range, is_not_built
from serve.calls.generate.schema import GenerateBody
from serve.http.access import RouteScope
from serve.http.endpoint import BODIES, json_response
from serve.server import unsupported

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from serve.http.endpoint import RouteSpec

Json = dict[str, Any]
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string", "null"]},
            },
            "required": ["message"],
        }
    },
    "required": ["error"],
}
_STYLE = (
    ":root{color-scheme:light dark}nav{columns:16rem}nav a{display:block}code,a,td{overflow-wrap:anywhere}"
    "td:first-child{min-width:7rem}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border:1px solid #8884;padding:.2rem .5rem;text-align:left;"
    "vertical-align:top}code{font-size:.9em}h2{margin-top:2.5rem}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


async def openapi(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the API's description as OpenAPI 3.1."""
    return json_response(await anyio.to_thread.run_sync(partial(document, http.app.state.declared)))


async def page(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the API's description as an HTML page without scripts."""
    text = await anyio.to_thread.run_sync(lambda: as_html(document(http.app.state.declared)))
    return HTMLResponse(text, headers={"content-security-policy": _POLICY, "x-content-type-options": "nosniff"})


def document(routes: Sequence[RouteSpec]) -> Json:
    """Return the OpenAPI document of these routes, with the schemas of their bodies."""
    schemas: Json = {"Error": _ERROR}
    paths: Json = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in route.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": serve.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: RouteSpec, method: str, path: str, schemas: Json) -> Json:
    missing = unsupported.MISSING.get(route.path)
    summary = f"{missing}: not supported yet." if missing else (route.handler.__doc__ or "").strip().splitlines()[0]
    operation: Json = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": summary,
        "tags": [route.scope.name.lower()],
        "responses": {
            "501" if missing else "200": {"description": "The answer" if not missing else "Not supported yet"},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if route.scope is not RouteScope.PUBLIC:
        operation["security"] = [{"key": []}, {}]
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in names
        ]
    bodies = BODIES.get(route.handler, ())
    if bodies and method in ("POST", "PUT"):
        refs = [_reference(body, schemas) for body in bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


# --- schemas ---


def schema_of(annotation: Any, schemas: Json) -> Json:
    """Return the JSON schema of an annotation that `serve.calls.decode` supports.

    The schemas of dataclasses are added to `schemas`, and referred to.
    """
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        type(None): "null",
        None: "null",
    }
    if annotation is Any:
        return {}
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _limited(schema_of(args[0], schemas), args[1:])
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each, schemas) for each in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is list:
        return {"type": "array", "items": schema_of(args[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(args[1], schemas)}
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _reference(annotation, schemas)
    return {"type": names[annotation]}


def _limited(schema: Json, marks: Sequence[Any]) -> Json:
    for mark in marks:
        if isinstance(mark, Range):
            schema |= {"minimum": mark.low} if mark.low > -float("inf") else {}
            schema |= {"maximum": mark.high} if mark.high < float("inf") else {}
        elif isinstance(mark, Length):
            noun = {"array": "Items", "string": "Length", "object": "Properties"}.get(schema.get("type", ""), "")
            if noun:
                schema |= {f"min{noun}": mark.low} if mark.low else {}
                schema |= {f"max{noun}": mark.high} if mark.high < 2**63 else {}
    return schema


def _reference(cls: type, schemas: Json) -> Json:
    module = cls.__module__.removeprefix("serve.").removeprefix("calls.").replace(".schema", "")
    name = f"{module.replace('.', '_')}_{cls.__name__.strip('_')}"
    if name not in schemas:
        schemas[name] = {}  # set first, so that cyclic types end the recursion
        schemas[name] = _object(cls, schemas)
    return {"$ref": f"#/components/schemas/{name}"}


def _object(cls: type, schemas: Json) -> Json:
    hints = get_type_hints(cls, include_extras=True)
    properties: Json = {}
    required: list[str] = []
    for each in fields(cls):
        if not each.init or is_not_built(hints[each.name]):
            continue
        properties[each.name] = schema_of(hints[each.name], schemas)
        if each.default is MISSING and each.default_factory is MISSING:
            required.append(each.name)
        elif isinstance(each.default, bool | int | float | str):
            properties[each.name] = {**properties[each.name], "default": each.default}
    api: Api | None = getattr(cls, "api", None)
    if api is not None:
        properties |= _sampling(api, schemas)
    if cls is GenerateBody:
        schemas["sampling_params"] = {"type": "object", "properties": _sampling("native", schemas)}
        one = {"$ref": "#/components/schemas/sampling_params"}
        properties["sampling_params"] = {"anyOf": [one, {"type": "array", "items": one}, {"type": "null"}]}
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        **({"additionalProperties": False} if getattr(cls, "closed", False) else {}),
    }


def _sampling(api: Api, schemas: Json) -> Json:
    """Return the schemas of an API's sampling parameters."""
    properties: Json = {}
    for parameter in parameters():
        spec = parameter.spec
        limits: Json = {}
        if spec.low > -float("inf"):
            limits["exclusiveMinimum" if spec.above_low else "minimum"] = spec.low
        if spec.high < MAX_INT32:
            limits["maximum"] = spec.high
        for name in parameter.names_in(api):
            properties[name] = {**schema_of(parameter.json, schemas), **limits, "description": spec.help}
    return properties


# --- the page ---


def as_html(described: Json) -> str:
    """Return an HTML page with a table of the fields of every route."""
    return "".join(_html(described))


def _html(described: Json) -> Iterator[str]:
    yield "<!doctype html><html lang=en><meta charset=utf-8>"
    yield "<meta name=viewport content='width=device-width,initial-scale=1'>"
    yield f"<title>Penstock API</title><style>{_STYLE}</style>"
    yield "<h1>HTTP API</h1><p>The same content as <a href=/openapi.json>/openapi.json</a>, as a page.</p><nav>"
    for path in map(html.escape, described["paths"]):
        yield f"<a href='#{path}'>{path}</a> "
    yield "</nav>"
    schemas = described["components"]["schemas"]
    for path, operations in described["paths"].items():
        operation = next(iter(operations.values()))
        methods = ", ".join(method.upper() for method in operations)
        name = html.escape(path)
        yield f"<h2 id='{name}'><code>{methods} {name}</code></h2><p>{html.escape(operation['summary'])}</p>"
        body = next((each["requestBody"] for each in operations.values() if "requestBody" in each), None)
        if body is not None:
            schema = body["content"]["application/json"]["schema"]
            for each in schema.get("anyOf", [schema]):
                yield from _fields_table(schemas[each["$ref"].rpartition("/")[2]])


def _fields_table(schema: Json) -> Iterator[str]:
    yield "<table><tr><th>field<th>value<th>meaning"
    for name, value in schema["properties"].items():
        needed = " (required)" if name in schema.get("required", ()) else ""
        words = html.escape(_in_words(value) + needed)
        yield f"<tr><td><code>{html.escape(name)}</code><td>{words}<td>{html.escape(value.get('description', ''))}"
    yield "</table>"


def _in_words(schema: Json) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_in_words(each) for each in schema["anyOf"]))
    if "$ref" in schema:
        return schema["$ref"].rpartition("_")[2]
    if "enum" in schema:
        return " or ".join(f'"{each}"' for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_in_words(schema['items'])}"
    return schema.get("type", "anything")
