"""`penstock ray`: serve a model with several replicas on a Ray cluster."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an optional dependency.

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from threading import Event
from typing import Any

from runtime.config import Args
from runtime.errors import ConfigurationError

REPLICA_OPTIONS = ("replicas", "target_ongoing_requests", "num_cpus", "num_gpus", "request_router")


def main(words: Sequence[str]) -> int:
    """Run `penstock ray` until a signal, and return 0. `words` are the arguments after `ray`.

    Raises `ConfigurationError` for invalid options, or if Ray Serve is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="penstock ray",
        description="Serve a model with several replicas on a Ray cluster, behind one address. Connects to the cluster "
        "of RAY_ADDRESS, or starts one on this machine. All other options are engine options: --model-path DIR ...",
    )
    parser.add_argument("--replicas", default="1", metavar="N or N..M", help="number of replicas; a range autoscales")
    parser.add_argument(
        "--target-ongoing-requests", type=int, default=32, metavar="N", help="requests per replica when autoscaling"
    )
    parser.add_argument(
        "--num-cpus",
        type=float,
        default=0,
        metavar="N",
        help="CPUs that Ray reserves per replica, and threads of its engine on a CPU (0: one thread)",
    )
    parser.add_argument("--num-gpus", type=float, metavar="N", help="GPUs per replica; default: one for each rank")
    parser.add_argument(
        "--request-router",
        default="prefix",
        choices=("prefix", "round-robin", "power-of-two"),
        help="how requests find a replica",
    )
    parser.add_argument(
        "--models-file", metavar="FILE", help="YAML list with the options of several models; other options are defaults"
    )
    parser.add_argument("--name", default="penstock", help="name of the application on the cluster")
    parser.add_argument("--route-prefix", default="/", metavar="PATH", help="path under which the model is served")
    options, rest = parser.parse_known_args(words)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 would slow engines beside other processes
    try:
        import ray
        from ray import serve
    except ImportError:
        raise ConfigurationError("penstock ray needs Ray Serve: pip install 'penstock[ray]'.") from None
    from serve.on_ray.application import Model, Scaling, build, build_app

    args = Args.parse(rest)
    if options.models_file is None:
        scaling = Scaling.of(
            options.replicas,
            options.target_ongoing_requests,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            router=options.request_router,
        )
        application = build([Model(rest, scaling)])
    else:
        common = {name: getattr(options, name) for name in REPLICA_OPTIONS if getattr(options, name) is not None}
        application = build_app({**common, **args.keywords(), "models": _models(options.models_file)})
    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": args.http.host, "port": args.http.port})
    serve.run(application, name=options.name, route_prefix=options.route_prefix)
    sys.stderr.write(f"Listening on http://{args.http.host}:{args.http.port}{options.route_prefix}\n")
    sys.stderr.write("The server is fired up and ready to roll!\n")
    ended = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    serve.delete(options.name)
    if not serve.status().applications:  # the cluster may serve other applications
        serve.shutdown()
    ray.shutdown()
    return 0


def _models(path: str) -> Any:
    """Return the content of a YAML file with the options of several models.

    Raises `ConfigurationError` if the file cannot be read.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--models-file {path} cannot be read: {error}") from None
