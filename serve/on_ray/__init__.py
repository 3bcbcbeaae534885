"""Serve replicas on a Ray cluster (the extra `ray`). Each replica is an engine in its own process.

    penstock ray --model-path DIR --replicas 1..4
    serve run serve.on_ray:build_app model_path=DIR replicas=2      # or `import_path: serve.on_ray:build_app` in YAML

All replicas share one address. The module `ingress` receives requests, `prefix_router` chooses a replica for each
request, and `replica` answers the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.on_ray.application import build_app

__all__ = ["build_app"]


def __getattr__(name: str) -> Any:
    if name != "build_app":
        raise AttributeError(f"module 'serve.on_ray' has no attribute '{name}'")
    from serve.on_ray.application import build_app

    return build_app
