"""Build the Ray Serve application from options."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an optional dependency.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.config import Args
from runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from ray.serve import Application

MAX_ONGOING = 1024  # requests that Ray Serve sends to one replica at a time; the engine queues them
DEFAULT_TARGET = 32
ROUTER: Any = "serve.on_ray.prefix_router.PrefixRouter"


class Scaling(NamedTuple):
    """The number of replicas, and the resources of each."""

    low: int = 1
    high: int = 1
    target: int = DEFAULT_TARGET  # requests in progress per replica, the target of autoscaling
    num_cpus: float = 0.0  # CPUs that Ray reserves for a replica; 0 reserves none
    num_gpus: float | None = None  # GPUs that Ray reserves for a replica; None: one for each rank

    @classmethod
    def of(cls, replicas: str, target: int = DEFAULT_TARGET, **resources: Any) -> Scaling:
        """Read a number such as `2`, or a range such as `1..4` for autoscaling. Raises `ConfigurationError`."""
        low, _, high = str(replicas).partition("..")
        try:
            scaling = cls(int(low), int(high or low), int(target), **resources)
        except ValueError:
            raise ConfigurationError(f"--replicas {replicas} must be a number, or a range such as 1..4.") from None
        if not 1 <= scaling.low <= scaling.high or scaling.target < 1:
            raise ConfigurationError("--replicas and --target-ongoing-requests must be at least 1, the larger last.")
        return scaling


def build(words: Sequence[str], scaling: Scaling) -> Application:
    """Return the application for these engine options (as on the command line). Raises `ConfigurationError`."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from serve.on_ray.ingress import Ingress
    from serve.on_ray.replica import EngineReplica

    args = Args.parse(words)
    if args.parallel.nnodes > 1:
        raise ConfigurationError("A replica runs on one machine; leave --nnodes out.")
    if scaling.low == scaling.high:
        number: dict[str, Any] = {"num_replicas": scaling.low}
    else:
        limits = {"min_replicas": scaling.low, "max_replicas": scaling.high, "target_ongoing_requests": scaling.target}
        number = {"autoscaling_config": limits}
    replica = serve.deployment(
        EngineReplica,
        name="engine",
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=args.http.shutdown_timeout,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": scaling.num_cpus, "num_gpus": _num_gpus(args, scaling)},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **number,
    )
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        max_ongoing_requests=100 * MAX_ONGOING,
        graceful_shutdown_timeout_s=args.http.shutdown_timeout,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(replica.bind(list(words)))


def build_app(args: Mapping[str, Any]) -> Application:
    """Return the application for `serve run serve.on_ray:build_app NAME=VALUE ...`, or for `args` in a YAML file.

    Names are the options of `penstock ray` with underscores: replicas, target_ongoing_requests, num_cpus, num_gpus, and
    every option of the server. Raises `ConfigurationError`.
    """
    values = dict(args)
    resources = {name: float(values.pop(name)) for name in ("num_cpus", "num_gpus") if name in values}
    scaling = Scaling.of(
        str(values.pop("replicas", 1)), int(values.pop("target_ongoing_requests", DEFAULT_TARGET)), **resources
    )
    words: list[str] = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value is True or value == "true":
            words.append(option)
        elif value is not False and value != "false":
            items = value if isinstance(value, list | tuple) else [value]
            words += [option, *map(str, items)]
    return build(words, scaling)


def _num_gpus(args: Args, scaling: Scaling) -> float:
    """Return the number of GPUs of a replica. All its ranks run on one machine, so one reservation covers them."""
    if scaling.num_gpus is not None:
        return scaling.num_gpus
    from ops.machine import Machine

    parallel = args.parallel
    wants_cpu = args.get("device") == "cpu" or not Machine.probe().gpus
    return 0 if wants_cpu else parallel.tp_size * parallel.pp_size * parallel.dp_size
