"""HTTPS with certificates that the test creates."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import fake_core
import http_server
import tiny_models
from runtime.config import Args
from runtime.errors import ConfigurationError
from runtime.tokenizer.tokenizer import Tokenizer
from serve.server.connection import Connection
from serve.server.process import uvicorn_config
from serve.server.tls import tls_context
from served_core import app_of
from server_process import serving

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="the program openssl makes the certificates")


def openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run([str(OPENSSL), *arguments], cwd=cwd, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem and key.pem for 127.0.0.1, locked.pem (the key with the password "word"), and other.pem
    (of another server).
    """
    folder = tmp_path_factory.mktemp("tls")
    make = (
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    )
    name = ("-subj", "/CN=penstock", "-addext", "subjectAltName=IP:127.0.0.1")
    openssl(*make, *name, "-keyout", "key.pem", "-out", "cert.pem", cwd=folder)
    openssl(*make, *name, "-keyout", "other.pem", "-out", "other-cert.pem", cwd=folder)
    openssl("pkcs8", "-topk8", "-in", "key.pem", "-passout", "pass:word", "-out", "locked.pem", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return fake_core.load_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def options(folder: Path, **names: str) -> dict[str, Any]:
    files = {f"ssl_{option}": str(folder / name) for option, name in names.items()}
    if "password" in names:
        files["ssl_keyfile_password"] = names["password"]
        del files["ssl_password"]
    return files


@pytest.mark.parametrize("locked", [False, True])
async def test_streams_come_over_https_and_plain_http_is_not_answered(
    folder: Path, tokenizer: Tokenizer, locked: bool
) -> None:
    key: dict[str, str] = {"keyfile": "locked.pem", "password": "word"} if locked else {"keyfile": "key.pem"}
    core = fake_core.FakeCore(tokenizer, **options(folder, certfile="cert.pem", **key))
    config = uvicorn_config(core)  # pyright: ignore[reportArgumentType]
    async with http_server.serving(app_of(core), http=Connection, tls=config.ssl) as url:
        url = url.replace("http:", "https:")
        trusted = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        async with httpx.AsyncClient(base_url=url, verify=trusted) as client:
            body = {"text": "Hi", "stream": True}
            async with client.stream("POST", "/generate", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert response.status_code == 200
            assert lines[-1] == "data: [DONE]"
            assert len(lines) > 3
        async with httpx.AsyncClient(base_url=url) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/health")
        async with httpx.AsyncClient(base_url=url.replace("https:", "http:")) as plain:
            with pytest.raises(httpx.RequestError):
                await plain.get("/health")


async def test_clients_show_a_certificate_where_authorities_are_named(folder: Path, tokenizer: Tokenizer) -> None:
    files = options(folder, certfile="cert.pem", keyfile="key.pem", ca_certs="other-cert.pem")
    core = fake_core.FakeCore(tokenizer, **files)
    config = uvicorn_config(core)  # pyright: ignore[reportArgumentType]
    async with http_server.serving(app_of(core), http=Connection, tls=config.ssl) as url:
        url = url.replace("http:", "https:")
        for cert, is_known in ((None, False), ("cert.pem", False), ("other-cert.pem", True)):
            trusted = ssl.create_default_context(cafile=str(folder / "cert.pem"))
            if cert is not None:
                trusted.load_cert_chain(folder / cert, folder / ("other.pem" if is_known else "key.pem"))
            async with httpx.AsyncClient(base_url=url, verify=trusted) as client:
                if is_known:
                    assert (await client.get("/health")).status_code == 200
                else:
                    with pytest.raises(httpx.RequestError):
                        await client.get("/health")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"keyfile": "key.pem"}, "--ssl-keyfile requires --ssl-certfile"),
        ({"ca_certs": "cert.pem"}, "--ssl-ca-certs requires --ssl-certfile"),
        ({"certfile": "none.pem"}, "No such file"),
        ({"certfile": "cert.pem"}, "the key is missing"),
        ({"certfile": "cert.pem", "keyfile": "other.pem"}, "the key does not belong to the certificate"),
        (
            {"certfile": "cert.pem", "keyfile": "locked.pem"},
            "its password differs from --ssl-keyfile-password",
        ),
        (
            {"certfile": "cert.pem", "keyfile": "locked.pem", "password": "wrong-word"},
            "its password differs from --ssl-keyfile-password",
        ),
        (
            {"certfile": "cert.pem", "keyfile": "key.pem", "ca_certs": "key.pem"},
            "it contains no certificates",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(folder: Path, names: dict[str, str], words: str) -> None:
    args = Args()
    with pytest.raises(ConfigurationError, match=words) as caught:
        tls_context(replace(args.http, **options(folder, **names)))
    assert "wrong-word" not in str(caught.value)


@pytest.mark.slow
def test_the_server_says_https_and_ends_in_time_with_idle_connections(folder: Path) -> None:
    files = ("--ssl-certfile", str(folder / "cert.pem"), "--ssl-keyfile", str(folder / "key.pem"))
    trusted = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    with serving("--model-path", tiny_models.cached(), *files) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=trusted, timeout=60) as client:
            answer = client.post("/generate", json={"text": "Once", "sampling_params": {"max_new_tokens": 4}})
            assert len(answer.json()["output_ids"]) == 4
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=20) == 0
