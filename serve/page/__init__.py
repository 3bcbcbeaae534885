"""Static files of the chat page at `/`, and of the page at `/live` that shows the engine's activity.

The pages' content security policy allows only resources of this server and `data:` images.
"""

from __future__ import annotations

from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

# URL path -> file. All are served without an API key.
PATHS = MappingProxyType(
    {
        "/": "chat.html",
        "/page/chat.css": "chat.css",
        "/page/chat.js": "chat.js",
        "/page/answer.js": "answer.js",
        "/page/code.js": "code.js",
        "/page/saved.js": "saved.js",
        "/page/markdown.js": "markdown.js",
        "/page/stream.js": "stream.js",
        "/live": "live.html",
        "/page/live.css": "live.css",
        "/page/live.js": "live.js",
    }
)
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers must ask for new versions, because an upgrade changes the scripts
}
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def page_routes() -> list[Route]:
    """Return the routes of the pages' files, for GET and HEAD. Each file is read only once."""
    return [_route(path, name) for path, name in PATHS.items()]


def _route(path: str, name: str) -> Route:
    content = files(__name__).joinpath(name).read_bytes()
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]

    async def answer(http: HttpRequest) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, answer, methods=["GET"])
