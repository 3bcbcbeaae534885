"""Reads media from the sources that clients name: base64 text, allowed folders and allowed hosts."""

from __future__ import annotations

import binascii
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from runtime.config.plan import MediaPlan
from runtime.errors import InvalidRequest
from runtime.media_source import EXAMPLES, MediaSource

if TYPE_CHECKING:
    import httpx

PIECE = 2**17  # number of base64 characters decoded in one call, which takes 0.3 ms


class Fetcher:
    """Returns the content of media sources. Reads files and hosts only if the plan allows it."""

    def __init__(self, plan: MediaPlan) -> None:
        self._plan = plan
        self._client: httpx.AsyncClient | None = None

    async def read(self, source: MediaSource) -> Any:
        """Return the bytes of the file that the source names, or the source's Python object.

        Raises `InvalidRequest` if the source is not allowed or cannot be read. Cancellation closes the connection.
        """
        if source.form in ("bytes", "object"):
            return self._checked(source.content, source)
        if source.form == "base64":
            return await anyio.to_thread.run_sync(self._decode, source)
        if source.form == "path":
            return await anyio.to_thread.run_sync(self._read_file, source)
        return await self._fetch(source)

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    def _checked(self, content: Any, source: MediaSource) -> Any:
        if isinstance(content, bytes) and len(content) > self._plan.max_bytes:
            raise self._too_large(source)
        return content

    def _too_large(self, source: MediaSource) -> InvalidRequest:
        text = f"{source.param}: the {source.kind} has more than {self._plan.max_bytes} bytes."
        return InvalidRequest(text, param=source.param)

    def _decode(self, source: MediaSource) -> bytes:
        """Decode base64 text in pieces, because decoding holds the GIL."""
        text, param = source.content, source.param
        if len(text) > self._plan.max_bytes // 3 * 4 + 1024:
            raise self._too_large(source)
        decoded: list[bytes] = []
        rest = ""
        try:
            for start in range(0, len(text), PIECE):
                piece = rest + "".join(text[start : start + PIECE].split())
                whole = len(piece) // 4 * 4
                decoded.append(binascii.a2b_base64(piece[:whole], strict_mode=True))
                rest = piece[whole:]
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"{param} is not valid base64.", param=param) from error
        content = b"".join(decoded)  # releases the GIL for large contents
        if rest or not content:
            raise InvalidRequest(f"{param} is not valid base64.", param=param)
        return content

    def _read_file(self, source: MediaSource) -> bytes:
        path, param, folder = source.content, source.param, self._plan.folder
        if folder is None:
            raise InvalidRequest(
                f"{param}: files are not read; send the {source.kind} itself, or start the server with "
                "--allowed-local-media-path FOLDER.",
                param=param,
            )
        refusal = InvalidRequest(f"{param}: there is no such file in the allowed folder.", param=param)
        try:
            # Links are resolved before the check, and the file is opened only once.
            real, allowed = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
            if "\0" in path or not real.is_relative_to(allowed):
                raise refusal
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise refusal
                content = file.read(self._plan.max_bytes + 1)
        except (OSError, ValueError) as error:
            raise refusal from error
        return self._checked(content, source)

    async def _fetch(self, source: MediaSource) -> bytes:
        import httpx  # imported here, because it takes a tenth of a second and few servers fetch URLs

        param = source.param
        if not self._plan.domains:
            raise InvalidRequest(
                f"{param}: URLs are not fetched; send the {source.kind} itself (data:{EXAMPLES[source.kind]};base64,"
                "...), or start the server with --allowed-media-domains.",
                param=param,
            )
        try:
            with anyio.fail_after(self._plan.timeout_s):
                return await self._get(source)
        except TimeoutError:
            raise InvalidRequest(
                f"{param}: the {source.kind} did not arrive within {self._plan.timeout_s:g} s.", param=param
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise InvalidRequest(
                f"{param}: the {source.kind} cannot be fetched ({type(error).__name__}).", param=param
            ) from error

    async def _get(self, source: MediaSource) -> bytes:
        """Fetch a URL from an address that was checked. Redirects are refused, because they may lead to other hosts."""
        import httpx

        parsed, param = httpx.URL(source.content), source.param
        host = parsed.host
        if parsed.scheme not in ("http", "https") or parsed.userinfo or not _is_allowed(host, self._plan.domains):
            raise InvalidRequest(f"{param}: the server does not fetch from this host.", param=param)
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        named = host.lower() in self._plan.domains  # the operator named exactly this address
        if not addresses or not all(ipaddress.ip_address(address).is_global or named for address in addresses):
            raise InvalidRequest(f"{param}: the server does not fetch from this host.", param=param)
        if self._client is None:
            self._client = httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=self._plan.timeout_s)
        # The connection uses the checked address, so that a second DNS lookup cannot return another one.
        request = self._client.build_request(
            "GET",
            parsed.copy_with(host=addresses[0]),
            headers={
                "Host": parsed.netloc.decode("ascii"),
                "Accept": f"{source.kind}/*",
                "Accept-Encoding": "identity",
            },
            extensions={"sni_hostname": host},
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise InvalidRequest(f"{param}: the host answered {response.status_code}.", param=param)
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > self._plan.max_bytes:
                    raise self._too_large(source)
            return bytes(content)
        finally:
            await response.aclose()


def _is_allowed(host: str, domains: Sequence[str]) -> bool:
    """Return whether a host is one of these domains, or a subdomain of a domain that begins with "." or "*."."""
    host = host.lower().rstrip(".")
    for domain in domains:
        suffix = domain.removeprefix("*")
        if host == domain or (suffix.startswith(".") and host.endswith(suffix)):
            return True
    return False
