"""Build the Ray Serve application from options."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an optional dependency.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.config import Args
from runtime.config.resolve.lora import adapter_source
from runtime.config.resolve.serving import DEMO_NAME
from runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from ray.serve import Application

MAX_ONGOING = 1024  # requests that Ray Serve sends to one replica at a time; the engine queues them
DEFAULT_TARGET = 32
# Values of --request-router -> the class of Ray Serve's request router.
ROUTERS = {
    "prefix": "serve.on_ray.prefix_router.PrefixRouter",
    "round-robin": "ray.serve.experimental.round_robin_router.RoundRobinRouter",
    "power-of-two": "ray.serve._private.request_router.PowerOfTwoChoicesRequestRouter",
}


class Scaling(NamedTuple):
    """The number of a model's replicas, the resources of each, and the router that chooses one for a request."""

    low: int = 1
    high: int = 1
    target: int = DEFAULT_TARGET  # requests in progress per replica, the target of autoscaling
    num_cpus: float = 0.0  # CPUs that Ray reserves for a replica; 0 reserves none
    num_gpus: float | None = None  # GPUs that Ray reserves for a replica; None: one for each rank
    router: str = "prefix"  # a key of `ROUTERS`

    @classmethod
    def of(cls, replicas: str, target: int = DEFAULT_TARGET, **others: Any) -> Scaling:
        """Create a `Scaling` from a number such as `2`, or from a range such as `1..4` for autoscaling.

        Raises `ConfigurationError` for invalid values.
        """
        low, _, high = str(replicas).partition("..")
        try:
            scaling = cls(int(low), int(high or low), int(target), **others)
        except ValueError:
            raise ConfigurationError(f"--replicas {replicas} must be a number, or a range such as 1..4.") from None
        if not 1 <= scaling.low <= scaling.high or scaling.target < 1:
            raise ConfigurationError("--replicas and --target-ongoing-requests must be at least 1, the larger last.")
        if scaling.router not in ROUTERS:
            raise ConfigurationError(f"--request-router {scaling.router} must be one of {', '.join(ROUTERS)}.")
        return scaling


class Model(NamedTuple):
    """One model: its engine options as command-line arguments, and the scaling of its replicas."""

    words: list[str]
    scaling: Scaling

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Model:
        """Create a `Model` from a mapping of option names to values. Raises `ConfigurationError` for invalid values."""
        rest = dict(values)
        others: dict[str, Any] = {name: float(rest.pop(name)) for name in ("num_cpus", "num_gpus") if name in rest}
        if "request_router" in rest:
            others["router"] = str(rest.pop("request_router"))
        replicas, target = rest.pop("replicas", 1), rest.pop("target_ongoing_requests", DEFAULT_TARGET)
        return cls(words_of(rest), Scaling.of(str(replicas), int(target), **others))


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Convert engine options, a mapping from names to values, to command-line arguments."""
    words: list[str] = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value is True or value == "true":
            words.append(option)
        elif value is not False and value is not None and value != "false":
            items = value if isinstance(value, list | tuple) else [value]
            words += [option, *map(str, items)]
    return words


def build(models: Sequence[Model]) -> Application:
    """Return the application that serves these models at one address.

    Raises `ConfigurationError` for invalid options, equal model names, or no models.
    """
    from ray import serve

    from serve.on_ray.ingress import Ingress

    replicas, names = {}, {}
    for number, model in enumerate(models):
        args = Args.parse(model.words)
        known = names_of(args)
        if known[0] in replicas:
            raise ConfigurationError(f"Two models have the name {known[0]}; set --served-model-name.")
        replicas[known[0]] = _replicas(model, args, "engine" if number == 0 else f"engine-{number + 1}")
        names[known[0]] = known
    if not replicas:
        raise ConfigurationError("There is no model to serve.")
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        max_ongoing_requests=100 * MAX_ONGOING,
        graceful_shutdown_timeout_s=max(Args.parse(model.words).http.shutdown_timeout for model in models),
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(replicas, names)


def build_app(args: Mapping[str, Any]) -> Application:
    """Return the application for `serve run serve.on_ray:build_app NAME=VALUE ...`, or for `args` in a YAML file.

    `args` has the options of `penstock ray` with underscores: replicas, target_ongoing_requests, num_cpus, num_gpus,
    request_router, and every option of the server. If `models` is set, a list with the options of each model, the other
    options are defaults for all models. Raises `ConfigurationError` for invalid options.
    """
    common = dict(args)
    models = common.pop("models", None)
    if models is None:
        return build([Model.of(common)])
    if not isinstance(models, list) or not all(isinstance(each, Mapping) for each in models):
        raise ConfigurationError("models must be a list with the options of each model.")
    return build([Model.of({**common, **each}) for each in models])


def names_of(args: Args) -> tuple[str, ...]:
    """Return the served name of a model, its path, and the names of the adapters that it loads at the start."""
    path = args.model.model_path or DEMO_NAME
    sources = [adapter_source(text) for text in args.lora.lora_paths or ()]
    return args.http.served_model_name or path, path, *(source.name for source in sources if source is not None)


def _replicas(model: Model, args: Args, name: str) -> Application:
    """Return the deployment of one model's engines."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from serve.on_ray.replica import EngineReplica

    scaling = model.scaling
    if args.parallel.nnodes > 1:
        raise ConfigurationError("A replica runs on one machine; leave --nnodes out.")
    if scaling.low == scaling.high:
        number: dict[str, Any] = {"num_replicas": scaling.low}
    else:
        limits = {"min_replicas": scaling.low, "max_replicas": scaling.high, "target_ongoing_requests": scaling.target}
        number = {"autoscaling_config": limits}
    router: Any = ROUTERS[scaling.router]
    replica = serve.deployment(
        EngineReplica,
        name=name,
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=args.http.shutdown_timeout,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": scaling.num_cpus, "num_gpus": _num_gpus(args, scaling)},
        request_router_config=RequestRouterConfig(request_router_class=router),
        **number,
    )
    return replica.bind(list(model.words))


def _num_gpus(args: Args, scaling: Scaling) -> float:
    """Return the number of GPUs to reserve for a replica: --num-gpus if set, else one per rank, or 0 on a CPU."""
    if scaling.num_gpus is not None:
        return scaling.num_gpus
    from ops.machine import Machine

    parallel = args.parallel
    wants_cpu = args.get("device") == "cpu" or not Machine.probe().gpus
    return 0 if wants_cpu else parallel.tp_size * parallel.pp_size * parallel.dp_size
