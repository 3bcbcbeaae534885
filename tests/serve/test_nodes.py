"""Two machines serve one model through one server. Network namespaces represent machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_checkpoints

ROOT = Path(__file__).parents[2]
FIRST, SECOND = "penstock-test-a", "penstock-test-b"
ASK = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}

pytestmark = pytest.mark.slow


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def remove() -> None:
    for name in (FIRST, SECOND):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def machines() -> Iterator[None]:
    """Create two network namespaces, 10.77.0.1 and 10.77.0.2, connected to each other and isolated from everything
    else.
    """
    remove()
    try:
        for name in (FIRST, SECOND):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "pt0", "netns", FIRST, "type", "veth", "peer", "name", "pt1", "netns", SECOND)
        for name, device, address in ((FIRST, "pt0", "10.77.0.1/24"), (SECOND, "pt1", "10.77.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", device)
            ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError):
        remove()
        pytest.skip("network namespaces need root and iproute2")
    yield
    remove()


def start(namespace: str, *words: str) -> subprocess.Popen[bytes]:
    path = tiny_checkpoints.cached("llama", max_position_embeddings=512)
    return subprocess.Popen(
        [
            *("ip", "netns", "exec", namespace, sys.executable, "-m", "serve", "--model-path", path),
            *("--skip-tokenizer-init", "--host", "127.0.0.1", "--port", "30123", *words),
        ],
        cwd=ROOT,
        env={**os.environ, "PENSTOCK_CLUSTER_TOKEN": "secret", "OMP_NUM_THREADS": "1"},
    )


def get(namespace: str, route: str, *words: str) -> str:
    """Return the body of a response of the server in this namespace, or "" if there is none yet."""
    command = ["ip", "netns", "exec", namespace, "curl", "-sf", f"http://127.0.0.1:30123{route}", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def ids() -> list[int]:
    """Wait for the server, and return the ids that it generates."""
    deadline = time.monotonic() + 60
    body = ["-H", "content-type: application/json", "-d", json.dumps(ASK)]
    while not (said := get(FIRST, "/generate", *body)):
        assert time.monotonic() < deadline, "the server did not come up"
        time.sleep(0.2)
    return json.loads(said)["output_ids"]


@pytest.mark.parametrize("parallel", [["--tp-size", "2"], ["--pp-size", "2"]], ids=["ranks", "stages"])
def test_two_machines_serve_one_model(machines: None, parallel: list[str]):
    alone = start(FIRST)
    expected = ids()
    alone.send_signal(signal.SIGTERM)
    alone.wait(30)
    words = [*parallel, "--nnodes", "2", "--dist-init-addr", "10.77.0.1:29500"]
    second = start(SECOND, *words, "--node-rank", "1")
    first = start(FIRST, *words)
    try:
        assert ids() == expected
        first.send_signal(signal.SIGTERM)
        first.wait(30)
        assert second.wait(10) == 0  # it ends with the first machine
    finally:
        first.kill()
        second.kill()


def test_lost_machine_ends_the_engine(machines: None):
    words = ["--tp-size", "2", "--nnodes", "2", "--dist-init-addr", "10.77.0.1:29500"]
    second = start(SECOND, *words, "--node-rank", "1")
    first = start(FIRST, *words)
    try:
        ids()
        second.kill()
        assert first.wait(10) == 1
    finally:
        first.kill()
        second.kill()
