"""A Ray cluster of this machine, for tests."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (Ray is an extra.)

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

ATTEMPTS = 5  # on a busy machine, Ray's node gives up if its agent needs more than 15 s to start


@contextmanager
def ray_serve(num_cpus: int) -> Iterator[str]:
    """Start Ray with Ray Serve, and yield its address. Both end with the context."""
    import ray
    from ray import serve

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for attempt in range(ATTEMPTS):
        try:
            ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
            break
        except Exception as error:
            for process in psutil.Process().children(recursive=True):  # a failed start leaves its processes behind
                if "/ray/" in " ".join(process.cmdline()):
                    process.kill()
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt + 1 == ATTEMPTS:
                raise
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
