"""SGLang's routes for external corpora, from which prompt lookup (NGRAM) proposes draft tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from serve.calls.corpora import AddCorpusBody, RemoveCorpusBody, add_corpus, list_corpora, remove_corpus
from serve.http.endpoint import decodes, json_response, read_as
from serve.http.errors import ErrorFormat, native_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

ERROR_FORMAT = ErrorFormat(lambda failure: {**native_body(failure), "success": False, "message": failure.message})


@decodes(AddCorpusBody)
async def add(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Add a corpus of texts, from which NGRAM proposes draft tokens. Answers when all replicas use the corpus."""
    return json_response(await add_corpus(core, await read_as(http, AddCorpusBody)))


@decodes(RemoveCorpusBody)
async def remove(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Remove a corpus, by its id."""
    body = await read_as(http, RemoveCorpusBody)
    return json_response(await remove_corpus(core, body.corpus_id))


async def list_all(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the number of tokens of each corpus, by its id."""
    return json_response(list_corpora(core))
